"""ONNX files with their weights inside, or beside them in shards: protobuf limits a file to 2 GiB.

A model to publish has a folder of its own, with the ONNX file and its shards. A shard is named by the sha256 of its
content. The ONNX file has these names, so its own sha256 stands for all weights.
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx_ir as ir
from onnx_ir.external_data import convert_tensors_from_external, convert_tensors_to_external

from app.checksums import sha256_of_file
from app.config import MAX_SHARD_MB
from app.repository.manifest import SHARD_PREFIX

_MIN_BYTES = 1024
"""Smaller tensors stay in the ONNX file. Engines read shapes and scales from it while they optimize the graph."""

_PAGE = 4096
"""Every tensor of a shard begins on a page, so that engines can map it."""

_NAME_DIGITS = 32


def save_onnx(model: ir.Model, path: Path, shard_mb: int = MAX_SHARD_MB) -> None:
    """Write a model atomically. If its weights take more than ``shard_mb`` MiB, they go into shards beside it.

    Weights that are in files of this folder already stay there. Others are written one by one, and afterwards ``model``
    refers to what was written, so that they need not be in memory. A tensor is never split, so a shard may be as large
    as the largest one.
    """
    folder, limit = path.parent.resolve(), shard_mb * 2**20
    values = [value for graph in model.graphs() for value in graph.initializers.values() if _moves(value, folder)]
    if sum(map(_size_of, values)) > limit:
        for shard in _shards(filter(_is_large, values), limit):
            _write_shard(shard, folder)
    _take_in([value for value in values if _moves(value, folder)])
    # A reader never sees a part of the file, and no file that lacks its shards.
    temporary = path.with_name(f".{path.name}")
    ir.save(model, temporary)
    temporary.replace(path)


def files_of(path: Path) -> list[Path]:
    """Return a model's ONNX file and its shards. No other model has shards in its folder."""
    return [path, *sorted(path.parent.glob(f"{SHARD_PREFIX}*"))]


def size_of(path: Path) -> int:
    """Return the bytes of an ONNX file and its shards, or of a plan."""
    return sum(file.stat().st_size for file in files_of(path))


def copy_onnx(source: Path, target: Path) -> None:
    """Copy a model with its shards into the folder of ``target``, byte by byte."""
    onnx, *shards = files_of(source)
    for shard in shards:
        shutil.copyfile(shard, target.with_name(shard.name))
    shutil.copyfile(onnx, target)


def _moves(value: ir.Value, folder: Path) -> bool:
    """Return whether a weight is in memory, or in a file of another folder."""
    tensor = value.const_value
    return tensor is not None and not (
        isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir).resolve() == folder
    )


def _size_of(value: ir.Value) -> int:
    assert value.const_value is not None
    # Strings have no size of their own, and cannot be in a shard.
    return 0 if value.const_value.dtype == ir.DataType.STRING else value.const_value.nbytes


def _is_large(value: ir.Value) -> bool:
    return _size_of(value) >= _MIN_BYTES


def _shards(values: Iterable[ir.Value], limit: int) -> Iterator[list[ir.Value]]:
    """Yield groups of values whose tensors fit into a shard together, in their order."""
    shard: list[ir.Value] = []
    size = 0
    for value in values:
        needed = -(-_size_of(value) // _PAGE) * _PAGE
        if shard and size + needed > limit:
            yield shard
            shard, size = [], 0
        shard.append(value)
        size += needed
    if shard:
        yield shard


def _write_shard(values: list[ir.Value], folder: Path) -> None:
    """Write the tensors of a shard, and let ``values`` refer to it."""
    unnamed = folder / ".shard"
    tensors = [tensor for value in values if (tensor := value.const_value) is not None]
    written = convert_tensors_to_external(tensors, folder, unnamed.name, alignment=_PAGE, align_threshold=0)
    shard = unnamed.replace(folder / f"{SHARD_PREFIX}{sha256_of_file(unnamed)[:_NAME_DIGITS]}")
    for value, tensor in zip(values, written, strict=True):
        value.const_value = ir.ExternalTensor(
            shard.name,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=str(tensor.name),
            base_dir=folder,
        )


def _take_in(values: list[ir.Value]) -> None:
    """Read the tensors of other files into memory: small ones, or all of a small model."""
    outside = [value for value in values if isinstance(value.const_value, ir.ExternalTensor)]
    tensors = convert_tensors_from_external([tensor for value in outside if (tensor := value.const_value) is not None])
    for value, tensor in zip(outside, tensors, strict=True):
        value.const_value = tensor
