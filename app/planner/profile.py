"""What a plan needs to know of a model: parameters, operations and bytes of each layer, of one sample."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from app.config.plan import Precision
from app.config.plan_rules import ModelTraits

PRECISION_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Work:
    """The forward pass of one sample through a layer, by class of operation."""

    matmul_flops: float = 0.0
    """Products with weights. An addition and a multiplication count as two, as in all of these."""
    attention_flops: float = 0.0
    """Products of queries, keys and values, masked or not."""
    other_flops: float = 0.0
    """Convolutions."""
    moved_bytes: float = 0.0
    """Read and written by operations that memory bounds, such as norms, activations and additions."""
    kernels: int = 0
    """Operations that are launched, whatever the batch."""

    @property
    def flops(self) -> float:
        """All floating-point operations that are counted."""
        return self.matmul_flops + self.attention_flops + self.other_flops

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.attention_flops + other.attention_flops,
            self.other_flops + other.other_flops,
            self.moved_bytes + other.moved_bytes,
            self.kernels + other.kernels,
        )


@dataclass(frozen=True)
class LayerProfile:
    """One layer, as a pipeline may cut the model before and after it."""

    name: str
    parameters: int
    """Elements of its parameters. A tied parameter counts in each layer that uses it."""
    split_parameters: int
    """Those of them that tensor parallelism splits."""
    work: Work
    saved_bytes: float
    """Activations that autograd keeps for the backward pass, of one sample."""
    split_saved_bytes: float
    """Those of them that tensor parallelism splits, without sequence parallelism."""
    boundary_bytes: float
    """The output that the next layer takes, of one sample."""
    tied: str | None = None
    """Names the parameter that another layer uses too; all of this layer's parameters are tied."""
    split_matrices: tuple[int, int] = (0, 0)
    """Matrices that tensor parallelism cuts by columns, and by rows."""
    tensor_sizes: tuple[int, ...] = ()
    """Elements of each parameter, in order. Empty: not known."""


@dataclass(frozen=True)
class ModelProfile:
    """A model, and the sample that it is trained on. Bytes are those of ``precision``."""

    name: str
    precision: Precision
    layers: tuple[LayerProfile, ...]
    traits: ModelTraits
    hidden: int
    """Width between layers. 0: not a Transformer."""
    heads: int
    key_value_heads: int
    feed_forward: int
    sequence: int
    """Tokens of a sample. 1: not a sequence."""
    vocabulary: int
    """Width of the last layer's output."""
    sample_bytes: float = 0.0
    """Inputs and targets of one sample."""
    buffers: tuple[int, ...] = field(default=())
    """Elements of the buffers that are averaged before validation."""

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

    def with_traits(self, traits: ModelTraits) -> "ModelProfile":
        """Return the same model with other rules for its cuts."""
        return replace(self, traits=traits)


def count_parameters(layers: Iterable[LayerProfile]) -> int:
    """Return the elements of all parameters of ``layers``. Those tied to each other count once."""
    tied = {layer.tied: layer.parameters for layer in layers if layer.tied}
    return sum(tied.values()) + sum(layer.parameters for layer in layers if not layer.tied)
