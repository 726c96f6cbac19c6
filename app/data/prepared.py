"""What passes between data and training: batches, splits, and prepared data as jobs save and load it."""

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.checksums import write_checksums
from app.data.examples import CleaningReport
from app.data.origins import Origins
from app.data.processor import Processor
from app.data.targets import Outputs
from app.shared_files import KeptFile
from app.storage import stream_atomically
from app.tensors import Tensors

if TYPE_CHECKING:  # it imports pyarrow
    from app.data.sharded import ShardedRows, ShardNumbers, ShardReference

TRAIN, VALIDATION, TEST = "train", "validation", "test"
_LENGTHS_FILE = "padded_lengths.npy"
SHARDS_FILE = "shards.json"
"""In a folder of prepared data whose splits lie in shards elsewhere: where they lie."""

Indices = NDArray[np.int64]
"""Rows of a split, or places among them."""

IGNORED = -100
"""A target that counts in no loss and no accuracy."""


@dataclass(frozen=True)
class Batch:
    """A few samples.

    Attributes:
        inputs: the model's tensors by name. The first dimension is the batch.
        targets: int64. Classes of shape (batch,), or the next token at each position, of shape (batch, length). Of
            mixed samples, float32 shares of the classes, of shape (batch, classes).
        taught: float32, a teacher's logits of shape (batch, classes); None without a teacher.
        absent: names of the inputs that no sample has. Training leaves them out where the plan allows it.
    """

    inputs: Tensors
    targets: NDArray[np.int64] | NDArray[np.float32]
    taught: NDArray[np.float32] | None = None
    absent: frozenset[str] = frozenset()


class Dataset(ABC):
    """Samples with their targets, made into tensors on demand."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def lengths(self) -> NDArray[np.int64] | Sequence[int]:
        """A length for each sample. Batches of samples with similar lengths need little padding."""

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples of ``indices``, in this order. Raises DataError for one that cannot be read."""

    @property
    def padded_lengths(self) -> NDArray[np.int32] | None:
        """Tokens of each sample with its padding, of shape (samples,); None if samples have no such length."""
        return None

    @property
    def num_targets(self) -> "NDArray[np.int64] | ShardNumbers | None":
        """Number of targets of each sample, of shape (samples,); None if all have as many."""
        return None

    @property
    def groups(self) -> NDArray[np.str_] | None:
        """The group of each sample, of shape (samples,), if a batch may have samples of one group only."""
        return None

    @property
    def shards(self) -> "ShardedRows | None":
        """The shards that the samples lie in; None if they are in memory."""
        return None

    @property
    def longest(self) -> int:
        """Index of a sample with the greatest length."""
        if self.shards:
            return self.shards.longest
        lengths = self.lengths
        return max(range(len(lengths)), key=lambda index: int(lengths[index]))


def save_padded_lengths(dataset: Dataset, folder: UPath) -> None:
    """Write the lengths of a dataset for ``load_padded_lengths``, if they are known."""
    if (lengths := vars(dataset).get("padded_lengths")) is not None:
        with stream_atomically(folder / _LENGTHS_FILE) as file:
            np.save(file, lengths, allow_pickle=False)


def load_padded_lengths(dataset: Dataset, folder: UPath) -> None:
    """Give a dataset the lengths saved in a folder, if there are any, so that its texts need not be encoded again."""
    if (folder / _LENGTHS_FILE).exists():
        # The value of a cached property.
        vars(dataset)["padded_lengths"] = np.load(io.BytesIO((folder / _LENGTHS_FILE).read_bytes()))


