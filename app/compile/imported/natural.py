"""The tokenizer or image transform of an imported model, and rows of texts or images."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from app.compile.imported.model import ImportedModel
from app.config import DataConfig
from app.data.images import ImageProcessor
from app.data.labelled import LabelledDataset, Split
from app.data.processor import Processor
from app.data.sources.labelled import load_examples
from app.data.targets import Classes
from app.data.text import TextProcessor
from app.engines.base import Signature
from app.errors import CompileError, DataError, RecipeError
from app.pretrained import IMAGE_FILE, PretrainedFolder

_SOURCE = "none"
"""Imported models have no data of their own."""


def with_processor(model: ImportedModel, folder: Path) -> ImportedModel:
    """Return the model with the tokenizer or image processor of a folder in Hugging Face's layout.

    Raises:
        CompileError: the folder has none that Rayloom can follow, or the model takes other tensors than it makes.
    """
    try:
        processor, lengths = _read(PretrainedFolder(str(folder), folder))
    except RecipeError as error:
        raise CompileError(str(error).replace("model.pretrained", "--processor")) from error
    # Outputs are left out: only what the processor makes has to fit.
    if difference := Signature(model.signature.inputs, ()).difference(Signature(processor.inputs, ())):
        raise CompileError(f"the model {difference}, which the processor of {str(folder)!r} makes: give its own")
    return replace(model, processor=processor, lengths=lengths)


def _read(folder: PretrainedFolder) -> tuple[Processor, tuple[int, ...]]:
    """Return the processor, and the lengths to which it pads texts."""
    config = DataConfig(source=_SOURCE)
    if (folder.path / IMAGE_FILE).is_file():
        return ImageProcessor.from_pretrained(folder, config), ()
    # The folder may not give the maximum input length.
    limit = folder.max_tokens or config.buckets[-1]
    buckets = [length for length in config.buckets if length <= limit] or [limit]
    return TextProcessor.from_pretrained(folder, config.model_copy(update={"buckets": buckets})), tuple(buckets)


def read_natural(path: Path, processor: Processor, labels: Sequence[str]) -> LabelledDataset:
    """Read texts from a table with the columns ``text`` and ``label``, or images from a folder with one folder a label.

    Raises:
        DataError: the rows cannot be read, are of another kind than the processor's, or have an unknown label.
    """
    examples = load_examples(DataConfig(source=str(path)), processor.modality)
    if examples.modality != processor.modality:
        raise DataError(f"--samples {str(path)!r} holds {examples.modality}s, the model takes {processor.modality}s")
    classes = {label: index for index, label in enumerate(labels)}
    if unknown := sorted(set(examples.labels) - set(classes)):
        raise DataError(f"{str(path)!r} has the label {unknown[0]!r}, and the labels are {', '.join(labels)}")
    split = Split(examples.inputs, [classes[label] for label in examples.labels])
    return LabelledDataset(split, processor, Classes(list(labels)))


def select(rows: LabelledDataset, indices: Sequence[int]) -> LabelledDataset:
    """Return some rows."""
    inputs, classes = rows.split.inputs, rows.split.classes
    return replace(rows, split=Split([inputs[index] for index in indices], [classes[index] for index in indices]))


def fingerprint_of(rows: LabelledDataset) -> str:
    """Return the sha256 over every input and class, in order."""
    digest = hashlib.sha256()
    for item, label in zip(rows.split.inputs, rows.split.classes, strict=True):
        content = item.encode() if isinstance(item, str) else item
        # With its length, an input cannot run into the next one.
        digest.update(f"{label} {len(content)} ".encode() + content)
    return digest.hexdigest()
