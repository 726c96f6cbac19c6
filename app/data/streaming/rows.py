"""The rows of a micro-epoch: JSON messages, cleaned and split like rows of other sources."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import DataConfig
from app.data.examples import MAX_EXAMPLES, REASONS, CleaningReport, Reason, in_words
from app.data.preparation.sample import SAMPLE_SIZE
from app.data.preparation.samples import Labelled, SampleKind
from app.data.preparation.survey import (
    IN_TRAIN,
    IN_VALIDATION,
    KEPT,
    Cleaner,
    SplitRule,
    code_of,
    digest_of,
    drop_equal,
    split_keys,
)
from app.data.preparation.writers import LabelledWriter, labelled_schema
from app.data.shards import Shard
from app.data.sources.cells import as_label, as_text
from app.data.sources.lines import parse_json
from app.data.streaming.messages import Message, Offsets
from app.data.targets import Classes
from app.errors import DataError

_BAD: tuple[Reason, ...] = ("malformed", "unlabelled", "unknown_label")
_MIN_JUDGED = 100
"""Number of messages from which the share of bad ones is judged: among fewer, one says little."""
_MAX_EXAMPLE = 120


class Samples(Protocol):
    """The samples of a split, before they are written."""

    def __len__(self) -> int: ...

    def write(self, folder: UPath, prefix: str, size: int) -> list[Shard]:
        """Write the samples as shards of about ``size`` bytes, named ``PREFIX-NUMBER.arrow``."""
        ...


@dataclass(frozen=True)
class LabelledTexts:
    """Cleaned texts with the label of each."""

    inputs: Sequence[str]
    labels: Sequence[str]
    known: Sequence[str]
    """All labels, in the order of the classes."""

    def __len__(self) -> int:
        return len(self.inputs)

    def write(self, folder: UPath, prefix: str, size: int) -> list[Shard]:
        """Write them as shards: see ``Samples``."""
        classes = {label: place for place, label in enumerate(self.known)}
        read, measure = (lambda labels: [classes[label] for label in labels]), (lambda texts: list(map(len, texts)))
        writer = LabelledWriter(folder, prefix, size, labelled_schema("text", Classes.rule), read, measure)
        writer.add(self.inputs, self.labels)
        return writer.close()


@dataclass(frozen=True)
class ChosenRows:
    """The samples of a micro-epoch, and the range of messages that they come from."""

    start: Offsets
    stop: Offsets
    """Offset after the last message, by partition."""
    train: Samples
    """In whole batches."""
    validation: Samples
    """Empty after the first micro-epoch, and with ``data.validation_source``."""
    report: CleaningReport
    unused_tokens: int = 0
    """Tokens at the end of its last document that fill no block."""


@dataclass(frozen=True)
class _Row:
    """A message as it was read."""

    partition: int
    offset: int
    text: str
    label: str | None
    """None: the task has no labels."""
    code: int
    """``KEPT``, or the code of the reason to drop it regardless of other messages."""
    group: str
    digest: bytes
    """Hash of the text."""
    shown: str
    """The beginning of the message, if it is dropped."""


class StreamRows(ABC):
    """Collects the rows of one micro-epoch."""

    kind: SampleKind = Labelled("text", Classes)
    """What a message is."""

    def __init__(
        self, config: DataConfig, in_validation: Collection[bytes], start: Mapping[int, int], is_first: bool
    ) -> None:
        """Collect rows from ``start`` on.

        Args:
            config: how messages are read, cleaned and split.
            in_validation: digests of the texts of ``data.validation_source``. Messages with such a text are dropped.
            start: offset of the first message, by partition.
            is_first: whether rows are held out for validation. Later micro-epochs drop such rows.
        """
        assert config.stream is not None
        self._config, self._start, self._in_validation = config, dict(start), in_validation
        self._labels = config.stream.labels
        self._max_bad = config.stream.max_bad
        self._cleaner = Cleaner(config.clean, self.kind)
        self._rule = SplitRule(config.seed, config.held_out_fraction, 0.0)
        self._keeps_held_out = is_first
        self.needs_validation = is_first and config.held_out_fraction > 0.0
        """Whether the micro-epoch must have a sample for validation."""
        self._rows: list[_Row] = []
        self._bad = 0
        self.candidates = 0
        """Rows that are not dropped whatever the others are. Some are duplicates, or held out."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def stop(self) -> Offsets:
        """Offset after the last message, by partition."""
        return self._stop_after(len(self._rows))

    def add(self, messages: Sequence[Message]) -> None:
        """Add messages.

        Raises:
            DataError: more of them are bad than ``data.stream.max_bad`` allows.
        """
        for message in messages:
            row = self._read(message)
            self._rows.append(row)
            self.candidates += row.code == KEPT
            self._bad += row.code in _BAD_CODES
        if self._bad > self._max_bad * max(len(self._rows), _MIN_JUDGED):
            raise self._refusal()

    @abstractmethod
    def missing(self, samples: int) -> int:
        """Return approximately how many more messages ``samples`` training samples need."""

    @abstractmethod
    def choose(self, samples: int, batch_size: int, takes_fewer: bool) -> ChosenRows | None:
        """Return the first whole batches, at most ``samples`` training samples; None if there are not enough.

        ``takes_fewer``: one batch is enough. The first micro-epoch also needs a sample for validation.
        """

    def _refusal(self) -> DataError:
        first = next(row for row in self._rows if row.code in _BAD_CODES)
        return DataError(
            f"data.source {self._config.source!r}: {self._bad:,} of {len(self._rows):,} messages are bad, more than "
            f"data.stream.max_bad {self._max_bad:g} allows; the first, at offset {first.offset:,} of partition "
            f"{first.partition}, is {in_words(REASONS[first.code - 1])}: {first.shown!r}; correct what is published, "
            "or raise max_bad, which a resumed run may do"
        )

    def _read(self, message: Message) -> _Row:
        columns, group_column = self._config.columns, self._config.group_column
        label_column = None if self._labels is None else columns.label
        names = [name for name in (columns.input, label_column, group_column) if name is not None]
        text, label, group, code = "", None, "", code_of("malformed")
        try:
            row = parse_json(message.value, lambda: "the message", "in it")
        except DataError:
            row = {}
        if all(name in row for name in names):
            try:
                given = as_text(row[columns.input])
                label = None if self._labels is None else as_label(row[columns.label])
                group = as_label(row[group_column]) if group_column else ""
            except (TypeError, UnicodeError):  # an object or a list, or half of a surrogate pair
                pass
            else:
                given = given.strip() if given is not None and self.kind.strips else given
                text, code = given or "", self._cleaner.code(given, label)
                if code == KEPT and self._labels is not None and label not in self._labels:
                    code = code_of("unknown_label")
        digest = digest_of(text)
        if code == KEPT and digest in self._in_validation:
            code = code_of("in_validation")
        shown = "" if code == KEPT else message.value[:_MAX_EXAMPLE].decode("utf-8", "replace")
        return _Row(message.partition, message.offset, text, label, code, group, digest, shown)

    def _decide(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the code and the split of each row, of shape (rows,)."""
        codes = np.array([row.code for row in self._rows], np.uint8)
        low = np.frombuffer(b"".join(row.digest for row in self._rows), np.uint64)[1::2]
        splits = self._rule.split(split_keys([row.group for row in self._rows], low))
        digests, labels = [row.digest for row in self._rows], [row.label for row in self._rows]
        drop_equal(codes, digests, labels, self._config.clean.deduplicate is not False)
        if not self._keeps_held_out:
            codes[(codes == KEPT) & (splits == IN_VALIDATION)] = code_of("held_out")
        return codes, splits

    def _held_out(
        self, codes: NDArray[np.uint8], splits: NDArray[np.uint8], end: int, sizes: NDArray[np.int64], min_size: int
    ) -> NDArray[np.int64]:
        """Return the rows before ``end`` that are held out.

        The first micro-epoch also takes later ones, until their ``sizes`` add up to ``min_size``. Later micro-epochs
        do not train on them.
        """
        rows = np.flatnonzero((codes == KEPT) & (splits == IN_VALIDATION))
        count = int(np.searchsorted(rows, end))
        if self.needs_validation:
            count = max(count, int(np.searchsorted(np.cumsum(sizes[rows]), min_size)) + 1)
        return rows[:count]

    def _report(self, codes: NDArray[np.uint8]) -> CleaningReport:
        counts = Counter(REASONS[code - 1] for code in codes[codes != KEPT].tolist())
        examples: dict[Reason, list[str]] = {}
        for row in np.flatnonzero(codes != KEPT).tolist():
            shown = examples.setdefault(REASONS[codes[row] - 1], [])
            if len(shown) < MAX_EXAMPLES:
                shown.append(self._rows[row].shown or self._rows[row].text[:_MAX_EXAMPLE])
        kept = int((codes == KEPT).sum())
        return CleaningReport(what="messages", given=len(codes), kept=kept, dropped=dict(counts), examples=examples)

    def _stop_after(self, count: int) -> Offsets:
        return self._start | {row.partition: row.offset + 1 for row in self._rows[:count]}


RowsFactory = Callable[[Mapping[int, int], bool], StreamRows]
"""Returns a collector of the rows of one micro-epoch, given its first offsets and whether it is the first."""


class LabelledRows(StreamRows):
    """Collects texts with one label each."""

    def missing(self, samples: int) -> int:
        return math.ceil(samples / (1.0 - self._config.held_out_fraction)) - self.candidates

    def choose(self, samples: int, batch_size: int, takes_fewer: bool) -> ChosenRows | None:
        wanted = samples // batch_size * batch_size
        codes, splits = self._decide()
        train = np.flatnonzero((codes == KEPT) & (splits == IN_TRAIN))
        count = min(len(train) // batch_size * batch_size, wanted)
        if count < (batch_size if takes_fewer else wanted):
            return None
        # Rows after the last one belong to the next micro-epoch.
        end = int(train[count - 1]) + 1
        held_out = self._held_out(codes, splits, end, np.ones(len(codes), np.int64), 1)
        if self.needs_validation and not len(held_out):
            return None
        return ChosenRows(
            start=self._start,
            stop=self._stop_after(end),
            train=self._texts(train[:count]),
            validation=self._texts(held_out),
            report=self._report(codes[:end]),
        )

    def _texts(self, rows: NDArray[np.int64]) -> LabelledTexts:
        assert self._labels is not None
        chosen = [self._rows[row] for row in rows.tolist()]
        return LabelledTexts([row.text for row in chosen], [row.label or "" for row in chosen], self._labels)


def sample_of(texts: Sequence[str]) -> Sequence[str]:
    """Return evenly spread texts of about ``SAMPLE_SIZE`` at most, from which a tokenizer is learned."""
    return texts[:: max(1, -(-sum(map(len, texts)) // SAMPLE_SIZE))]


_BAD_CODES = {code_of(reason) for reason in _BAD}
