"""Observe a model's tensors on real samples. ONNX Runtime runs the model with these tensors as extra outputs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from app.compile.onnx_files import save_onnx
from app.compile.quantization.ranges import Histogram
from app.compile.quantization.scheme import Layer, load_model
from app.engines.onnxruntime import open_oracle
from app.errors import CompileError
from app.tensors import Tensors


def observe(source: Path, layers: Sequence[Layer], samples: Iterable[Tensors]) -> dict[str, Histogram]:
    """Return a histogram of the magnitudes of each value that the layers quantize, by the value's name.

    Raises:
        CompileError: a value is not finite. The message names a node that reads it.
    """
    readers = _readers(load_model(source), layers)
    # Counts, because the values of all samples would not fit in memory.
    histograms = {name: Histogram() for name in readers}
    for tensors in _runs(source, list(readers), samples):
        for name, tensor in tensors.items():
            histograms[name].add(tensor)
    for name, histogram in histograms.items():
        if not np.isfinite(histogram.largest):
            raise CompileError(
                f"the input {name!r} of node {readers[name]!r} is {histogram.largest} on a calibration sample: no "
                "int8 range holds it; look for samples or weights that are not finite"
            ).of("activations.not_finite")
    return histograms


def with_range(source: Path, layers: Sequence[Layer], histograms: Mapping[str, Histogram]) -> tuple[Layer, ...]:
    """Return the layers whose values are not always 0, so that their ranges are known.

    Raises:
        CompileError: there is none. The message names a node.
    """
    readers = {node.name: node for node in load_model(source).graph}

    def dead(layer: Layer) -> list[str]:
        values = (readers[port.node].inputs[port.index] for port in layer.activations)
        return [str(value.name) for value in values if value and histograms[str(value.name)].largest == 0.0]

    lost = {layer.name: values for layer in layers if (values := dead(layer))}
    alive = tuple(layer for layer in layers if layer.name not in lost)
    if lost and not any(layer.activations for layer in alive):
        node, values = next(iter(lost.items()))
        raise CompileError(
            f"the input {values[0]!r} of node {node!r} is 0 in all calibration samples, so its range is unknown, and "
            "no other layer has one: give samples in which it is not 0, give more of them "
            "(compile.calibration.samples), or leave int8 out of compile.precisions"
        ).of("activations.all_zero", "compile.calibration.samples")
    return alive


def largest_by_channel(
    source: Path, names: Sequence[str], samples: Iterable[Tensors]
) -> dict[str, NDArray[np.float32]]:
    """Return the largest magnitude of these values in each channel of their last axis, by name."""
    largest: dict[str, NDArray[np.float32]] = {}
    for tensors in _runs(source, names, samples):
        for name, tensor in tensors.items():
            found = np.abs(tensor).reshape(-1, tensor.shape[-1]).max(axis=0)
            largest[name] = np.maximum(largest.get(name, found), found)
    return largest


def values_of(source: Path, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield the name of the value at each port that the layers quantize, in their order."""
    nodes = {node.name: node for node in load_model(source).graph}
    for port in (port for layer in layers for port in layer.activations):
        value = nodes[port.node].inputs[port.index]
        assert value is not None
        yield str(value.name)


def _readers(model: ir.Model, layers: Sequence[Layer]) -> dict[str, str]:
    """Return the values that layers quantize, each with a node that reads it."""
    nodes = {node.name: node for node in model.graph}
    ports = [port for layer in layers for port in layer.activations]
    return {str(value.name): port.node for port in ports if (value := nodes[port.node].inputs[port.index])}


def _runs(
    source: Path, names: Sequence[str], samples: Iterable[Tensors]
) -> Iterator[Mapping[str, NDArray[np.float32]]]:
    """Run the model, and yield these values for each batch of samples."""
    # Beside the source, whose shards it shares.
    with NamedTemporaryFile(prefix=".observed-", suffix=".onnx", dir=source.parent) as file:
        inputs = _with_outputs(source, names, observed := Path(file.name))
        with closing(open_oracle(observed)) as engine:
            for batch in samples:
                outputs = engine.run(batch)
                yield {name: batch[name] if name in inputs else outputs[name] for name in names}


def _with_outputs(source: Path, names: Sequence[str], target: Path) -> set[str]:
    """Write the model with these values as further outputs. Return the names of its inputs."""
    model = load_model(source)
    graph = model.graph
    inputs = {str(value.name) for value in graph.inputs}
    values = {str(value.name): value for node in graph for value in node.outputs}
    # Inputs and outputs of the graph are there already.
    graph.outputs.extend(values[name] for name in names if name not in inputs and not values[name].is_graph_output())
    for output in graph.outputs:
        # A graph's output needs a type, which an inner value may lack.
        output.dtype = output.dtype or ir.DataType.FLOAT
    save_onnx(model, target)
    return inputs
