"""The tokenizer or image transform of an imported model, and rows of texts or images."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.config import DataConfig
from app.data.images import ImageProcessor
from app.data.labelled import LabelledDataset, Split
from app.data.processor import Processor
from app.data.sources.labelled import LABEL, inputs_of, labelled_columns
from app.data.sources.source import Source
from app.data.sources.units import read_source
from app.data.targets import Targets
from app.data.text import TextProcessor
from app.errors import CompileError, DataError, RecipeError
from app.pretrained import IMAGE_FILE, PretrainedFolder

_SOURCE = "none"
"""Imported models have no data of their own."""


@dataclass(frozen=True)
class Natural:
    """What turns texts or images into a model's inputs."""

    processor: Processor
    lengths: tuple[int, ...] = ()
    """The lengths to which the processor pads texts."""


def read_processor(folder: Path) -> Natural:
    """Return the tokenizer or image processor of a folder in Hugging Face's layout.

    Raises:
        CompileError: the folder has none that Rayloom can follow.
    """
    try:
        return _read(PretrainedFolder(str(folder), folder))
    except RecipeError as error:
        message = str(error).replace("model.pretrained", "--processor")
        raise CompileError(message).of(error.rule, "--processor") from error


def _read(folder: PretrainedFolder) -> Natural:
    config = DataConfig(source=_SOURCE)
    if (folder.path / IMAGE_FILE).is_file():
        return Natural(ImageProcessor.from_pretrained(folder, config))
    # The folder may not give the maximum input length.
    limit = folder.max_tokens or config.buckets[-1]
    buckets = [length for length in config.buckets if length <= limit] or [limit]
    processor = TextProcessor.from_pretrained(folder, config.model_copy(update={"buckets": buckets}))
    return Natural(processor, tuple(buckets))


def read_natural(path: Path, processor: Processor, targets: Targets) -> LabelledDataset:
    """Read texts from a table with the columns ``text`` and ``label``, or images from a folder with one folder a label.

    Raises:
        DataError: a row cannot be read, is of another kind than the processor's, or has a label that the model lacks.
    """
    config, split = DataConfig(source=str(path)), Split([], [])
    columns = labelled_columns(config.columns, processor.modality, label_kind=targets.rule.cell)
    for rows in read_source(Source(config.source), columns):
        labels = rows.cells[LABEL].to_pylist()
        for number, (item, label) in enumerate(zip(inputs_of(rows, columns, config.columns), labels, strict=True)):
            if item is None:
                raise DataError(f"--samples: {rows.place(number)} is no readable {processor.modality}: correct it").of(
                    "rows.unreadable", "--samples"
                )
            if not label:
                raise DataError(f"--samples: {rows.place(number)} has no label: add it, or leave out the row").of(
                    "label.missing", "--samples"
                )
            split.inputs.append(item)
            split.classes.append(_value_of(label, targets, config, path))
    if not split.inputs:
        raise DataError(f"--samples {str(path)!r} has no rows: give some").of("source.empty")
    return LabelledDataset(split, processor, targets)


def _value_of(label: str, targets: Targets, config: DataConfig, path: Path) -> Any:
    try:
        (value,) = targets.read([label], config)
    except DataError as error:
        expected = f"the labels are {', '.join(targets.labels)}" if targets.labels else "the model answers a number"
        raise DataError(f"{str(path)!r} has the label {label!r}, and {expected}").of(error.rule) from error
    return value


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
