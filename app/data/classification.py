"""Data of a classification task: labelled examples, cleaned and split, with the processor that reads them."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from upath import UPath

from app.checksums import write_checksums
from app.config import DataConfig
from app.data.cleaning import CleaningReport, clean
from app.data.dataset import Batch
from app.data.examples import Examples, Split
from app.data.processor import Processor
from app.data.sources import load_examples
from app.errors import DataError
from app.storage import write_atomically

LABELS_FILE = "labels.json"


@dataclass(frozen=True)
class LabelledDataset:
    """A split, whose inputs a processor turns into tensors."""

    split: Split
    processor: Processor

    def __len__(self) -> int:
        return len(self.split)

    @property
    def lengths(self) -> list[int]:
        """The characters of each text; pictures are all of one size."""
        return [len(given) if isinstance(given, str) else 0 for given in self.split.inputs]

    def batch(self, indices: Sequence[int]) -> Batch:
        inputs = self.processor.encode([self.split.inputs[index] for index in indices])
        return Batch(inputs, np.array([self.split.classes[index] for index in indices], np.int64))


@dataclass(frozen=True)
class ClassificationData:
    """Both splits, the labels that classes index, the processor fitted on the training split, what was dropped."""

    train: LabelledDataset
    validation: LabelledDataset
    labels: list[str]
    processor: Processor
    report: CleaningReport

    @property
    def facts(self) -> Mapping[str, int]:
        """The number of labels, and what the processor knows."""
        return {"num_labels": len(self.labels), **self.processor.facts}

    @property
    def tokens_per_sample(self) -> None:
        """A sample has one target, its class."""

    @property
    def summary(self) -> str:
        return f"{self.report}\ntraining on {len(self.train):,} examples, validating on {len(self.validation):,}"

    @property
    def fingerprint(self) -> str:
        """sha256 over every input and class of both splits, in order."""
        digest = hashlib.sha256(json.dumps(self.labels).encode())
        for split in (self.train.split, self.validation.split):
            for given, label in zip(split.inputs, split.classes, strict=True):
                content = given.encode() if isinstance(given, str) else given
                digest.update(b"%d %d " % (label, len(content)) + content)
        return digest.hexdigest()

    def save(self, folder: UPath) -> None:
        """Write the splits as parquet, the labels and the report as JSON, and the processor's own files."""
        import pandas as pd

        folder.mkdir(parents=True, exist_ok=True)
        for name, split in (("train", self.train.split), ("validation", self.validation.split)):
            write_atomically(
                folder / f"{name}.parquet", pd.DataFrame({"input": split.inputs, "class": split.classes}).to_parquet()
            )
        self.save_codec(folder)
        self.report.save(folder)
        write_checksums(folder)

    def save_codec(self, folder: UPath) -> None:
        """Write the labels and the processor's own files."""
        save_labels(self.labels, folder)
        self.processor.save(folder)

    @classmethod
    def load(cls, folder: UPath, processor_type: type[Processor]) -> Self:
        """What ``save`` wrote."""
        processor = processor_type.load(folder)
        return cls(
            LabelledDataset(_load_split(folder, "train"), processor),
            LabelledDataset(_load_split(folder, "validation"), processor),
            load_labels(folder),
            processor,
            CleaningReport.load(folder),
        )


def prepare(config: DataConfig, processor_type: type[Processor]) -> ClassificationData:
    """Load, clean, split and fit, the same for the same configuration.

    Raises:
        DataError: the source cannot be read, holds another kind of input than the task takes, or has
            too few examples or classes.
    """
    examples = load_examples(config)
    if examples.modality != processor_type.modality:
        raise DataError(
            f"data.source {config.source!r} holds {examples.modality}s, the task takes {processor_type.modality}s: "
            "change one of them"
        )
    examples, report = clean(examples, config.clean)
    train, validation, labels = split(examples, config)
    processor = processor_type.fit(train.inputs, config)
    return ClassificationData(
        LabelledDataset(train, processor), LabelledDataset(validation, processor), labels, processor, report
    )


def split(examples: Examples, config: DataConfig) -> tuple[Split, Split, list[str]]:
    """A seeded split with the same share of each class on both sides, and the labels in order."""
    from sklearn.model_selection import train_test_split  # a second to import, which other tasks need not wait for

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
    import pandas as pd

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
