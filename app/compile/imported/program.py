"""A program of torch.export, made into an ONNX file that is compared with the program itself."""

from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from app.checksums import sha256_of_file
from app.compile.export import program_to_onnx
from app.compile.imported.model import ImportedModel, import_onnx
from app.engines.base import Engine, PooledEngine, Signature
from app.errors import CompileError
from app.repository.manifest import ImportedFrom
from app.tensors import Tensors


def import_program(path: Path, folder: Path) -> ImportedModel:
    """Read a .pt2 file, and write it into ``folder`` as an ONNX file.

    Raises:
        CompileError: the file cannot be read, or an operator has no counterpart in ONNX.
    """
    try:
        program = torch.export.load(path)
    except Exception as error:  # of many classes
        raise CompileError(
            f"{str(path)!r} cannot be read by torch.export.load of torch {torch.__version__} "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}): export it again"
        ) from error
    inputs = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
    outputs = _output_names(program)
    converted = folder / "converted.onnx"
    program_to_onnx(program, inputs, outputs, converted)
    source = ImportedFrom(kind="torch.export", source=str(path), files={path.name: sha256_of_file(path)})

    def open_reference(threads: int) -> Engine:
        return _ProgramEngine(program, inputs, imported.signature, threads)

    imported = import_onnx(converted, folder, source, open_reference)
    return imported


def _output_names(program: ExportedProgram) -> list[str]:
    """Return a name for each output: the keys of a dictionary, else ``output``, or ``output_0`` and so on."""
    spec = program.call_spec.out_spec
    assert spec is not None
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(spec.unflatten([0] * spec.num_leaves))[0]]
    named = [key.replace("']['", ".").strip("[]'.") for key in keys]
    if len(named) == 1 and not named[0]:
        return ["output"]
    return [f"output_{name}" if name.isdecimal() else name for name in named]


class _ProgramEngine(PooledEngine[Any]):
    """The program in PyTorch, as the reference."""

    name = "torch"
    version: str = torch.__version__

    def __init__(self, program: ExportedProgram, inputs: list[str], signature: Signature, threads: int) -> None:
        torch.set_num_threads(threads)
        self._inputs = inputs
        super().__init__(signature, [program])

    def _run(self, member: ExportedProgram, inputs: Tensors) -> Tensors:
        given = [torch.from_numpy(inputs[name]) for name in self._inputs]
        in_spec = member.call_spec.in_spec
        args, kwargs = pytree.tree_unflatten(given, in_spec) if in_spec else (tuple(given), {})
        with torch.inference_mode():
            answer = pytree.tree_leaves(member.module()(*args, **kwargs))
        return {spec.name: tensor.numpy() for spec, tensor in zip(self.signature.outputs, answer, strict=True)}
