"""The methods with which a model can be split over workers, as docs/how-to/split_a_model.md shows."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from torch import Tensor, nn
from torch.nn import functional

from app.errors import RecipeError

ShardStyle = Literal["colwise", "rowwise"]
"""How a Linear is cut. colwise: its outputs are split, with their bias; rowwise: its inputs, and it adds up."""


@dataclass(frozen=True)
class Tied:
    """One use of a module whose weight is tied: several layers use it, as an embedding that is also the output layer.

    Attributes:
        module: its only parameter, ``weight``, is what is tied; each stage that uses it holds it.
        forward: from the module and the tensor of the layer before to the tensor for the next. A function
            that does not hold the model, or every stage would hold the whole of it.
    """

    module: nn.Module
    forward: Callable[[Any, Tensor], Tensor]

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.forward(self.module, inputs)


Layer = nn.Module | Tied


@runtime_checkable
class Staged(Protocol):
    """A model that can be cut."""

    def layers(self) -> list[Layer]:
        """Layers that run one after the other *are* the model.

        The first takes ``input_ids``, int64 of shape (batch, length); each gives one tensor to the next,
        the batch first; the last gives logits, (batch, length, vocabulary). A parameter stands in one
        layer alone, or in ``Tied`` ones.
        """
        ...

    def tp_plan(self) -> Mapping[str, ShardStyle]:
        """Which Linear is cut how, by a regular expression that the whole of its name in the model matches.

        What lies between a ``colwise`` and the ``rowwise`` that takes its outputs sees a part of the columns,
        so it must take its width from the tensor that it gets. A Linear that nothing matches stays whole.
        A model whose parts must hold whole heads of attention says how many there are, as ``heads``.
        """
        ...


def run_layers(layers: Iterable[Layer], inputs: Tensor) -> Tensor:
    """What the last layer makes of ``inputs``."""
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
    """The model's layers, checked: together they hold each of its parameters, and no other.

    Raises:
        RecipeError: the model has no layers, a parameter is missing or from elsewhere, or is in two layers
            that do not tie it; it is named.
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
    """How each Linear of the model is cut, by its name in the model; those that stay whole are left out.

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
    """The parameters that a stage with this layer holds, by name."""
    return (layer.module if isinstance(layer, Tied) else layer).named_parameters()


def stages_of(model: nn.Module) -> Staged | None:
    """Return how the model can be cut: by its own methods, or as a known decoder of ``transformers``. None: not."""
    if isinstance(model, Staged):
        return model
    from app.models.decoder_stages import DecoderStages  # it builds on this module

    return DecoderStages.of(model)


def _require_stages(model: nn.Module) -> Staged:
    stages = stages_of(model)
    if stages is None:
        raise _wrong(model, "it has no layers() and tp_plan(): write them as docs/how-to/split_a_model.md shows")
    return stages


def _wrong(model: nn.Module, problem: str) -> RecipeError:
    return RecipeError(f"model {type(model).__name__} cannot be cut: {problem}")
