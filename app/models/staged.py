"""The methods that let a model be split over workers. See docs/how-to/split_a_model.md."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch import Tensor, nn
from torch.nn import functional

from app.errors import RecipeError

ShardStyle = Literal["colwise", "rowwise"]
"""The way to split a Linear. colwise splits its outputs, with their bias. rowwise splits its inputs, and adds up."""


@dataclass(frozen=True)
class Tied:
    """One use of a module with a tied weight, such as an embedding that is also the output layer.

    Attributes:
        module: its only parameter, ``weight``, is the tied one. Each stage that uses the module holds it.
        forward: maps the module and the previous layer's tensor to the tensor for the next layer. It must not refer
            to the model, or every stage would hold all of it.
    """

    module: nn.Module
    forward: Callable[[Any, Tensor], Tensor]

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.forward(self.module, inputs)


Layer = nn.Module | Tied


@runtime_checkable
class Staged(Protocol):
    """A model that can be split."""

    def layers(self) -> list[Layer]:
        """Return the layers whose composition is the model.

        The first takes ``input_ids``, int64 of shape (batch, length). Each passes one tensor, with the batch first, to
        the next. The last returns logits (batch, length, vocabulary). A parameter belongs to a single layer, or to
        several ``Tied`` ones.
        """
        ...

    def tp_plan(self) -> Mapping[str, ShardStyle]:
        """Return the way to split each Linear, by a regular expression that matches its full name in the model.

        A module between a ``colwise`` Linear and the ``rowwise`` one that takes its outputs sees a part of the columns,
        so it must take its width from its input. A Linear without a match stays whole. If each part must hold whole
        attention heads, the model has their number as ``heads``.
        """
        ...


def run_layers(layers: Iterable[Layer], inputs: Tensor) -> Tensor:
    """Return the output of the last layer."""
    for layer in layers:
        inputs = layer(inputs)
    return inputs


def embed(tokens: nn.Embedding, input_ids: Tensor) -> Tensor:
    """Return the embedding of tokens: the first use of a tied embedding."""
    embedded: Tensor = tokens(input_ids)
    return embedded


def unembed(tokens: nn.Embedding, hidden: Tensor) -> Tensor:
    """Return the logits of tokens: the last use of a tied embedding."""
    return functional.linear(hidden, tokens.weight)


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the model's layers, after checking that together they hold exactly its parameters.

    Raises:
        RecipeError: the model has no layers, or a parameter is missing, foreign, or in two layers that do not tie it;
            it is named.
    """
    layers = _require_stages(model).layers()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held: dict[int, Layer] = {}
    for position, layer in enumerate(layers):
        for name, parameter in parameters_of(layer):
            known = names.get(id(parameter))
            if known is None:
                raise _wrong(model, f"layer {position} holds {name!r}, which the model does not: keep it in the model")
            if isinstance(layer, Tied) and name != "weight":
                raise _wrong(model, f"layer {position} ties {known!r}: only a parameter named weight can be tied")
            first = held.setdefault(id(parameter), layer)
            if first is not layer and not (isinstance(first, Tied) and isinstance(layer, Tied)):
                raise _wrong(model, f"layer {position} holds {known!r}, and so does one before it: put both in Tied")
    if missing := [name for key, name in names.items() if key not in held]:
        raise _wrong(model, f"no layer holds {', '.join(missing)}: add the layer that does")
    return layers


def cuts_of(model: nn.Module) -> dict[str, ShardStyle]:
    """Return the way to split each Linear, by its name in the model. Those that stay whole are left out.

    Raises:
        RecipeError: the model has no plan, or a pattern matches no Linear, or one that another pattern matches, or is
            neither colwise nor rowwise.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    cuts: dict[str, ShardStyle] = {}
    for pattern, cut in _require_stages(model).tp_plan().items():
        if cut not in get_args(ShardStyle):
            raise _wrong(model, f"tp_plan has {cut!r} for {pattern!r}: expected {' or '.join(get_args(ShardStyle))}")
        matched = [name for name in linears if re.fullmatch(pattern, name)]
        if not matched:
            raise _wrong(model, f"tp_plan's {pattern!r} matches no Linear; there are {', '.join(linears) or 'none'}")
        if twice := [name for name in matched if name in cuts]:
            raise _wrong(model, f"tp_plan has two patterns for {twice[0]!r}: leave one")
        cuts |= dict.fromkeys(matched, cut)
    return cuts


def parameters_of(layer: Layer) -> Iterable[tuple[str, nn.Parameter]]:
    """Return the named parameters that a stage with this layer holds."""
    return (layer.module if isinstance(layer, Tied) else layer).named_parameters()


def stages_of(model: nn.Module) -> Staged | None:
    """Return the model, or a view of a known decoder of ``transformers``. None if it cannot be split."""
    if isinstance(model, Staged):
        return model
    if not hasattr(model, "config"):  # models of transformers have one
        return None
    from app.models.decoder_stages import DecoderStages  # it builds on this module

    return DecoderStages.of(model)


def _require_stages(model: nn.Module) -> Staged:
    stages = stages_of(model)
    if stages is None:
        raise _wrong(model, "it has no layers() and tp_plan(): write them as docs/how-to/split_a_model.md shows")
    return stages


def _wrong(model: nn.Module, problem: str) -> RecipeError:
    return RecipeError(f"model {type(model).__name__} cannot be cut: {problem}")
