"""A folder in Hugging Face's layout, made into an ONNX file that is compared with the model in PyTorch."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.checksums import sha256_of_file
from app.compile.export import export_outputs
from app.compile.imported.model import ImportedModel, import_onnx
from app.compile.imported.natural import with_processor
from app.compile.imported.program import ModuleEngine
from app.engines.base import Engine
from app.errors import CompileError
from app.pretrained import CONFIG_FILE, IMAGE_FILE, TOKENIZER_FILE
from app.repository.manifest import ImportedFrom
from app.tensors import Tensors, TensorSpec

_WEIGHTS = "*.safetensors"
_OUTPUTS = ("logits", "last_hidden_state", "pooler_output")
"""Outputs of transformers' models that are kept, in this order."""

_PROCESSORS = (TOKENIZER_FILE, IMAGE_FILE)
_SAMPLE_LENGTH = 8
_IMAGE_SIZE = 224
"""Pixels of an image if neither the model nor its image processor says so."""


def import_hugging_face(given: Path, folder: Path) -> ImportedModel:
    """Read a classifier or an encoder, and write it into ``folder`` as an ONNX file.

    A classifier has the output ``logits`` and the labels of its configuration, another model its last hidden state.

    Raises:
        CompileError: transformers does not know the model, or it generates text, or it cannot be exported.
    """
    model, max_length = _load(given)
    specs = _inputs(model, given, max_length)
    # Two rows, because the exporter treats a size of 1 as a constant.
    sample = {
        spec.name: np.ones([2, *(_SAMPLE_LENGTH if size == -1 else size for size in spec.shape[1:])], spec.dtype)
        for spec in specs
    }
    outputs = _output_names(model, sample)
    converted = folder / "converted.onnx"
    export_outputs(model, specs, sample, outputs, converted)
    read = sorted(file for file in given.iterdir() if file.name == CONFIG_FILE or file.match(_WEIGHTS))
    sums = {file.name: sha256_of_file(file) for file in read}
    source = ImportedFrom(kind="hugging-face", source=str(given), files=sums)

    def call(inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
        outputs: tuple[Tensor, ...] = model(**inputs)
        return outputs

    def open_reference(threads: int) -> Engine:
        return ModuleEngine(call, imported.signature, threads)

    # PyTorch is the reference, so that errors of the export itself are found.
    imported = import_onnx(converted, folder, source, open_reference, max_length)
    # Only a classifier's logits have labels.
    if outputs != ["logits"]:
        return imported
    configuration: Any = model.config
    names = configuration.id2label
    labelled = imported.labelled([str(names[index]) for index in sorted(names)], "logits")
    return with_processor(labelled, given) if any((given / name).is_file() for name in _PROCESSORS) else labelled


def _output_names(model: nn.Module, sample: Tensors) -> list[str]:
    """Have the model return its tensors in order, in place of an output class, and return their names."""
    output = model(**{name: torch.from_numpy(array) for name, array in sample.items()})
    names = [name for name in _OUTPUTS if getattr(output, name, None) is not None]

    def in_order(_: nn.Module, __: object, output: object) -> tuple[Tensor, ...]:
        return tuple(getattr(output, name) for name in names)

    # The exporter takes tensors, and transformers returns a class of its own.
    model.register_forward_hook(in_order)
    return names


def _load(given: Path) -> tuple[nn.Module, int | None]:
    """Return the model, and the number of tokens that it reads at most."""
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        configuration: Any = AutoConfig.from_pretrained(given, local_files_only=True, trust_remote_code=False)
        # The saved class says whether the model has a head.
        kind = next(iter(configuration.architectures or []), "")
        if kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            raise CompileError(f"{str(given)!r} is a {kind}, which generates text: expected a classifier or an encoder")
        auto: Any = AutoModel
        if kind.endswith("ForSequenceClassification"):
            auto = AutoModelForSequenceClassification
        elif kind.endswith("ForImageClassification"):
            auto = AutoModelForImageClassification
        # Only safetensors, because other weights are pickles, which run code when they are read.
        model: nn.Module = auto.from_pretrained(given, local_files_only=True, use_safetensors=True, dtype="float32")
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CompileError(
            f"{str(given)!r} cannot be read by transformers ({str(error).splitlines()[0]}): give a folder that "
            "save_pretrained wrote"
        ) from error
    return model.eval(), getattr(configuration, "max_position_embeddings", None)


def _inputs(model: nn.Module, given: Path, max_length: int | None) -> tuple[TensorSpec, ...]:
    """Return the inputs: pixels of one size, or tokens and their mask."""
    configuration: Any = model.config
    if "pixel_values" in inspect.signature(model.forward).parameters:
        size, channels = (
            getattr(configuration, "image_size", None) or _IMAGE_SIZE,
            getattr(configuration, "num_channels", 3),
        )
        # Some configurations have one number, others a pair.
        height, width = (size, size) if isinstance(size, int) else size
        return (TensorSpec("pixel_values", np.dtype(np.float32), (-1, channels, height, width)),)
    if "input_ids" not in inspect.signature(model.forward).parameters:
        raise CompileError(f"{str(given)!r} is a {type(model).__name__}: expected a model of texts or images")
    limits = {"input_ids": configuration.vocab_size, "attention_mask": 2}
    return tuple(
        TensorSpec(name, np.dtype(np.int64), (-1, -1), max_length=max_length, values_below=limit)
        for name, limit in limits.items()
    )
