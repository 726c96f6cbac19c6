"""The layers of a model and the way to split its matrices, checked against its parameters."""

import re
from collections.abc import Iterable
from typing import get_args

from torch import nn

from app.errors import RecipeError
from app.models.decoder_stages import DecoderStages
from app.models.staged import Layer, ShardStyle, Staged, Tied


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the model's layers, after checking that together they hold exactly its parameters.

    Raises:
        RecipeError: the model has no layers, or a parameter is missing, foreign, or in two layers that do not tie it;
            it is named.
    """
    layers = _require_stages(model).layers()
    # By identity, because a layer has other names for its parameters than the model.
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
    return DecoderStages.of(model)


def _require_stages(model: nn.Module) -> Staged:
    stages = stages_of(model)
    if stages is None:
        raise _wrong(model, "it has no layers() and tp_plan(): write them as docs/how-to/split_a_model.md shows")
    return stages


def _wrong(model: nn.Module, problem: str) -> RecipeError:
    return RecipeError(f"model {type(model).__name__} cannot be cut: {problem}").of("model.not_cut")
