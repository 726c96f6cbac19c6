"""Labelled examples, cleaned and split, with the processor that reads the inputs and the targets of the labels."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from app.config import DataConfig
from app.data.examples import Examples, Input, clean
from app.data.origins import Origins
from app.data.prepared import Batch, Columns, ShardedSamples, SplitData
from app.data.processor import GroupingProcessor, PaddingProcessor, PretrainedProcessor, Processor
from app.data.sources import load_examples, load_test_examples
from app.data.targets import Classes, Outputs, Targets
from app.errors import DataError
from app.pretrained import open_pretrained
from app.tensors import Tensors

LINEAR_BASELINE = "linear baseline (character 1- and 2-grams, TF-IDF, logistic regression)"


class LabelledSplit(Protocol):
    """Inputs with their classes as indices into the labels, in memory or in shards."""

    @property
    def inputs(self) -> Sequence[Input]: ...

    @property
    def classes(self) -> Sequence[Any]: ...

    @property
    def lengths(self) -> Sequence[int]:
        """Number of characters of each text; 0 for pictures, which all have one size."""
        ...

    def __len__(self) -> int: ...

    def class_counts(self, num_classes: int) -> NDArray[np.int64]:
        """Return the number of rows of each class, of shape (num_classes,)."""
        ...

    def take(self, indices: Sequence[int]) -> tuple[list[Input], list[Any]]:
        """Return inputs and classes in the order of ``indices``."""
        ...


@dataclass(frozen=True)
class Split:
    """Inputs with their classes as indices into the labels, or with the values of other targets."""

    inputs: list[Input]
    classes: list[Any]

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def lengths(self) -> list[int]:
        """Number of characters of each text; 0 for pictures, which all have one size."""
        return [len(item) if isinstance(item, str) else 0 for item in self.inputs]

    def class_counts(self, num_classes: int) -> NDArray[np.int64]:
        """Return the number of rows of each class, of shape (num_classes,)."""
        return np.bincount(self.classes, minlength=num_classes)

    def take(self, indices: Sequence[int]) -> tuple[list[Input], list[Any]]:
        """Return inputs and classes in the order of ``indices``."""
        return [self.inputs[index] for index in indices], [self.classes[index] for index in indices]


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
        if self._measured is not None:
            return self._measured[0]
        lengths = self.split.lengths
        return lengths if self.shards else np.array(lengths, np.int64)

    @cached_property
    def padded_lengths(self) -> NDArray[np.int32] | None:
        """Tokens of each text with its padding, of shape (samples,); None for other inputs. All texts are encoded."""
        if not isinstance(self.processor, PaddingProcessor):
            return None
        return self.processor.padded_lengths(self.split.inputs)

    @property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """``input`` and ``class``."""
        return {"input": self.split.inputs, "class": self.split.classes}

    def content(self) -> Iterator[bytes]:
        """Yield each input after its value."""
        for item, label in zip(self.split.inputs, self.split.classes, strict=True):
            content = item.encode() if isinstance(item, str) else item
            # With its length, an input cannot run into the next one.
            yield f"{label} {len(content)} ".encode() + content

    @property
    def groups(self) -> NDArray[np.str_] | None:
        """The group of each sample, of shape (samples,), if a batch may have samples of one group only."""
        return None if self._measured is None else self._measured[1]

    @cached_property
    def _measured(self) -> tuple[NDArray[np.int64], NDArray[np.str_]] | None:
        return self.processor.measure(self.split.inputs) if isinstance(self.processor, GroupingProcessor) else None

    def batch(self, indices: Sequence[int]) -> Batch:
        inputs, values = self.split.take(indices)
        return self.to_batch(self.processor.encode(inputs), values)

    def to_batch(self, tensors: Tensors, values: Sequence[Any]) -> Batch:
        """Return encoded inputs with the targets that ``values`` stand for."""
        batch = Batch(tensors, self.targets.batch(values))
        if not isinstance(self.processor, GroupingProcessor):
            return batch
        return replace(batch, absent=self.processor.absent(tensors))


@dataclass(frozen=True)
class LabelledData(SplitData):
    """Inputs, each with a class, several classes, a number, or another value that the targets read."""

    train: LabelledDataset
    validation: LabelledDataset
    targets: Targets
    test: LabelledDataset | None = None

    @classmethod
    def open_split(cls, name: str, columns: Columns, processor: Processor, targets: Outputs) -> LabelledDataset:  # noqa: ARG003
        return LabelledDataset(Split(columns["input"], columns["class"]), processor, cast(Targets, targets))


def prepare(
    config: DataConfig,
    processor_type: type[Processor],
    pretrained: str | None = None,
    targets_type: type[Targets] = Classes,
) -> LabelledData:
    """Load, clean and split the examples, and fit the processor and the targets. Equal configurations give equal data.

    ``pretrained`` is the location of a model whose processor is used instead, if the processor's type can read it.

    Raises:
        DataError: the source cannot be read, has inputs or labels of a kind that the task does not take, or has too few
            examples.
    """
    examples, origin_of = _load_sources(config, processor_type)
    # The test inputs come first, because cleaning drops the examples that are among them.
    test_examples = _load_test_source(config, processor_type, targets_type) if config.test_source else None
    data = prepare_examples(examples, config, processor_type, targets_type, pretrained, test_examples)
    origins = ([origin_of.get(item, 0) for item in part.split.inputs] for part in (data.train, data.validation))
    return replace(data, origins=Origins.of(config, *origins))


def prepare_examples(
    examples: Examples,
    config: DataConfig,
    processor_type: type[Processor],
    targets_type: type[Targets] = Classes,
    pretrained: str | None = None,
    test_examples: Examples | None = None,
) -> LabelledData:
    """Clean and split examples, and fit the processor and the targets. For tasks that read sources of their own.

    Args:
        examples: those of ``data.source``.
        config: how they are cleaned and split.
        processor_type: reads the inputs.
        targets_type: reads the labels.
        pretrained: as in ``prepare``.
        test_examples: the cleaned examples of ``data.test_source``.

    Raises:
        DataError: there are too few examples, or labels of a kind that the targets do not take.
    """
    in_test = frozenset(test_examples.inputs if test_examples else ())
    examples, report = clean(examples, config.clean, in_test, _labels_agree(processor_type, targets_type))
    targets = targets_type.fit(examples.labels, config)
    train, validation = split(examples, targets, config)
    if test_examples:
        test: Split | None = Split(test_examples.inputs, targets.read(test_examples.labels, config, "test_source"))
    else:
        train, test = _hold_out(train, len(examples), targets, config)

    processor = fit_processor(processor_type, train.inputs, config, pretrained)
    targets = targets.fitted(train.classes)
    return LabelledData(
        LabelledDataset(train, processor, targets),
        LabelledDataset(validation, processor, targets),
        targets,
        processor,
        report,
        LabelledDataset(test, processor, targets) if test else None,
    )


def _load_sources(config: DataConfig, processor_type: type[Processor]) -> tuple[Examples, dict[Input, int]]:
    """Return the examples of all sources, and the index of each input's source if there are several."""
    inputs: list[Input] = []
    labels: list[str] = []
    origin_of: dict[Input, int] = {}
    for place, one in enumerate(config.each_source()):
        examples = load_examples(one, processor_type.modality)
        _require_modality(examples, processor_type, f"data.source {one.source!r}")
        inputs += examples.inputs
        labels += examples.labels
        if config.sources:
            for item in examples.inputs:
                # Cleaning keeps the first of equal inputs, without the white space around texts.
                origin_of.setdefault(item.strip() if isinstance(item, str) else item, place)
    return Examples(processor_type.modality, inputs, labels), origin_of


