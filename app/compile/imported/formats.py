"""What people bring: an ONNX file, a program of torch.export, a Triton repository, a folder of Hugging Face's."""

import json
import os
from dataclasses import replace
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from app.checksums import sha256_of_file
from app.compile.imported.model import ImportedModel, import_onnx, lines_of
from app.compile.imported.onnx_file import file_in
from app.errors import CompileError
from app.pretrained import unmerged_adapter
from app.repository.manifest import ImportedFrom
from app.repository.triton import CONFIG_FILE

_EXPECTED = (
    "a .onnx file, a .pt2 file of torch.export, the folder of a model in a Triton repository, or one in Hugging Face's "
    "layout, with config.json and safetensors"
)
_GENERATORS = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes of transformers that predict the next token."""
_ONNX_BACKENDS = ("onnxruntime", "openvino", "onnxruntime_onnx")


def require_merged(given: Path) -> None:
    """Raise CompileError if a folder has an unmerged adapter: its answers would depend on the installed packages."""
    if reason := unmerged_adapter(given):
        raise CompileError(f"{str(given)!r} {reason}").of("import.adapter")


def open_model(given: Path, folder: Path) -> ImportedModel:
    """Read a model of any kind, and write it into ``folder`` as an ONNX file.

    Raises:
        CompileError: there is no model, there are several, or it cannot be imported.
        EngineError: ONNX Runtime cannot load it.
    """
    given = given.absolute()
    if not given.exists():
        raise CompileError(f"{str(given)!r} does not exist: give {_EXPECTED}").of("file.missing")
    if given.is_dir():
        return _open_folder(given, folder)
    if not given.is_file():  # reading a pipe would never end
        raise CompileError(f"{str(given)!r} is neither a file nor a folder: give {_EXPECTED}").of("file.wrong_kind")
    if given.suffix == ".pt2":
        from app.compile.imported.program import import_program  # imports torch

        return import_program(given, folder)
    if given.suffix != ".onnx":
        raise CompileError(f"{str(given)!r} ends in {given.suffix!r}: expected {_EXPECTED}").of("file.extension")
    return import_onnx(given, folder, ImportedFrom(kind="onnx", source=str(given), files={}))


def _open_folder(given: Path, folder: Path) -> ImportedModel:
    # The folder may be a Triton repository, or one model of it.
    models = sorted(path for path in (given, *given.iterdir()) if path.is_dir() and _is_triton_model(path))
    if given in models:
        return _import_triton(given, folder)
    if is_hugging_face_folder(given):
        from app.compile.imported.hugging_face import import_hugging_face  # imports torch

        return import_hugging_face(given, folder)
    files = sorted(given.glob("*.onnx"))
    found = [*models, *files]
    if len(found) > 1:
        raise CompileError(
            f"{str(given)!r} has {len(found)} models, {', '.join(path.name for path in found)}: give the path of one"
        ).of("folder.many_models")
    if not found:
        raise CompileError(f"{str(given)!r} has no model: expected {_EXPECTED}").of("folder.no_model")
    return open_model(found[0], folder)


def is_hugging_face_folder(folder: Path) -> bool:
    """Return whether a folder has a configuration and weights as transformers writes them."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def generates_text(given: Path) -> bool:
    """Return whether a path is a folder of a causal language model, as transformers writes it."""
    if not (given.is_dir() and is_hugging_face_folder(given)):
        return False
    try:
        names = json.loads((given / "config.json").read_bytes()).get("architectures") or []
    except (ValueError, AttributeError):  # it is refused when it is read
        return False
    return any(str(name).endswith(_GENERATORS) for name in names)


def _is_triton_model(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() or any(_model_files(version) for version in _versions(path))


def _versions(model: Path) -> list[Path]:
    """Return the folders of versions, in the order of their numbers."""
    return sorted((path for path in model.iterdir() if path.is_dir() and path.name.isdecimal()), key=_number)


def _number(version: Path) -> int:
    return int(version.name)


def _model_files(version: Path) -> list[Path]:
    return sorted((*version.glob("*.onnx"), *version.glob("*.onnx/*.onnx")))


def _import_triton(model: Path, folder: Path) -> ImportedModel:
    """Import the newest version that Triton would serve, with the labels of its configuration."""
    config = _read_config(model)
    # Older configurations name a platform instead of a backend.
    backend = config.backend or config.platform
    if backend and backend not in _ONNX_BACKENDS:
        raise CompileError(
            f"{str(model)!r} is of Triton's backend {backend!r}: expected one with an ONNX file, {_ONNX_BACKENDS[0]} "
            f"or {_ONNX_BACKENDS[1]}; export the model to ONNX"
        ).of("triton.backend")

    path = _triton_file(model, config)
    labels_of = {output.name: output.label_filename for output in config.output if output.label_filename}
    for name in labels_of.values():
        file_in(model, name, f"{str(model / CONFIG_FILE)!r} has labels")
    label_files = [model / name for name in labels_of.values()]

    # The lineage has the checksum of every file that was read.
    read = [file for file in (model / CONFIG_FILE, *label_files, *sorted(path.parent.iterdir())) if file.is_file()]
    sums = {os.path.relpath(file, model): sha256_of_file(file) for file in read}
    imported = import_onnx(path, folder, ImportedFrom(kind="triton", source=str(model), files=sums))
    _check_names(config, imported, model)
    if not labels_of:
        return imported
    # They are compared with the output once --labels and --scores have had their say.
    labels = lines_of(label_files[0].read_text(encoding="utf-8-sig"))
    return replace(imported, labels=tuple(labels), scores=next(iter(labels_of)))


def _read_config(model: Path) -> ModelConfig:
    if not (file := model / CONFIG_FILE).is_file():
        return ModelConfig()
    try:
        return text_format.Parse(file.read_text(encoding="utf-8"), ModelConfig())
    except text_format.ParseError as error:
        raise CompileError(f"{str(file)!r} is not a configuration that Triton reads: {error}").of(
            "triton.config_unreadable"
        ) from error


def _triton_file(model: Path, config: ModelConfig) -> Path:
    """Return the ONNX file of the newest version, or of the newest that the version policy names."""
    # Triton serves only these versions, if the policy names some.
    specific = {str(number) for number in config.version_policy.specific.versions}
    versions = [path for path in _versions(model) if not specific or path.name in specific]
    files = _model_files(versions[-1]) if versions else []
    name = config.default_model_filename or "model.onnx"
    named = [file for file in files if name in (file.name, file.parent.name)]
    # Without a configuration, a single file of another name is meant.
    if len(chosen := named if named or config.default_model_filename else files) != 1:
        where = versions[-1] if versions else model
        found = ", ".join(file.name for file in files) or "none"
        raise CompileError(f"the ONNX files of {str(where)!r} are {found}: expected one, VERSION/{name}").of(
            "triton.file_count"
        )
    return chosen[0]


def _check_names(config: ModelConfig, imported: ImportedModel, model: Path) -> None:
    for kind, tensors, specs in (
        ("input", config.input, imported.signature.inputs),
        ("output", config.output, imported.signature.outputs),
    ):
        names = [spec.name for spec in specs]
        if unknown := [tensor.name for tensor in tensors if tensor.name not in names]:
            raise CompileError(
                f"{str(model / CONFIG_FILE)!r} has the {kind} {unknown[0]!r}, and its ONNX file {', '.join(names)}: "
                "correct one of them"
            ).of("triton.other_tensors")
