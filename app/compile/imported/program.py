"""A program of torch.export, made into an ONNX file that is compared with the program itself."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from app.checksums import sha256_of_file
from app.compile.export import program_to_onnx
from app.compile.imported.model import ImportedModel, import_onnx
from app.compile.imported.program_file import read_program
from app.engines.base import Engine, PooledEngine, Signature
from app.errors import CompileError, first_line
from app.repository.manifest import ImportedFrom
from app.tensors import Tensors

Call = Callable[[Mapping[str, Tensor]], Sequence[Tensor]]
"""A model as a function of its inputs by name."""


def import_program(path: Path, folder: Path) -> ImportedModel:
    """Read a .pt2 file, and write it into ``folder`` as an ONNX file.

    Raises:
        CompileError: the file cannot be read, or an operator has no counterpart in ONNX.
    """
    try:
        program = read_program(path)
    except CompileError:
        raise
    except Exception as error:  # of many classes
        raise CompileError(
            f"{str(path)!r} cannot be read as a program of torch.export by torch {torch.__version__} "
            f"({first_line(error)}): export it again"
        ).of("program.unreadable") from error
    arguments = [spec.arg for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    inputs = [argument.name for argument in arguments if not isinstance(argument, ConstantArgument)]
    outputs = _output_names(program)
    converted = folder / "converted.onnx"
    program_to_onnx(program, inputs, outputs, converted)
    source = ImportedFrom(kind="torch.export", source=str(path), files={path.name: sha256_of_file(path)})

    run = program.module()

    def call(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        given = [
            argument.value if isinstance(argument, ConstantArgument) else tensors[argument.name]
            for argument in arguments
        ]
        # The program takes its arguments in the structure in which it was traced.
        in_spec = program.call_spec.in_spec
        args, kwargs = pytree.tree_unflatten(given, in_spec) if in_spec else (tuple(given), {})
        return pytree.tree_leaves(run(*args, **kwargs))

    def open_reference(threads: int) -> Engine:
        return ModuleEngine(call, imported.signature, threads)

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


class ModuleEngine(PooledEngine[Call]):
    """A model in PyTorch with any number of outputs, as the reference."""

    name = "torch"
    version: str = torch.__version__

    def __init__(self, call: Call, signature: Signature, threads: int) -> None:
        """Run ``call``, which takes the inputs by name and returns the outputs in order."""
        torch.set_num_threads(threads)
        super().__init__(signature, [call])

    def _run(self, member: Call, inputs: Tensors) -> Tensors:
        with torch.inference_mode():
            answer = member({name: torch.from_numpy(array) for name, array in inputs.items()})
        return {spec.name: tensor.numpy() for spec, tensor in zip(self.signature.outputs, answer, strict=True)}
