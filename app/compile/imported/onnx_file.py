"""An ONNX file that another exporter wrote: checks of what it holds, and the names of its sizes."""

import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from app.compile.onnx_files import save_onnx
from app.engines.base import Signature
from app.errors import CompileError
from app.tensors import Tensor, TensorSpec

_STANDARD = {"": "", "ai.onnx": "", "ai.onnx.ml": "ai.onnx.ml"}
"""Domains whose operators the onnx package knows, and its name for them."""

_RUNTIME = ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "ai.onnx.preview.training")
"""Domains whose operators ONNX Runtime checks itself."""

_SHAPE_ONLY = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
_WITHOUT_ZIPMAP = "with the probabilities as a tensor, in skl2onnx by options={'zipmap': False}"
ROWS = "rows"


def read_onnx(path: Path) -> onnx.ModelProto:
    """Read a file without its external data, and check that it can be run here.

    Raises:
        CompileError: it is no ONNX file, a file with weights is missing, an operator is unknown, or an input or output
            is no tensor.
    """
    try:
        # The graph is small. Its weights may take gigabytes.
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError) as error:
        raise CompileError(f"{str(path)!r} is not an ONNX file ({error}): give one that an exporter wrote").of(
            "file.not_onnx"
        ) from error
    if not model.graph.output:
        raise CompileError(f"{str(path)!r} is not an ONNX file, or has no outputs: give one that an exporter wrote").of(
            "file.not_onnx"
        )
    _check_operators(model, path)
    _check_types(model, path)
    external_files(model, path)
    return model


