"""The methods that let a model be split over workers. See docs/how-to/split_a_model.md."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn import functional

from app.torch_internals import keep_uncompiled

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


@keep_uncompiled  # the compiler does not see that ZeRO 3 gathers the weight of a module that does not run
def unembed(tokens: nn.Embedding, hidden: Tensor) -> Tensor:
    """Return the logits of tokens: the last use of a tied embedding."""
    return functional.linear(hidden, tokens.weight)
