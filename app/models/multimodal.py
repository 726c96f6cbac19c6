"""Models of records: samples of several fields, of which some may be missing."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from app.config import ModelConfig
from app.errors import RecipeError
from app.models.factory import build_model, logits_of


class LateFusion(nn.Module):
    """An encoder for each field, and a perceptron that combines their vectors.

    A learned vector replaces a missing field. Its encoder does not run if a call has no tensors of it. A call with
    tensors of all fields also says which rows have each, in ``FIELD_present``. Its graph does not depend on these rows.
    """

    def __init__(self, encoders: Mapping[str, nn.Module], num_labels: int, width: int, dropout: float) -> None:
        """``encoders`` are by the name of the field. Each returns vectors of shape (rows, width)."""
        super().__init__()
        self._fields = list(encoders)
        self._arguments = [list(inspect.signature(encoder.forward).parameters) for encoder in encoders.values()]
        # A list, because a field may have the name of a method of modules, such as "type".
        self.encoders = nn.ModuleList(encoders.values())
        self.missing = nn.Parameter(0.02 * torch.randn(len(encoders), width))
        self.joined = nn.Sequential(
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(len(encoders) * width, width),
            nn.GELU(),
            nn.Linear(width, num_labels),
        )

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return outputs (rows, labels) for the tensors ``FIELD_NAME`` of one field or more."""
        vectors = [self._encode(place, tensors) for place in range(len(self._fields))]
        # The export would record ``len`` as a constant.
        rows = next(vector.shape[0] for vector in vectors if vector is not None)
        filled = [
            self.missing[place].expand(rows, -1) if vector is None else vector for place, vector in enumerate(vectors)
        ]
        outputs: Tensor = self.joined(torch.cat(filled, dim=1))
        return outputs

    def _encode(self, place: int, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return the vectors of a field, of shape (rows, width); None if it has no tensors."""
        field = self._fields[place]
        given = {
            name: found for name in self._arguments[place] if (found := tensors.get(f"{field}_{name}")) is not None
        }
        if not given:
            return None
        vectors = logits_of(self.encoders[place](**given))
        present = tensors.get(f"{field}_present")
        return vectors if present is None else torch.where(present > 0, vectors, self.missing[place])


def _with_named_inputs(encoders: Mapping[str, nn.Module]) -> type[LateFusion]:
    """Return the class whose ``forward`` names the tensors of these fields, as an export needs."""

    def forward(self: LateFusion, **tensors: Tensor) -> Tensor:
        return self.join(tensors)

    names = [
        f"{field}_{name}"
        for field, encoder in encoders.items()
        for name in (*inspect.signature(encoder.forward).parameters, "present")
    ]
    kinds = inspect.Parameter
    named = [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in names]
    setattr(forward, "__signature__", inspect.Signature([kinds("self", kinds.POSITIONAL_ONLY), *named]))  # noqa: B010
    return type(LateFusion.__name__, (LateFusion,), {"forward": forward, "__doc__": LateFusion.__doc__})


def late_fusion(
    num_labels: int, facts: Mapping[str, int], encoders: Mapping[str, Any], width: int = 64, dropout: float = 0.1
) -> nn.Module:
    """Return a model of records with an encoder for each field.

    Args:
        num_labels, facts: properties of the data.
        encoders: for each field a ``factory`` and its ``args``, as in ``model``. Any model with ``num_labels`` outputs
            will do: it gets ``width`` as their number.
        width: numbers in the vector of each field.
        dropout: share of these numbers that are dropped in training.
    """
    if len(encoders) != (num_fields := facts.get("num_fields", 0)):
        raise RecipeError(
            f"model.args.encoders has {', '.join(encoders) or 'none'}, and the data have {num_fields} fields: give an "
            "encoder for each of data.columns.fields"
        ).of("encoders.incomplete", "model.args.encoders")
    built = {}
    for field, given in encoders.items():
        of_field = {
            name.removeprefix(f"{field}_"): value for name, value in facts.items() if name.startswith(f"{field}_")
        }
        if not of_field:
            raise RecipeError(f"model.args.encoders has {field!r}, which data.columns.fields does not have").of(
                "encoders.unknown", "model.args.encoders"
            )
        try:
            config = ModelConfig.model_validate(given)
        except ValidationError as error:
            raise RecipeError(f"model.args.encoders.{field} is {given!r}: expected a factory and its args").of(
                "encoders.invalid", "model.args.encoders"
            ) from error
        try:
            built[field] = build_model(config, of_field | {"num_labels": width})
        except RecipeError as error:
            raise RecipeError(f"model.args.encoders.{field}: {error}").of(
                "encoders.invalid", "model.args.encoders"
            ) from error
    return _with_named_inputs(built)(built, num_labels, width, dropout)