def external_files(model: onnx.ModelProto, path: Path) -> list[Path]:
    """Return the files beside ``path`` that hold weights.

    Raises:
        CompileError: one is missing or too short, is not beside ``path``, or is a link.
    """
    purpose, files = f"{str(path)!r} has weights", dict[str, Path]()
    for tensor in filter(uses_external_data, _constants(model)):
        try:
            stored, bits = ExternalDataInfo(tensor), ir.DataType(tensor.data_type).bitwidth
        except (TypeError, ValueError) as error:  # an unknown type, or a place that is no number
            raise _unreadable(path, f"tensor {tensor.name!r}: {error}") from error
        name, start, needed = stored.location, stored.offset or 0, -(-math.prod(tensor.dims) * bits // 8)
        files[name] = files.get(name) or _unlinked(file_in(path.parent, name, purpose), purpose)
        size = files[name].stat().st_size
        if start + needed > size or stored.length not in (None, needed):
            given = f"{stored.length} bytes" if stored.length not in (None, needed) else f"a file of {size} bytes"
            raise _unreadable(path, f"tensor {tensor.name!r} takes {needed} bytes from {start} on, and has {given}")
    return [files[name] for name in sorted(files)]


def _unreadable(path: Path, reason: str) -> CompileError:
    return CompileError(
        f"{str(path)!r} has weights that cannot be read ({reason}): copy the file and those beside it again"
    ).of("weights.unreadable")


def _unlinked(file: Path, purpose: str) -> Path:
    """Return the file. Raise CompileError if it has other names, which may be those of a file outside the folder."""
    if (links := file.stat().st_nlink) > 1:
        raise CompileError(f"{purpose} in {file.name!r}, a hard link, as one of {links}: put a copy in its place").of(
            "link.hard"
        )
    return file


def file_in(folder: Path, name: str, purpose: str) -> Path:
    """Return a file in a folder or below. Raises CompileError, which begins with the purpose, if it is not there."""
    folder = folder.resolve()
    # The name comes from the model, so it may point anywhere.
    file = Path(os.path.normpath(folder / name))
    if not file.is_relative_to(folder):
        raise CompileError(f"{purpose} in {name!r}, outside its folder: put that file beside it").of("path.outside")
    if not file.resolve().is_relative_to(folder):
        raise CompileError(
            f"{purpose} in {name!r}, a link that leads outside its folder: put the file in its place"
        ).of("link.outside")
    if not file.is_file():
        raise CompileError(f"{purpose} in {name!r}, which is missing: put that file into {str(folder)!r}").of(
            "file.missing"
        )
    return file


def take_over(path: Path, target: Path) -> None:
    """Copy an ONNX file byte by byte; if it has external data, write it anew, with shards if it is large.

    Raises:
        CompileError: some weights are missing, or are where only a few tools look for them.
    """
    if not external_files(read_onnx(path), path):
        # Unchanged, so its checksum stays that of the file that was given.
        shutil.copyfile(path, target)
        return
    try:
        model = ir.load(path)
        LiftConstantsToInitializersPass(size_limit=0)(model)
        _require_initializers(model, path)
        save_onnx(model, target)
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def _require_initializers(model: ir.Model, path: Path) -> None:
    """Raise CompileError if the weights of a node itself, or of a function, are in another file."""
    parts: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for part in parts:
        for node in ir.traversal.RecursiveGraphIterator(part):
            if any(isinstance(attribute.value, ir.ExternalTensor) for attribute in node.attributes.values()):
                raise CompileError(
                    f"{str(path)!r} has weights of node {node.name!r}, {node.op_type}, in another file: export them as "
                    "initializers of the graph"
                ).of("weights.no_initializers")


def with_sizes(signature: Signature, model: onnx.ModelProto, path: Path) -> Signature:
    """Return a signature with the names that the file gives to sizes that vary. The first is ``rows``.

    Raises:
        CompileError: a rank varies, or the first size of a tensor is not the number of rows.
    """
    infos = {info.name: info.type.tensor_type for info in (*model.graph.input, *model.graph.output)}
    for spec in (*signature.inputs, *signature.outputs):
        if not spec.shape:
            kind = "a rank that varies" if not infos[spec.name].HasField("shape") else "no axes"
            raise CompileError(
                f"{str(path)!r}: {spec.name!r} has {kind}: export it with a fixed rank, and the rows first"
            ).of("rank.unsupported")
    _check_rows(signature, path)

    def named(spec: TensorSpec) -> TensorSpec:
        dims = infos[spec.name].shape.dim
        params = [dims[axis].dim_param if axis < len(dims) else "" for axis in range(len(spec.shape))]
        # A later size may be called "rows" in the file, which is another one here.
        names = [
            f"{spec.name}.{axis}" if params[axis] in ("", ROWS) else params[axis]
            for axis, size in enumerate(spec.shape)
            if size == -1
        ]
        return replace(spec, sizes=(ROWS, *names[1:]) if spec.shape[0] == -1 else tuple(names))

    return Signature(tuple(map(named, signature.inputs)), tuple(map(named, signature.outputs)))


def _check_rows(signature: Signature, path: Path) -> None:
    """Raise CompileError unless the first size varies everywhere, or is 1 in every input and 1 or varies in outputs."""
    first = signature.inputs[0] if signature.inputs else None
    if first is None:
        raise CompileError(f"{str(path)!r} has no inputs: give a model that takes some").of("inputs.none")
    allowed = {-1: (-1,), 1: (1, -1)}.get(first.shape[0], ())
    odd = [spec for spec in signature.inputs if spec.shape[0] != first.shape[0] or not allowed]
    odd += [spec for spec in signature.outputs if spec.shape[0] not in allowed]
    if odd:
        raise CompileError(
            f"{str(path)!r}: {Tensor.of(odd[0])}: expected the number of rows as the first size of every input and "
            "output, either as a size that varies or as 1; export it with a dynamic batch"
        ).of("rows.not_first")


def _check_operators(model: onnx.ModelProto, path: Path) -> None:
    # A model may bring functions, which count as operators of its own.
    own = {(function.domain, function.name) for function in model.functions}
    for node in nodes_of(model.graph):
        known = (
            (node.domain, node.op_type) in own
            or node.domain in _RUNTIME
            or (node.domain in _STANDARD and onnx.defs.has(node.op_type, _STANDARD[node.domain]))
        )
        if not known:
            domain = f" of domain {node.domain!r}" if node.domain else ""
            raise CompileError(
                f"{str(path)!r} has the operator {node.op_type!r}{domain} at node {node.name!r}, which is unknown: "
                "expected operators of ONNX or of ONNX Runtime; replace it, or export it as a function of the model"
            ).of("operator.unknown")


def _check_types(model: onnx.ModelProto, path: Path) -> None:
    """Raise CompileError for an input or output that is no tensor, such as a map for each row."""
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    for info in (*model.graph.input, *model.graph.output):
        kind = info.type.WhichOneof("value")
        if kind not in (None, "tensor_type"):
            is_zipped = makers.get(info.name) == "ZipMap"
            raise CompileError(
                f"{str(path)!r}: {info.name!r} is a {str(kind).removesuffix('_type')}, and engines take and give "
                f"tensors: export it {_WITHOUT_ZIPMAP if is_zipped else 'as a tensor'}"
            ).of("value.not_a_tensor")


def values_below(model: onnx.ModelProto) -> dict[str, int]:
    """Return the exclusive limit of the inputs that are indices into a constant table, such as token ids."""
    tables = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            tables[node.output[0]] = tuple(node.attribute[0].t.dims)
    limits: dict[str, int] = {}
    for info in model.graph.input:
        names = {info.name}
        for node in model.graph.node:  # in the order of execution
            if node.op_type in _SHAPE_ONLY and node.input[0] in names:
                names.add(node.output[0])
            elif node.op_type == "Gather" and node.input[1] in names and node.input[0] in tables:
                axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
                rows = tables[node.input[0]][axis]
                # One input may index several tables. The smallest limits it.
                limits[info.name] = min(rows, limits.get(info.name, rows))
    return limits


def probabilities(model: onnx.ModelProto) -> dict[str, str]:
    """Return the outputs that a Softmax or a Sigmoid makes, each with the name of that operator."""
    makers = {name: node for node in model.graph.node for name in node.output}
    found: dict[str, str] = {}
    for info in model.graph.output:
        node = makers.get(info.name)
        while node is not None and node.op_type in _SHAPE_ONLY:
            node = makers.get(node.input[0])
        if node is not None and node.op_type in ("Softmax", "Sigmoid"):
            found[info.name] = node.op_type
    return found


def is_rounded(model: onnx.ModelProto) -> bool:
    """Return whether a file has weights in half precision, or quantizes."""
    halves = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    return any(tensor.data_type in halves for tensor in _constants(model)) or any(
        "Quantize" in node.op_type or "Integer" in node.op_type or node.op_type.startswith("QLinear")
        for node in nodes_of(model.graph)
    )


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of a graph, also those inside loops and branches."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from nodes_of(inner)


def _constants(model: onnx.ModelProto) -> Iterable[onnx.TensorProto]:
    yield from model.graph.initializer
    for node in (*nodes_of(model.graph), *(node for function in model.functions for node in function.node)):
        for attribute in node.attribute:
            yield from (*attribute.tensors, *([attribute.t] if attribute.HasField("t") else []))
            yield from (tensor for inner in attribute.graphs for tensor in inner.initializer)
            if attribute.HasField("g"):
                yield from attribute.g.initializer
