"""What a plan needs to know of a model: parameters, operations and bytes of each layer, of one sample."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from app.config.plan import Precision
from app.config.plan_rules import ModelTraits

PRECISION_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Work:
    """A forward pass of one sample, by class of operation. An addition and a multiplication count as two."""

    matmul_flops: float = 0.0
    """Products with weights, and convolutions."""
    matmul_bytes: float = 0.0
    """Inputs and outputs of these products. Weights count apart, because they are read once for all samples."""
    attention_flops: float = 0.0
    """Products of queries, keys and values, masked or not."""
    attention_bytes: float = 0.0
    """Scores that attention writes and reads again. Fused attention has none."""
    moved_bytes: float = 0.0
    """Read and written by operations that memory bounds, such as norms, activations and additions."""
    kernels: float = 0.0
    """Operations that are launched, whatever the batch."""

    @property
    def flops(self) -> float:
        """All floating-point operations that are counted."""
        return self.matmul_flops + self.attention_flops

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.matmul_bytes + other.matmul_bytes,
            self.attention_flops + other.attention_flops,
            self.attention_bytes + other.attention_bytes,
            self.moved_bytes + other.moved_bytes,
            self.kernels + other.kernels,
        )

    def __mul__(self, factor: float) -> "Work":
        return Work(
            self.matmul_flops * factor,
            self.matmul_bytes * factor,
            self.attention_flops * factor,
            self.attention_bytes * factor,
            self.moved_bytes * factor,
            self.kernels * factor,
        )


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that autograd keeps of one sample for the backward pass of a layer, by what can reduce them.

    ``selected`` is no part of the others.
    """

    whole: float = 0.0
    """Kept whole by each rank of a tensor group. Sequence parallelism splits them."""
    split: float = 0.0
    """Split over a tensor group."""
    attention: float = 0.0
    """Split over a tensor group, and computed again by selective recomputation."""
    selected: float = 0.0
    """Kept by selective recomputation of operations, beside the layer's input: every other product, and attention."""

    @property
    def total(self) -> float:
        """All of them, without parallelism."""
        return self.whole + self.split + self.attention


@dataclass(frozen=True)
class LayerProfile:
    """One layer, as a pipeline may cut the model before and after it."""

    name: str
    parameters: int
    """Elements of its parameters. A tied parameter counts in each layer that uses it."""
    split_parameters: int
    """Those of them that tensor parallelism splits."""
    whole_work: Work
    """What each rank of a tensor group repeats."""
    split_work: Work
    """What a tensor group shares out. Without tensor parallelism a rank does both."""
    saved: SavedActivations
    boundary_bytes: float
    """The output that the next layer takes, of one sample."""
    column_inputs: int = 0
    """Different inputs of matrices that tensor parallelism cuts by columns; each needs the sum of its gradients."""
    row_cuts: int = 0
    """Matrices that it cuts by rows; each needs the sum of its outputs."""
    tied: str | None = None
    """Names the parameter that another layer uses too; all of this layer's parameters are tied."""
    tensor_shapes: tuple[tuple[int, ...], ...] = ()
    """Shape of each parameter, in the model's order. Empty: not known."""

    @property
    def tensor_sizes(self) -> tuple[int, ...]:
        """Elements of each parameter, in the model's order. Empty: not known."""
        return tuple(map(prod, self.tensor_shapes))

    @property
    def work(self) -> Work:
        """The whole forward pass of one sample."""
        return self.whole_work + self.split_work

    def parameters_of(self, tensor: int) -> float:
        """Return the elements that a rank of a tensor group holds."""
        return self.parameters - self.split_parameters * (1 - 1 / tensor)

    def largest_parameter(self, tensor: int) -> float:
        """Return the elements of the largest parameter that a rank of a tensor group holds; of all, if unknown."""
        share = self.parameters_of(tensor) / self.parameters if self.parameters else 0.0
        return max(self.tensor_sizes, default=self.parameters) * share


@dataclass(frozen=True)
class ModelProfile:
    """A model, and the sample that it is trained on. Bytes are those of ``precision``."""

    name: str
    precision: Precision
    layers: tuple[LayerProfile, ...]
    traits: ModelTraits
    hidden: int = 0
    """Width between layers. 0: not a Transformer."""
    heads: int = 0
    feed_forward: int = 0
    sequence: int = 1
    """Tokens of a sample. 1: not a sequence."""
    vocabulary: int = 0
    """Width of the last layer's output."""
    sample_bytes: float = 0.0
    """Inputs and targets of one sample."""
    output_bytes: float = 0.0
    """The last layer's output of one sample."""

    @property
    def parameters(self) -> int:
        """Elements of all parameters. Tied ones count once."""
        return count_parameters(self.layers)

    @property
    def element_bytes(self) -> int:
        """Bytes of a number in the model's precision."""
        return PRECISION_BYTES[self.precision]

    @property
    def work(self) -> Work:
        """The forward pass of one sample through all layers."""
        return sum((layer.work for layer in self.layers), Work())


def count_parameters(layers: Iterable[LayerProfile]) -> int:
    """Return the elements of all parameters of ``layers``. Those tied to each other count once."""
    tied: dict[str, int] = {}
    own = 0
    for layer in layers:
        if layer.tied:
            tied[layer.tied] = layer.parameters
        else:
            own += layer.parameters
    return own + sum(tied.values())
