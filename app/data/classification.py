"""Labelled examples, cleaned and split, with the processor that reads the inputs and the targets of the labels."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.checksums import write_checksums
from app.config import DataConfig
from app.data.examples import CleaningReport, Examples, Input, LabelledSplit, Split, clean
from app.data.prepared import SHARDS_FILE, Batch, ShardedSamples
from app.data.processor import PretrainedProcessor, Processor
from app.data.sources import load_examples, load_test_examples
from app.data.targets import Classes, Targets
from app.errors import DataError
from app.pretrained import open_pretrained
from app.storage import write_atomically

LINEAR_BASELINE = "linear baseline (character 1- and 2-grams, TF-IDF, logistic regression)"
_TRAIN, _VALIDATION, _TEST = "train", "validation", "test"
"""File names of the splits, without suffix."""


@dataclass(frozen=True)
class LabelledDataset:
    """A split whose inputs a processor turns into tensors."""

    split: LabelledSplit
    processor: Processor
    targets: Targets

    def __len__(self) -> int:
        return len(self.split)

    @property
    def shards(self) -> ShardedSamples | None:
        """The shards that the split lies in; None if it is in memory."""
        return getattr(self.split, "shards", None)

    @cached_property
    def lengths(self) -> NDArray[np.int64] | Sequence[int]:
        """Number of characters of each text, of shape (samples,). 0 for other inputs, which all have one size."""
        if self.processor.modality == "row":
            return np.zeros(len(self), np.int64)
        lengths = self.split.lengths
        return lengths if self.shards else np.array(lengths, np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        inputs, values = self.split.take(indices)
        return Batch(self.processor.encode(inputs), self.targets.batch(values))


@dataclass(frozen=True)
class ClassificationData:
    """The splits, what the model's outputs mean, the processor fitted on the training split, and the report."""

    train: LabelledDataset
    validation: LabelledDataset
    targets: Targets
    processor: Processor
    report: CleaningReport
    test: LabelledDataset | None = None
    """The test split, used once, on the published version. ``load`` leaves it out: see ``load_test``."""

    @property
    def labels(self) -> list[str]:
        """The names of the output's columns; empty if they have none."""
        return self.targets.labels

    @property
    def facts(self) -> Mapping[str, int]:
        """The columns of the output, and the processor's facts."""
        return {"num_labels": self.targets.num_outputs, **self.processor.facts}

    @property
    def tokens_per_sample(self) -> None:
        """None: the targets of a sample are not tokens."""

    @property
    def rows(self) -> Mapping[str, int]:
        """The examples of each split."""
        splits = {_TRAIN: self.train, _VALIDATION: self.validation, _TEST: self.test}
        return {name: len(split) for name, split in splits.items() if split}

    @property
    def summary(self) -> str:
        tested = f", testing the published version on {len(self.test):,}" if self.test else ""
        return (
            f"{self.report}\ntraining on {len(self.train):,} examples, validating on {len(self.validation):,}{tested}"
        )

    @property
    def fingerprint(self) -> str:
        """sha256 over every input and label of the training and validation splits, in order."""
        digest = hashlib.sha256(json.dumps(self.labels).encode())
        for split in (self.train.split, self.validation.split):
            for item, label in zip(split.inputs, split.classes, strict=True):
                content = item.encode() if isinstance(item, str) else item
                # With its length, an input cannot run into the next one.
                digest.update(f"{label} {len(content)} ".encode() + content)
        return digest.hexdigest()

    def save(self, folder: UPath) -> None:
        """Write the splits as parquet, the labels and the report as JSON, and the processor's own files."""
        import pandas as pd

        folder.mkdir(parents=True, exist_ok=True)
        splits = {_TRAIN: self.train, _VALIDATION: self.validation, _TEST: self.test}
        for name, split in ((name, data.split) for name, data in splits.items() if data):
            write_atomically(
                folder / f"{name}.parquet", pd.DataFrame({"input": split.inputs, "class": split.classes}).to_parquet()
            )
        self.save_codec(folder)
        self.report.save(folder)
        write_checksums(folder)

    def save_codec(self, folder: UPath) -> None:
        """Write the files of the targets and of the processor."""
        self.targets.save(folder)
        self.processor.save(folder)

    @classmethod
    def load(cls, folder: UPath, processor_type: type[Processor], targets_type: type[Targets] = Classes) -> Self:
        """Load the data that ``save`` wrote, without the test split."""
        processor, targets = processor_type.load(folder), targets_type.load(folder)
        if (folder / SHARDS_FILE).exists():
            from app.data.sharded_data import load_sharded  # pyarrow takes a while to import

            return cast(Self, load_sharded(folder, processor, targets))
        return cls(
            LabelledDataset(_load_split(folder, _TRAIN), processor, targets),
            LabelledDataset(_load_split(folder, _VALIDATION), processor, targets),
            targets,
            processor,
            CleaningReport.load(folder),
        )