class PreparedData(Protocol):
    """Cleaned and split data of any kind, kept in a folder that workers and later jobs read. ``app.tasks`` makes it."""

    @property
    def train(self) -> Dataset: ...

    @property
    def validation(self) -> Dataset:
        """The split that the model is measured on, and not trained on."""
        ...

    @property
    def facts(self) -> Mapping[str, int]:
        """Properties of the data that a model factory may need, by the name of its argument."""
        ...

    @property
    def tokens_per_sample(self) -> int | None:
        """Number of targets per sample if each token is one, as in language modelling. None if a sample has one."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 over everything that the model can see, in order."""
        ...

    @property
    def report(self) -> CleaningReport:
        """What was dropped before the split."""
        ...

    @property
    def rows(self) -> Mapping[str, int]:
        """The rows of each split, by its name."""
        ...

    @property
    def summary(self) -> str:
        """One or two lines for the log: what was kept, and how it was split."""
        ...

    @property
    def origins(self) -> Origins | None:
        """The source of each sample; None if there is one source, or the task knows none."""
        ...

    def save(self, folder: UPath) -> None:
        """Write everything, with checksums. Every worker loads it."""
        ...

    def save_codec(self, folder: UPath) -> None:
        """Write the files that turn inputs into a trained model's tensors, and its answers into words."""
        ...


@runtime_checkable
class GrowingData(Protocol):
    """Prepared data that a run may add sources to, or train on further shards of."""

    reference: "ShardReference"

    def with_train(self, rows: "ShardedRows") -> PreparedData:
        """Return the data with other training rows, such as those of a stream's next micro-epoch."""
        ...

    def grown(self, prepared: PreparedData) -> PreparedData:
        """Return the data, extended by the sources that ``prepared`` appends. Labels and processor stay.

        Raises:
            DataError: an added source has other labels, or the existing sources have changed.
        """
        ...


def finish_saving(data: PreparedData, folder: UPath) -> None:
    """Write what is kept beside the splits: the codec and the report, then the checksums of all files."""
    data.save_codec(folder)
    data.report.save(folder)
    write_checksums(folder)


@dataclass(frozen=True)
class SplitData(ABC):
    """Prepared data of a task whose models are served. Subclasses say where the splits lie, and narrow the types."""

    tokens_per_sample: ClassVar[None] = None
    """The targets of a sample are not tokens."""

    train: Dataset
    validation: Dataset
    targets: Outputs
    processor: Processor
    """Fitted on the training split."""
    report: CleaningReport
    test: Dataset | None = None
    """The test split, used once, on the published version. ``load`` leaves it out: see ``load_test``."""
    origins: Origins | None = None
    """The source of each sample, if there are several."""

    @property
    def labels(self) -> list[str]:
        """The names of the output's columns; empty if they have none."""
        return self.targets.labels

    @property
    def facts(self) -> Mapping[str, int]:
        """The facts of the targets and of the processor."""
        return {**self.targets.facts, **self.processor.facts}

    @property
    def rows(self) -> Mapping[str, int]:
        """The rows of each split."""
        splits = {TRAIN: self.train, VALIDATION: self.validation, TEST: self.test}
        return {name: len(split) for name, split in splits.items() if split}

    @property
    def summary(self) -> str:
        rows = self.rows
        tested = f", testing the published version on {rows[TEST]:,}" if TEST in rows else ""
        return (
            f"{self.report}\ntraining on {rows[TRAIN]:,} {self.report.what}, validating on {rows[VALIDATION]:,}{tested}"
        )

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 over the labels and every row of the training and validation splits, in order."""

    @abstractmethod
    def save(self, folder: UPath) -> None:
        """Write everything that ``load`` needs, with checksums."""

    def save_codec(self, folder: UPath) -> None:
        """Write the files of the targets and of the processor."""
        self.targets.save(folder)
        self.processor.save(folder)

    @classmethod
    @abstractmethod
    def load(cls, folder: UPath, processor_type: type[Processor], targets_type: type[Outputs]) -> Self:
        """Load the data that ``save`` wrote, without the test split."""

    @classmethod
    @abstractmethod
    def load_test(cls, folder: UPath, processor_type: type[Processor], targets_type: type[Outputs]) -> Dataset | None:
        """Return the test split that ``save`` wrote, or None. Only jobs that publish or save it again call it."""


class DataReport(KeptFile):
    """What a run was trained on, for the run's page."""

    file: ClassVar[str] = "data.json"
    source: str
    cleaning: CleaningReport
    rows: dict[str, int]
    """By split."""

    @classmethod
    def of(cls, source: str, data: PreparedData) -> Self:
        """Describe prepared data."""
        return cls(source=source, cleaning=data.report, rows=dict(data.rows))
