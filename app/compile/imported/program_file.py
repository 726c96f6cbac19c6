"""A .pt2 file of torch.export, read only if nothing in it would run code.

PyTorch unpickles parts of such a file, loads compiled libraries from it, evaluates its expressions, and turns its names
into Python code. So a file is accepted only if it has the records of a plain program, plain strings, and pickles that
hold only tensors.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram
from torch.export.pt2_archive import PT2ArchiveReader

from app.errors import CompileError
from app.process_state import environment_variable
from app.torch_internals import is_symbolic_function, load_pt2

_PROGRAM = "models/model.json"
_RECORDS = re.compile(
    r"models/model\.json|data/(weights|constants)/(model_(weights|constants)_config\.json|(weight|tensor)_\d+)"
    r"|data/sample_inputs/model\.pt|extra/.*|archive_format|archive_version|byteorder|\.data/\w+"
)
_NAME = re.compile(r"[\w.]*")
_STATE_NAME = re.compile(r"[\w./:+ -]*")
"""Names of parameters and buffers. torch writes such a name into code in double quotes, and escapes nothing."""

_OPERATOR = re.compile(r"torch\.(ops|sym_\w+)(\.\w+)*|_operator\.[a-z_]+|math\.[a-z0-9]+")
_ONLY_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""torch's setting that limits unpickling to tensors and plain values."""

_ARITHMETIC = (
    *(ast.Expression, ast.Name, ast.Load, ast.Constant, ast.keyword, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_SIZES = ("size", "stride", "storage_offset")


def read_program(path: Path) -> ExportedProgram:
    """Read a program.

    Raises:
        CompileError: the file holds something that can run code.
        Exception: the file cannot be read; the class varies.
    """
    archive = PT2ArchiveReader(str(path))
    names = archive.get_file_names()
    if others := [name for name in names if not _RECORDS.fullmatch(name)]:
        raise _refusal(path, f"the part {others[0]!r}", "tensors, and a program of torch's own operators")
    for key, text in _texts(json.loads(archive.read_bytes(_PROGRAM))):
        if not _CHECKS.get(key, _is_name)(text):
            raise _refusal(path, f"{text[:80]!r} as {key or 'a name'}", "letters, digits, dots and arithmetic")
    with environment_variable(_ONLY_TENSORS, "1"):
        # Unlike this, torch.export.load falls back to other formats.
        return load_pt2(path)


def _refusal(path: Path, given: str, expected: str) -> CompileError:
    return CompileError(
        f"{str(path)!r} has {given}, which can run code when it is read: expected {expected}; export it again with "
        "torch.export.save, or import an ONNX file"
    ).of("program.unsafe")


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string of a program with its key, and the keys themselves as names."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, list):
        for item in node:
            yield from _texts(item, key)
    elif isinstance(node, dict):
        for name, item in node.items():
            yield "", name
            # PyTorch only shows it in messages.
            if name != "metadata":
                yield from _texts(item, name)


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def _is_state_name(text: str) -> bool:
    return _STATE_NAME.fullmatch(text) is not None


def _is_anything(_: str) -> bool:
    return True


def _is_operator(text: str) -> bool:
    return _OPERATOR.fullmatch(text) is not None


def _is_structure(text: str) -> bool:
    """Return whether the structure of arguments, a JSON string within JSON, holds only names."""
    try:
        inner = json.loads(text) if text[:1] in ("[", "{", '"') else text
    except ValueError:
        return False
    return _is_name(text) if inner == text else all(_is_structure(part) for _, part in _texts(inner))


def _is_expression(text: str) -> bool:
    """Return whether an expression has only arithmetic, symbolic functions and sizes of inputs."""
    try:
        return _is_arithmetic(ast.parse(text, mode="eval"))
    except (SyntaxError, ValueError, RecursionError):
        return False


def _is_arithmetic(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return _is_name(text)
        case ast.Call(func=ast.Name(id=name)):
            return is_symbolic_function(name) and all(map(_is_arithmetic, (*node.args, *node.keywords)))
        case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(text))):
            return _is_name(text)
        case ast.Subscript(value=value, slice=ast.Constant(value=int())):
            return _is_arithmetic(value)
        case ast.Call(func=ast.Attribute(value=value, attr=attribute), args=[], keywords=[]):
            return attribute in _SIZES and _is_arithmetic(value)
    return isinstance(node, _ARITHMETIC) and all(map(_is_arithmetic, ast.iter_child_nodes(node)))


_CHECKS: dict[str, Callable[[str], bool]] = {
    "target": _is_operator,
    "as_operator": _is_operator,
    "expr_str": _is_expression,
    "guards_code": _is_expression,
    "in_spec": _is_structure,
    "out_spec": _is_structure,
    "parameter_name": _is_state_name,
    "buffer_name": _is_state_name,
    "tensor_constant_name": _is_state_name,
    "fqn": _is_state_name,
    "as_string": _is_anything,
    "as_strings": _is_anything,
    "torch_version": _is_anything,
}
"""Checks of strings, by key. Strings under other keys must be names."""
