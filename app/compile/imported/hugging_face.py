"""A folder in Hugging Face's layout, made into an ONNX file that is compared with the model in PyTorch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.best_effort import warn
from app.checksums import sha256_of_file
from app.compile.export import export_outputs
from app.compile.imported.model import Head, ImportedModel, import_onnx
from app.compile.imported.natural import Natural, read_processor
from app.compile.imported.program import ModuleEngine
from app.data.text import SEGMENTS
from app.data.tokenizer import OTHER_TOKENIZERS, TRANSFORMERS_FILE
from app.engines.base import Engine
from app.errors import CompileError, RayloomError, first_line
from app.pretrained import CONFIG_FILE, IMAGE_FILE, TOKENIZER_FILE, PretrainedFolder
from app.repository.manifest import ImportedFrom
from app.tensors import Tensors, TensorSpec

_WEIGHTS = "*.safetensors"
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification")
_PROBLEMS = (None, "regression", "single_label_classification", "multi_label_classification")
_LOGITS, _POOLED = "logits", "pooler_output"
_PROCESSORS = (TOKENIZER_FILE, IMAGE_FILE)
_OPTIONAL_PREFIXES, _OPTIONAL_SUFFIXES = ("decoder_", "encoder_", "output_"), ("label", "labels", "_positions")
_OPTIONAL = (
    "position_ids", "inputs_embeds", "head_mask", "past_key_values", "use_cache", "cache_position",
    "cache_params", "cache", "return_dict", "return_loss", "logits_to_keep", "global_attention_mask", "lengths",
    "num_hashes", "mems", "use_mems", "perm_mask", "target_mapping", "input_mask", "question_lengths",
)  # fmt: skip
"""Arguments that a model of texts makes itself or answers without, or that only training and generation need."""
_SAMPLE_LENGTH = 8
_IMAGE_SIZE = 224
"""Pixels of an image if neither the model nor its image processor says so."""


def import_hugging_face(given: Path, folder: Path) -> ImportedModel:
    """Read a classifier, an encoder or another model that does not generate, and write it into ``folder`` as ONNX.

    A classifier has the output ``logits`` and the labels of its configuration. Another model has the outputs of its
    class, as transformers names them.

    Raises:
        CompileError: transformers does not know the model, weights are missing, it generates text, or it cannot be run
            or exported.
    """
    model, lost = _load(given)
    head = _head_of(model, given)
    natural = _natural_of(given) if head else None
    labels = _labels_of(model, given) if head not in (None, "regression") else []  # before the export, which is slow
    _set_padding(model, natural)
    specs = _inputs(model, given, natural)
    # Two rows, because the exporter treats a size of 1 as a constant.
    sample = {
        spec.name: np.ones([2, *(_SAMPLE_LENGTH if size == -1 else size for size in spec.shape[1:])], spec.dtype)
        for spec in specs
    }
    outputs = _give_outputs(model, sample, given, [_LOGITS] if head else None, lost)
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
    imported = import_onnx(converted, folder, source, open_reference, specs[0].max_length)
    _tell_of_sentence_transformers(model, given)
    if head is None:
        _tell_of_labels(model, given)
        return imported
    headed = replace(imported, head=head, scores=_LOGITS)
    if natural is not None and natural.processor.modality == "text":
        _tell_of_pairs(model, head, given)
    labelled = headed if head == "regression" else headed.labelled(labels, _LOGITS)
    return labelled if natural is None else labelled.answering(natural.processor, natural.lengths, str(given))


def _natural_of(given: Path) -> Natural | None:
    """Return the processor of a folder; None if it has none, or only a tokenizer that cannot be read here."""
    if any((given / name).is_file() for name in _PROCESSORS):
        return read_processor(given)
    if not any((given / name).is_file() for name in (*OTHER_TOKENIZERS, TRANSFORMERS_FILE)):
        return None
    try:
        return read_processor(given)
    except CompileError as error:
        warn(f"{error}; the model is imported without it, and takes tensors only")
        return None


def _load(given: Path) -> tuple[nn.Module, bool]:
    """Return the model, and whether the folder lacks the weights of its pooler."""
    from transformers import AutoConfig, AutoModel

    with _told(given, "model.unreadable", "cannot be read by transformers", "give a folder that save_pretrained wrote"):
        configuration: Any = AutoConfig.from_pretrained(given, local_files_only=True, trust_remote_code=False)
        # The saved class says which head the model has.
        name = next(iter(configuration.architectures or []), None)
        if name is not None and name.endswith(_GENERATORS):
            raise CompileError(
                f"{str(given)!r} is a {name}, which generates text: expected a classifier or an encoder"
            ).of("model.generates_text")
        kind: Any = AutoModel if name is None else _class_of(name, configuration, given)
        # Only safetensors, because other weights are pickles, which run code when they are read.
        model, found = kind.from_pretrained(
            given, local_files_only=True, use_safetensors=True, dtype="float32", output_loading_info=True
        )
    model.config.return_dict = True  # outputs are told apart by their names
    _tell_of_unused(sorted(found["unexpected_keys"]), name, type(model).__name__, given)
    return model.eval(), _lacks_pooler(model, sorted(found["missing_keys"]), given)


def _class_of(name: str, configuration: Any, given: Path) -> type[nn.Module]:
    """Return the class of transformers with this name. Raises CompileError if there is none of this configuration."""
    import transformers

    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CompileError(
            f"{str(given)!r} is a {name}, which transformers {transformers.__version__} does not have, so its head is "
            "unknown: correct architectures in config.json, or give an ONNX file"
        ).of("model.class_unknown")
    if getattr(kind, "config_class", None) is not type(configuration):
        raise CompileError(
            f"{str(given)!r}: config.json has the architecture {name} and the model_type {configuration.model_type!r}, "
            "which are of different models: correct one of them"
        ).of("model.type_differs")
    return kind


def _tell_of_unused(unused: Sequence[str], name: str | None, kind: str, given: Path) -> None:
    """Say which weights the model does not have. Raises CompileError if they may be a head without a name."""
    if not unused:
        return
    listed = f"{unused[0]}{f' and {len(unused) - 1} others' * (len(unused) > 1)}"
    if name is None:
        raise CompileError(
            f"{str(given)!r} has the weights {listed}, which a {kind} does not have, and no architectures in "
            "config.json: name the class of the model there"
        ).of("architectures.missing")
    warn(f"{str(given)!r} has the weights {listed}, which a {name} does not have: they are left out")


def _lacks_pooler(model: Any, missing: Sequence[str], given: Path) -> bool:
    """Return whether only the pooler of a model without a head is missing. Raises CompileError if more is."""
    if not missing:
        return False
    if model.base_model is not model or not all("pooler" in name.split(".") for name in missing):
        raise CompileError(
            f"{str(given)!r} lacks {len(missing)} of the weights of a {type(model).__name__}, such as {missing[0]}, "
            "which would be random: give a folder with all weights, or correct architectures in config.json"
        ).of("weights.missing")
    warn(f"{str(given)!r} lacks the weights of the pooler, so the output {_POOLED} is left out")
    return True


def _head_of(model: nn.Module, given: Path) -> Head | None:
    """Return what a classifier answers; None for another model, and for a classifier that gives several numbers.

    Raises:
        CompileError: its ``problem_type`` is not one of transformers.
    """
    configuration: Any = model.config
    if not any(kind in type(model).__name__ for kind in _CLASSIFIERS):
        return None
    if configuration.problem_type not in _PROBLEMS:
        raise CompileError(
            f"{str(given)!r}: problem_type in config.json is {configuration.problem_type!r}: expected "
            f"{', '.join(map(str, _PROBLEMS[1:]))}, or none"
        ).of("problem_type.unknown")
    if configuration.problem_type == "multi_label_classification":
        return "multilabel"
    if configuration.num_labels == 1:
        return "regression"
    return None if configuration.problem_type == "regression" else "classification"


def _tell_of_labels(model: nn.Module, given: Path) -> None:
    """Say that the labels of a head are left out if it is answered with tensors only."""
    configuration: Any = model.config
    if any(not str(label).startswith("LABEL_") for label in configuration.id2label.values()):
        warn(
            f"{str(given)!r} is a {type(model).__name__}, which takes and gives tensors only: its labels are left out, "
            "and their order is that of the outputs"
        )


def _tell_of_sentence_transformers(model: nn.Module, given: Path) -> None:
    """Warn about steps that sentence-transformers runs after the model, which the version lacks."""
    configuration: Any = model.config
    settings = getattr(configuration, "sentence_transformers", None) or {}
    older = getattr(configuration, "sbert_ce_default_activation_function", None)
    activation = str(settings.get("activation_fn") or older or "Identity").split(".")[-1]
    steps = "the pooling of modules.json" if (given / "modules.json").is_file() else None
    if left_out := steps or (f"the {activation} of config.json" if activation != "Identity" else None):
        warn(
            f"{str(given)!r}: {left_out} is left out, which sentence-transformers applies to the model's output: "
            "apply it to the answers"
        )


def _labels_of(model: nn.Module, given: Path) -> list[str]:
    """Return the labels by output. Raises CompileError if an output has none."""
    labels: Mapping[int, str] = model.config.id2label  # type: ignore[union-attr, assignment]
    if sorted(labels) != list(range(len(labels))):
        numbers = ", ".join(map(str, sorted(labels)))
        raise CompileError(
            f"{str(given)!r}: id2label in config.json has the numbers {numbers}: expected 0 to {len(labels) - 1}, one "
            "for each output"
        ).of("id2label.numbers")
    return [str(labels[index]) for index in range(len(labels))]


def _set_padding(model: nn.Module, natural: Natural | None) -> None:
    """Tell a model which token its tokenizer pads with. A decoder finds the last token of a text by it."""
    configuration: Any = model.config
    if natural is not None and (pad := natural.processor.facts.get("pad_id")) is not None:
        if configuration.pad_token_id not in (None, pad):
            warn(f"config.json has the pad_token_id {configuration.pad_token_id}; the tokenizer's {pad} is used")
        configuration.pad_token_id = pad


def _give_outputs(
    model: nn.Module, sample: Tensors, given: Path, wanted: Sequence[str] | None, without_pooler: bool
) -> list[str]:
    """Have the model return its tensors in order, in place of an output class, and return their names.

    Args:
        wanted: the outputs to keep; None keeps all.
    """
    with _told(
        given,
        "model.cannot_run",
        f"cannot be run on {' and '.join(sample)}",
        "expected a classifier or an encoder that takes them alone",
    ):
        output = model(**{name: torch.from_numpy(array) for name, array in sample.items()})
        tensors = [name for name, value in output.items() if isinstance(value, Tensor)]
    names = [name for name in tensors if name in (wanted or tensors) and not (without_pooler and name == _POOLED)]

    def in_order(_: nn.Module, __: object, output: object) -> tuple[Tensor, ...]:
        return tuple(getattr(output, name) for name in names)

    # The exporter takes tensors, and transformers returns a class of its own.
    model.register_forward_hook(in_order)
    return names


def _inputs(model: nn.Module, given: Path, natural: Natural | None) -> tuple[TensorSpec, ...]:
    """Return the inputs: pixels of one size, or tokens and their mask."""
    takes = signature(model.forward).parameters
    configuration: Any = model.config
    if ("pixel_values" in takes) == ("input_ids" in takes):
        both = "takes texts and images together" if "pixel_values" in takes else "takes neither texts nor images"
        raise CompileError(
            f"{str(given)!r} is a {type(model).__name__}, which {both}: give a model of texts or one of images, such "
            "as one tower that was saved alone"
        ).of("modality.unsupported")
    if "pixel_values" in takes:
        return (TensorSpec("pixel_values", np.dtype(np.float32), _image_shape(configuration, natural)),)
    if other := next((name for name, taken in takes.items() if not _is_given(name, taken, configuration)), None):
        raise CompileError(
            f"{str(given)!r} is a {type(model).__name__}, which also takes {other}, and Rayloom "
            "cannot make that from a text: export it to ONNX with all its inputs, and import that file"
        ).of("input.unsupported")
    if "attention_mask" not in takes:
        raise CompileError(
            f"{str(given)!r} is a {type(model).__name__}, which takes no attention_mask, so the padding of a text "
            "would change its answer: give a model that takes one"
        ).of("attention_mask.missing")
    limits = {"input_ids": configuration.get_text_config().vocab_size, "attention_mask": 2}
    # A tokenizer makes single texts, whose segment is 0.
    if natural is None and (segments := _segments(model)):
        limits[SEGMENTS] = segments
    max_length = PretrainedFolder(str(given), given).max_positions
    return tuple(
        TensorSpec(name, np.dtype(np.int64), (-1, -1), max_length=max_length, values_below=limit)
        for name, limit in limits.items()
    )


def _is_given(name: str, taken: Parameter, configuration: Any) -> bool:
    """Return whether a text model gets an argument from Rayloom, or does not need it."""
    if name == SEGMENTS:  # TAPAS has seven kinds of them
        return not hasattr(configuration, "type_vocab_sizes")
    if name == "langs":
        return bool(configuration.n_langs == 1)
    if name == "task_type_ids":
        return not configuration.use_task_id
    return (
        taken.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        or name in ("input_ids", "attention_mask", *_OPTIONAL)
        or name.startswith(_OPTIONAL_PREFIXES)
        or name.endswith(_OPTIONAL_SUFFIXES)
    )


def _segments(model: nn.Module) -> int:
    """Return the number of segments that a model tells apart, such as the texts of a pair; 0 if it takes none."""
    configuration: Any = model.config
    count: int = getattr(configuration, "type_vocab_size", 0)
    return count if SEGMENTS in signature(model.forward).parameters and count > 1 else 0


def _tell_of_pairs(model: nn.Module, head: Head, given: Path) -> None:
    """Warn that ``predict`` cannot query a classifier of pairs, such as a reranker."""
    segments = _segments(model)
    if segments or head == "regression":
        inputs = f"input_ids, attention_mask{f' and {SEGMENTS}' * bool(segments)}"
        warn(
            f"predict gives {str(given)!r} one text a row. If it judges pairs of texts, as a reranker does, import the "
            f"folder without its tokenizer, and send {inputs}"
        )


def _image_shape(configuration: Any, natural: Natural | None) -> tuple[int, ...]:
    """Return the shape of the images that the configuration names, else of those that the image processor makes."""
    # A model of texts and images describes its tower of images apart.
    described = getattr(configuration, "vision_config", configuration)
    size = getattr(described, "image_size", None)
    if size is None and natural is not None:
        return natural.processor.inputs[0].shape
    size = size or _IMAGE_SIZE
    # Some configurations have one number, others a pair.
    height, width = (size, size) if isinstance(size, int) else size
    return (-1, getattr(described, "num_channels", 3), height, width)


@contextmanager
def _told(given: Path, rule: str, what: str, advice: str) -> Iterator[None]:
    """Turn any error of transformers, which raises many kinds, into a CompileError. Hold back its log."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    except RayloomError:
        raise
    except Exception as error:
        raise CompileError(f"{str(given)!r} {what} ({first_line(error)}): {advice}").of(rule) from error
    finally:
        logging.set_verbosity(verbosity)