def prepare(
    config: DataConfig,
    processor_type: type[Processor],
    pretrained: str | None = None,
    targets_type: type[Targets] = Classes,
) -> ClassificationData:
    """Load, clean and split the examples, and fit the processor and the targets. Equal configurations give equal data.

    ``pretrained`` is the location of a model whose processor is used instead, if the processor's type can read it.

    Raises:
        DataError: the source cannot be read, has inputs or labels of a kind that the task does not take, or has too few
            examples.
    """
    examples = load_examples(config, processor_type.modality)
    _require_modality(examples, processor_type, f"data.source {config.source!r}")
    # The test inputs come first, because cleaning drops the examples that are among them.
    test_examples = _load_test_source(config, processor_type, targets_type) if config.test_source else None
    in_test = frozenset(test_examples.inputs if test_examples else ())
    examples, report = clean(examples, config.clean, in_test, targets_type.labels_agree)
    targets = targets_type.fit(examples.labels, config)
    train, validation = split(examples, targets, config)
    if test_examples:
        test: Split | None = Split(test_examples.inputs, targets.read(test_examples.labels, config, "test_source"))
    else:
        train, test = _hold_out(train, len(examples), targets, config)

    processor = fit_processor(processor_type, train.inputs, config, pretrained)
    targets = targets.fitted(train.classes)
    return ClassificationData(
        LabelledDataset(train, processor, targets),
        LabelledDataset(validation, processor, targets),
        targets,
        processor,
        report,
        LabelledDataset(test, processor, targets) if test else None,
    )


def fit_processor(
    processor_type: type[Processor], inputs: Sequence[Input], config: DataConfig, pretrained: str | None
) -> Processor:
    """Return a processor fitted on inputs, or that of a pretrained model if the type can read it."""
    if pretrained is not None and issubclass(processor_type, PretrainedProcessor):
        return processor_type.from_pretrained(open_pretrained(pretrained), config)
    return processor_type.fit(inputs, config)


def split(examples: Examples, targets: Targets, config: DataConfig) -> tuple[Split, Split]:
    """Return a seeded split. Of classes, both sides have the same shares."""
    classes = f" of {len(targets.labels)} classes" if targets.labels else ""
    return _split_off(
        Split(examples.inputs, targets.read(examples.labels, config)),
        config.validation_fraction,
        targets,
        config.seed,
        f"{len(examples)} examples{classes} cannot be split with data.validation_fraction "
        f"{config.validation_fraction}: give more examples or another fraction",
    )


def load_test(folder: UPath, processor: Processor, targets: Targets) -> LabelledDataset | None:
    """Return the test split that ``save`` wrote, or None. Only jobs that publish or save it again call it."""
    if (folder / SHARDS_FILE).exists():
        from app.data.sharded_data import load_sharded_test

        return load_sharded_test(folder, processor, targets)
    if not (folder / f"{_TEST}.parquet").exists():
        return None
    return LabelledDataset(_load_split(folder, _TEST), processor, targets)


def _hold_out(train: Split, num_examples: int, targets: Targets, config: DataConfig) -> tuple[Split, Split | None]:
    """Hold out ``data.test_fraction`` of all examples from the training split; the validation split is unchanged."""
    if config.test_fraction is None:
        return train, None
    size = math.ceil(config.test_fraction * num_examples)
    return _split_off(
        train,
        size,
        targets,
        config.seed,
        f"{len(train)} examples remain outside the validation split, and {size} of them cannot be held out with "
        f"data.test_fraction {config.test_fraction}: each class needs at least one in every split; give more "
        "examples or another fraction",
    )


def _split_off(whole: Split, size: float, targets: Targets, seed: int, failure: str) -> tuple[Split, Split]:
    """Split off a share or a number of the examples, of classes with the same share of each.

    Raises:
        DataError: with the message ``failure``, if there are too few examples.
    """
    # The import takes a second, and other tasks do not need it.
    from sklearn.model_selection import train_test_split

    strata = targets.strata(whole.classes)
    try:
        parts = train_test_split(whole.inputs, whole.classes, test_size=size, random_state=seed, stratify=strata)
    except ValueError as error:
        raise DataError(failure) from error
    return Split(parts[0], parts[2]), Split(parts[1], parts[3])


def _load_test_source(config: DataConfig, processor_type: type[Processor], targets_type: type[Targets]) -> Examples:
    """Load the examples of ``data.test_source``, cleaned on their own."""
    examples = load_test_examples(config, processor_type.modality)
    _require_modality(examples, processor_type, f"data.test_source {config.test_source!r}")
    return clean(examples, config.clean, labels_agree=targets_type.labels_agree)[0]


def _require_modality(examples: Examples, processor_type: type[Processor], source: str) -> None:
    if examples.modality != processor_type.modality:
        raise DataError(
            f"{source} holds {examples.modality}s, the task takes {processor_type.modality}s: change one of them"
        )


def _load_split(folder: UPath, name: str) -> Split:
    """Return the split of this name in a prepared folder."""
    import pandas as pd

    with (folder / f"{name}.parquet").open("rb") as file:
        table = pd.read_parquet(file)
    # A list comes back as an array.
    values = [value.tolist() if isinstance(value, np.ndarray) else value for value in table["class"].tolist()]
    return Split(table["input"].tolist(), values)


def linear_baseline(data: ClassificationData) -> float:
    """Return the validation accuracy of a linear model of character n-grams, which a larger model has to beat."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    vectors = TfidfVectorizer(analyzer="char", ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(vectors, LogisticRegression(C=4.0, max_iter=500))
    train, validation = data.train.split, data.validation.split
    model.fit(train.inputs, train.classes)
    return float(model.score(validation.inputs, validation.classes))