def fit_processor(
    processor_type: type[Processor], inputs: Sequence[Input], config: DataConfig, pretrained: str | None
) -> Processor:
    """Return a processor fitted on inputs, or that of a pretrained model if the type can read it."""
    if pretrained is not None and issubclass(processor_type, PretrainedProcessor):
        return processor_type.from_pretrained(open_pretrained(pretrained), config)
    return processor_type.fit(inputs, config)


def split(examples: Examples, targets: Targets, config: DataConfig) -> tuple[Split, Split]:
    """Return a seeded split, stratified if the targets are classes."""
    classes = f" of {len(targets.labels)} classes" if targets.labels else ""
    return _split_off(
        Split(examples.inputs, targets.read(examples.labels, config)),
        config.validation_fraction,
        targets,
        config.seed,
        f"{len(examples)} examples{classes} cannot be split with data.validation_fraction "
        f"{config.validation_fraction}: give more examples or another fraction",
    )


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
    """Split off a share or a number of the examples, stratified if the targets are classes.

    Raises:
        DataError: there are too few examples. Its message is ``failure``.
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
    return clean(examples, config.clean, labels_agree=_labels_agree(processor_type, targets_type))[0]


def _labels_agree(processor_type: type[Processor], targets_type: type[Targets]) -> bool:
    """Return whether equal inputs with several labels are errors. A record may lack the field that tells them apart."""
    return targets_type.labels_agree and processor_type.modality != "record"


def _require_modality(examples: Examples, processor_type: type[Processor], source: str) -> None:
    if examples.modality != processor_type.modality:
        raise DataError(
            f"{source} holds {examples.modality}s, the task takes {processor_type.modality}s: change one of them"
        )


def linear_baseline(data: LabelledData) -> float:
    """Return the validation accuracy of a linear model of character n-grams, which a larger model has to beat."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    vectors = TfidfVectorizer(analyzer="char", ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(vectors, LogisticRegression(C=4.0, max_iter=500))
    train, validation = data.train.split, data.validation.split
    model.fit(train.inputs, train.classes)
    return float(model.score(validation.inputs, validation.classes))
