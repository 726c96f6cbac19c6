"""Prepared data: cleaned, split and kept in a folder that every worker and every later job reads."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Self

import pandas as pd
from sklearn.model_selection import train_test_split
from upath import UPath

from app.checksums import write_checksums
from app.config import DataConfig
from app.data.cleaning import CleaningReport, clean
from app.data.examples import Examples, Split
from app.data.processor import Processor
from app.data.sources import load_examples
from app.errors import DataError
from app.storage import write_atomically

LABELS_FILE, REPORT_FILE = "labels.json", "cleaning.json"


@dataclass(frozen=True)
class PreparedData:
    """Both splits, the labels that classes index, the processor fitted on the training split, what was dropped."""

    train: Split
    validation: Split
    labels: list[str]
    processor: Processor
    report: CleaningReport

    @property
    def fingerprint(self) -> str:
        """sha256 over every input and class of both splits, in order."""
        digest = hashlib.sha256(json.dumps(self.labels).encode())
        for split in (self.train, self.validation):
            for given, label in zip(split.inputs, split.classes, strict=True):
                content = given.encode() if isinstance(given, str) else given
                digest.update(b"%d %d " % (label, len(content)) + content)
        return digest.hexdigest()

    def save(self, folder: UPath) -> None:
        """Write the splits as parquet, the labels and the report as JSON, and the processor's own files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, split in (("train", self.train), ("validation", self.validation)):
            write_atomically(
                folder / f"{name}.parquet", pd.DataFrame({"input": split.inputs, "class": split.classes}).to_parquet()
            )
        save_labels(self.labels, folder)
        self.processor.save(folder)
        write_atomically(folder / REPORT_FILE, self.report.model_dump_json(indent=1).encode())
        write_checksums(folder)

    @classmethod
    def load(cls, folder: UPath, processor: type[Processor]) -> Self:
        """What ``save`` wrote."""
        return cls(
            _load_split(folder, "train"),
            _load_split(folder, "validation"),
            load_labels(folder),
            processor.load(folder),
            CleaningReport.model_validate_json((folder / REPORT_FILE).read_bytes()),
        )


def prepare(config: DataConfig, processor: type[Processor]) -> PreparedData:
    """Load, clean, split and fit, the same for the same configuration.

    Raises:
        DataError: the source cannot be read, holds another kind of input than the task takes, or has
            too few examples or classes.
    """
    examples = load_examples(config)
    if examples.modality != processor.modality:
        raise DataError(
            f"data.source {config.source!r} holds {examples.modality}s, the task takes {processor.modality}s: "
            "change one of them"
        )
    examples, report = clean(examples, config.clean)
    train, validation, labels = split(examples, config)
    return PreparedData(train, validation, labels, processor.fit(train.inputs, config), report)


def split(examples: Examples, config: DataConfig) -> tuple[Split, Split, list[str]]:
    """A seeded split with the same share of each class on both sides, and the labels in order."""
    counts = Counter(examples.labels)
    if len(counts) < 2:
        raise DataError(f"data.source {config.source!r} has the classes {sorted(counts)} after cleaning: expected two")
    if rare := sorted(label for label, count in counts.items() if count < 2):
        raise DataError(
            f"data.source {config.source!r} has one example only of {', '.join(rare)}: each class needs two or more"
        )
    labels = sorted(counts)
    classes = [labels.index(label) for label in examples.labels]
    try:
        parts = train_test_split(
            examples.inputs, classes, test_size=config.validation_fraction, random_state=config.seed, stratify=classes
        )
    except ValueError as error:
        raise DataError(
            f"{len(examples)} examples of {len(labels)} classes cannot be split with data.validation_fraction "
            f"{config.validation_fraction}: give more examples or another fraction"
        ) from error
    return Split(parts[0], parts[2]), Split(parts[1], parts[3]), labels


def _load_split(folder: UPath, name: str) -> Split:
    """The split ``train`` or ``validation`` of a prepared folder."""
    with (folder / f"{name}.parquet").open("rb") as file:
        table = pd.read_parquet(file)
    return Split(table["input"].tolist(), table["class"].tolist())


def save_labels(labels: list[str], folder: UPath) -> None:
    """Write the labels, in the order of the classes."""
    write_atomically(folder / LABELS_FILE, json.dumps(labels, ensure_ascii=False, indent=1).encode())


def load_labels(folder: UPath) -> list[str]:
    """The labels that ``save_labels`` wrote."""
    labels: list[str] = json.loads((folder / LABELS_FILE).read_bytes())
    return labels
