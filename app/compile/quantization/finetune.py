"""Quantization-aware fine-tuning: train weights while they, and what is multiplied by them, round as in an int8 file.

Scales of activations stay those of the file (Jacob et al. 2018, arXiv:1712.05877). The gradient passes through the
rounding where nothing is clipped. The model learns its own float answers, so labels play no part.
"""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional

from app.compile.quantization.qdq import int8
from app.compile.quantization.scheme import Layer, load_model
from app.config import Int8FinetuneConfig
from app.models.factory import logits_of
from app.tensors import Tensors

_SCOPES = "pkg.torch.onnx.name_scopes"
"""The exporter's note in a node: the path of modules, and the operation's name in the traced program."""
_FOLDED, _BATCH_NORM = "_native_batch_norm_legit_no_training", "batch_norm"
"""A batch norm by its names in the exporter and in the traced program. The exporter folds it into the convolution."""

Finetune = Callable[[Mapping[str, "Rounding"], Path], None]
"""Writes the model as a float32 ONNX file, after training with these roundings by operation."""


@dataclass(frozen=True)
class Rounding:
    """How one layer of an int8 file rounds."""

    threshold: float | None
    """The magnitude of the input that becomes int8's largest value; None for an embedding table."""
    factors: Tensor | None
    """What smoothing multiplies the input by, of shape (input channels,). The weights are divided by it."""

    def apply(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of a linear layer, convolution or embedding with input and weight rounded."""
        first, second, *others = arguments
        if self.threshold is None:
            return _rounded_weight(first), second, *others
        if self.factors is not None:
            first, second = first * self.factors, second / self.factors
        largest = int(int8().largest)
        scale = self.threshold / largest
        rounded = torch.fake_quantize_per_tensor_affine(first, scale, 0, -largest, largest)
        return rounded, _rounded_weight(second), *others


def _rounded_weight(weight: Tensor) -> Tensor:
    """Round each channel, which is the first axis. A batch norm after a convolution only scales whole channels."""
    largest = int(int8().largest_weight)
    # A channel of zeros would divide by 0.
    scales = (weight.detach().flatten(1).abs().amax(1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -largest, largest)


def roundings_of(file: Path, layers: Iterable[Layer], thresholds: Mapping[str, float]) -> dict[str, Rounding]:
    """Return how the layers of a float file round once they are quantized, by operation of the traced program.

    ``file`` may be smoothed. The other branch of an addition to a convolution is not rounded in training.
    """
    nodes = {node.name: node for node in load_model(file).graph}
    found: dict[str, Rounding] = {}
    for layer in layers:
        if layer.weight is None or _SCOPES not in nodes[layer.name].metadata_props:
            continue
        # The innermost scope is the operation itself.
        operation = ast.literal_eval(nodes[layer.name].metadata_props[_SCOPES])[-1]
        threshold, factors = None, None
        if layer.activations:
            port = layer.activations[0]
            value = nodes[port.node].inputs[port.index]
            assert value is not None
            threshold = thresholds[str(value.name)]
            divide = value.producer()
            # ``smooth`` has put this node before the layer.
            if divide is not None and str(divide.name).endswith("_smoothed"):
                assert divide.inputs[1] is not None
                assert divide.inputs[1].const_value is not None
                factors = torch.from_numpy(np.array(divide.inputs[1].const_value.numpy()))
        found[operation] = Rounding(threshold, factors)
    return found


def train_rounded(
    program: ExportedProgram,
    roundings: Mapping[str, Rounding],
    teacher: nn.Module,
    batches: Callable[[int], Iterable[Tensors]],
    config: Int8FinetuneConfig,
    log: Callable[[str], None],
) -> dict[str, Tensor]:
    """Train a copy of the traced model, and return its tensors by name.

    Args:
        program: the traced model, whose parameters stay as they are. Dropout is off, and batch norms keep their means.
        roundings: by operation of the program, as ``roundings_of`` returns them.
        teacher: the float model, whose logits are learned.
        batches: returns the inputs of an epoch. They are iterated twice an epoch.
    """
    module: Any = program.module()
    state = {name: nn.Parameter(value.detach().clone()) for name, value in module.named_parameters()}
    # The module trains copies, because the program's parameters are the caller's.
    for name, parameter in state.items():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, parameter)
    rounded = RoundedProgram(module, roundings)
    log(f"int8: training {config.epochs} epochs with {rounded.count} of {len(roundings)} layers rounded")
    # No decay: these weights were trained already, and should stay near.
    optimizer = torch.optim.AdamW(state.values(), lr=config.lr, weight_decay=0.0)
    with torch.enable_grad():
        for epoch in range(config.epochs):
            losses = [_step(rounded, teacher, inputs, optimizer) for inputs in batches(epoch)]
            log(f"int8: epoch {epoch}: {float(np.mean(losses)):.3g} of the logits' variance is lost by rounding")
    return {name: parameter.detach() for name, parameter in state.items()}


def _step(rounded: "RoundedProgram", teacher: nn.Module, inputs: Tensors, optimizer: torch.optim.Optimizer) -> float:
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    with torch.no_grad():
        expected = logits_of(teacher(**tensors))
    # A share of the logits' variance, so that the log can be compared between models.
    loss = functional.mse_loss(logits_of(rounded.run(*tensors.values())), expected) / expected.var()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


class RoundedProgram(Interpreter):
    """Runs a traced program, and rounds the arguments of some operations."""

    def __init__(self, program: GraphModule, roundings: Mapping[str, Rounding]) -> None:
        super().__init__(program)
        nodes = {node.name: node for node in program.graph.nodes}
        self._roundings = {
            node: rounding for name, rounding in roundings.items() if (node := _operation(name, nodes)) is not None
        }
        self._node: Node | None = None

    @property
    def count(self) -> int:
        """The number of operations that are rounded."""
        return len(self._roundings)

    def run_node(self, n: Node) -> Any:
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        rounding = self._roundings.get(self._node) if self._node is not None else None
        return super().call_function(target, rounding.apply(args) if rounding else args, kwargs)


def _operation(name: str, nodes: Mapping[str, Node]) -> Node | None:
    """Return the operation of this name; for a batch norm, the convolution that it is folded into."""
    if not name.startswith(_FOLDED):
        return nodes.get(name)
    norm = nodes.get(name.replace(_FOLDED, _BATCH_NORM))
    return norm.args[0] if norm is not None and isinstance(norm.args[0], Node) else None
