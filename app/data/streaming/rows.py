"""The rows of a micro-epoch: messages, surveyed, cleaned and split like the rows of other sources."""

import bisect
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.data.examples import MAX_EXAMPLES, REASONS, CleaningReport, Input, Reason, in_words
from app.data.preparation.encoding import Encoding
from app.data.preparation.held_out import hold_out
from app.data.preparation.sample import SampleBuilder
from app.data.preparation.samples import TokenKind, groups_in
from app.data.preparation.survey import (
    ALL_TRAIN,
    IN_TRAIN,
    IN_VALIDATION,
    KEPT,
    Cleaner,
    Rule,
    SplitRule,
    Survey,
    Surveyor,
    code_of,
    compared_parts,
    digest_of,
)
from app.data.preparation.surveys import Duplicates, Surveys, resolve
from app.data.prepared import TRAIN
from app.data.shards import Shard, ShardPlace
from app.data.sources.cells import Rows
from app.data.sources.formats.base import PAIRS
from app.data.sources.labelled import kinds_of
from app.data.streaming.messages import Message, MessageFormat, Offsets
from app.data.targets import LabelError
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError

_BAD: tuple[Reason, ...] = ("malformed", "unlabelled", "unknown_label", "not_text", "unreadable")
_BAD_CODES = {code_of(reason) for reason in _BAD}
_MIN_JUDGED = 100
"""Number of messages from which the share of bad ones is judged: among fewer, one says little."""
_MAX_EXAMPLE = 120


@dataclass(frozen=True)
class ChosenRows:
    """The samples of a micro-epoch, and the range of messages that they come from."""

    encoding: Encoding
    start: Offsets
    stop: Offsets
    """Offset after the last message, by partition."""
    train: Sequence[Message]
    samples: int
    """Training samples that the messages become, in whole batches."""
    validation: Sequence[Message]
    """Empty after the first micro-epoch, and with ``data.validation_source``."""
    report: CleaningReport
    unused_tokens: int = 0
    """Tokens at the end of its last document that fill no block."""

    @property
    def format(self) -> MessageFormat:
        """How messages are read."""
        return MessageFormat.of(self.encoding.kind, self.encoding.config)

    def place(self, folder: UPath, split: str, max_rows: int | None = None) -> ShardPlace:
        """Return where shards are, named by the range: the sums of offsets over the partitions, which only grow."""
        first, end = (sum(offsets.values()) for offsets in (self.start, self.stop))
        return ShardPlace(folder, f"{split}-{first:012d}-{end:012d}", self.encoding.config.shards.size, max_rows)

    def write_train(self, folder: UPath) -> list[Shard]:
        """Write the training samples as shards."""
        return self.encoding.write(self.place(folder, TRAIN, self.samples), self.format.batches(self.train))


@dataclass(frozen=True)
class _Read:
    """A message as it was read."""

    item: Input | None
    label: str
    group: str
    reason: Reason | None = None
    """Why it is bad. None: it is not."""
    problem: str = ""
    """Why it is bad, in words."""


class StreamRows:
    """Collects the rows of one micro-epoch.

    The choice depends only on the messages, not on how many arrive at a time. A micro-epoch has the samples that
    preparation would make of the messages up to its last one.
    """

    def __init__(
        self, encoding: Encoding, in_validation: Collection[bytes], start: Mapping[int, int], is_first: bool
    ) -> None:
        """Collect rows from ``start`` on.

        Args:
            encoding: how messages are read, cleaned and written.
            in_validation: digests of held-out rows. Messages that equal one are dropped.
            start: offset of the first message, by partition.
            is_first: whether rows are held out for validation. Later micro-epochs drop such rows.
        """
        config = encoding.config
        assert config.stream is not None
        self._encoding, self._kind, self._config = encoding, encoding.kind, config
        self._format = MessageFormat.of(encoding.kind, config)
        self._in_validation, self._start, self._is_first = in_validation, dict(start), is_first
        self._max_bad = config.stream.max_bad
        # Pairs are held out afterwards.
        rule: Rule = (
            ALL_TRAIN if self._kind.contents == PAIRS else SplitRule(config.seed, config.held_out_fraction, 0.0)
        )
        self._surveyor = Surveyor(Cleaner(config.clean, self._kind), rule)
        self.needs_validation = is_first and config.held_out_fraction > 0.0
        """Whether the micro-epoch must have a sample for validation."""
        self._messages: list[Message] = []
        self._surveys: list[Survey] = []
        self._sizes: list[int] = []
        """What each row adds to its split; 0 for a row that is dropped whatever the others are."""
        self._bad = 0
        self._first_bad = ""

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def stop(self) -> Offsets:
        """Offset after the last message, by partition."""
        return self._stop_after(len(self))

    def add(self, messages: Sequence[Message]) -> None:
        """Add messages.

        Raises:
            DataError: more of them are bad than ``data.stream.max_bad`` allows.
        """
        if not messages:
            return
        read = self._read(messages)
        labels = [one.label for one in read] if self._kind.targets else None
        groups = [one.group for one in read] if self._config.group_column else None
        cleaned, _, survey = self._surveyor.survey([one.item for one in read], labels, groups)
        for row, (message, one) in enumerate(zip(messages, read, strict=True)):
            if one.reason is not None:
                survey.codes[row] = code_of(one.reason)
            elif survey.codes[row] == KEPT and self._in_validation:
                parts = compared_parts(self._kind, cleaned[row], labels[row] if labels else None)
                if any(digest_of(part) in self._in_validation for part in parts):
                    survey.codes[row] = code_of("in_validation")
            if survey.codes[row] in _BAD_CODES:
                self._bad += 1
                why = one.problem or f"{message} is {in_words(REASONS[survey.codes[row] - 1])}"
                self._first_bad = self._first_bad or f"{why}: {_excerpt(message)!r}"
        self._messages += messages
        self._surveys.append(survey)
        self._sizes += self._measured(cleaned, survey.codes)
        if self._bad > self._max_bad * max(len(self), _MIN_JUDGED):
            raise DataError(
                f"data.source {self._config.source!r}: {self._bad:,} of {len(self):,} messages are bad, more than "
                f"data.stream.max_bad {self._max_bad:g} allows; the first: {self._first_bad}; correct the messages, "
                "or resume the run with a larger max_bad"
            ).of("stream.bad_messages", "data.stream.max_bad")

    def missing(self, samples: int) -> int:
        """Return approximately how many more messages ``samples`` training samples need."""
        unit = self._config.block_length if isinstance(self._kind, TokenKind) else 1
        needed = samples * unit / (1.0 - self._config.held_out_fraction)
        total, rows = sum(self._sizes), np.count_nonzero(self._sizes)
        return math.ceil((needed - total) / (total / rows if rows else needed))

    def choose(self, samples: int, batch_size: int, takes_fewer: bool) -> ChosenRows | None:
        """Return the first whole batches, at most ``samples`` training samples; None if there are not enough.

        ``takes_fewer``: one batch is enough. The first micro-epoch also needs a sample for validation.
        """
        wanted = samples // batch_size * batch_size
        enough = batch_size if takes_fewer else wanted
        if len(self) and not self._has_tokenizer(samples, enough):
            return None
        if takes_fewer:
            codes, splits = self._decide(len(self))
            available = self._count(np.flatnonzero((codes == KEPT) & (splits == IN_TRAIN)))
            wanted = min(wanted, available // batch_size * batch_size)
        if not wanted or (found := self._first(wanted)) is None:
            return None
        rows, codes, splits = found
        held_out = self._held_out(codes, splits)
        if self.needs_validation and self._count(held_out) < self._kind.min_held_out:
            return None
        sizes = np.array(self._sizes, np.int64)[rows]
        return ChosenRows(
            encoding=self._encoding,
            start=self._start,
            stop=self._stop_after(len(codes)),
            train=[self._messages[row] for row in rows.tolist()],
            samples=wanted,
            validation=[self._messages[row] for row in held_out.tolist()],
            report=self._report(codes),
            unused_tokens=self._kind.unused(sizes, wanted, self._config.block_length),
        )

    def _read(self, messages: Sequence[Message]) -> list[_Read]:
        """Return the messages as read. After an error, read each half again to find the bad messages."""
        kind, config, blank = self._kind, self._config, [""] * len(messages)
        try:
            rows = self._format.rows(messages)
            self._require_numbers(rows)
            items, labels = [*kind.inputs(rows, config, verify=True)], kind.labels(rows, config) or blank
            self._encoding.check_inputs(rows, [row for row, item in enumerate(items) if item])
            for label in {*labels} - {""}:
                self._encoding.check_label(label)
        except DataError as error:
            if len(messages) > 1:
                half = len(messages) // 2
                return [*self._read(messages[:half]), *self._read(messages[half:])]
            problem = str(error) if str(messages[0]) in str(error) else f"{messages[0]}: {error}"
            is_named = isinstance(error, LabelError) and kind.rule is not None and kind.rule.named is not None
            return [_Read(None, "", "", "unknown_label" if is_named else "malformed", problem)]
        return [*map(_Read, items, labels, groups_in(rows) or blank)]

    def _require_numbers(self, rows: Rows) -> None:
        """Raise DataError for a word in a column that the recipe does not name in ``data.columns.categories``."""
        for name, kind in kinds_of(rows, self._format.columns).items():
            if kind.words and name not in self._config.columns.categories:
                raise DataError(
                    f"{kind.first_word} is not a number: send null if {name!r} is unknown, or name the column in "
                    "data.columns.categories"
                ).of("number.invalid", name)

    def _has_tokenizer(self, samples: int, enough: int) -> bool:
        """Return whether rows are measured in tokens. Learn a tokenizer once there may be enough rows."""
        if not isinstance(self._kind, TokenKind) or self._encoding.tokenizer is not None:
            return True
        codes, splits = self._decide(len(self))
        train = np.flatnonzero((codes == KEPT) & (splits == IN_TRAIN))
        # Without a tokenizer this is an upper bound.
        if self._count(train) < enough:
            return False
        ends = np.cumsum(np.array(self._sizes)[train])
        learned = train[: int(np.searchsorted(ends, samples * self._config.block_length)) + 1]
        sample, low = SampleBuilder(1.0, cuts=True), self._survey(len(self)).low
        texts = self._inputs()
        for row in learned.tolist():
            sample.add(row, [texts[row]], low[row : row + 1])
        tokenizer = LanguageTokenizer.fit(map(str, sample.build().inputs), self._config)
        self._encoding = replace(self._encoding, tokenizer=tokenizer)
        self._sizes = self._measured(texts, self._survey(len(self)).codes)
        return True

    def _inputs(self) -> list[Input | None]:
        """Return the input of each row; None for bad messages."""
        return [one.item for one in self._read(self._messages)]

    def _measured(self, items: Sequence[Input | None], codes: NDArray[np.uint8]) -> list[int]:
        """Return the size of each row; 0 for those that are dropped."""
        sizes = np.zeros(len(items), np.int64)
        rows = np.flatnonzero(codes == KEPT)
        found = [item for row in rows.tolist() if (item := items[row]) is not None]
        sizes[rows] = self._kind.sizes(found, self._encoding.tokenizer)
        return sizes.tolist()

    def _count(self, rows: NDArray[np.int64]) -> int:
        """Return the number of samples that rows become."""
        return self._kind.count(np.array(self._sizes, np.int64)[rows], self._config.block_length)

    def _first(self, wanted: int) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8]] | None:
        """Return the first training rows that become ``wanted`` samples, with the codes and splits up to the last one.

        None if there are not enough. Later rows do not count: they belong to the next micro-epoch.
        """
        survey = self._survey(len(self))
        may_train = (survey.codes == KEPT) & (survey.splits == IN_TRAIN)
        while (rows := self._prefix(np.flatnonzero(may_train), wanted)) is not None:
            end = int(rows[-1]) + 1
            codes, splits = self._decide(end)
            may_train[:end] = (codes == KEPT) & (splits == IN_TRAIN)
            if (train := self._prefix(np.flatnonzero(may_train[:end]), wanted)) is not None:
                end = int(train[-1]) + 1
                return train, codes[:end], splits[:end]
        return None

    def _prefix(self, rows: NDArray[np.int64], wanted: int) -> NDArray[np.int64] | None:
        """Return the first rows that become ``wanted`` samples; None if all are too few."""
        count = bisect.bisect_left(range(len(rows) + 1), wanted, key=lambda count: self._count(rows[:count]))
        return rows[:count] if count <= len(rows) else None

    def _decide(self, end: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the code and the split of each row before ``end``, of shape (end,), whatever comes after them."""
        survey = self._survey(end)
        splits = survey.splits.copy()
        codes, surveys = decide(self._encoding, survey, self._surveyor.label_names)
        if self._kind.contents == PAIRS and self.needs_validation:
            with suppress(DataError):  # there are too few yet
                moves = hold_out(self._config, surveys, codes, 0)
                splits[list(moves)] = list(moves.values())
        if not self._is_first:
            codes[(codes == KEPT) & (splits == IN_VALIDATION)] = code_of("held_out")
        return codes, splits

    def _survey(self, end: int) -> Survey:
        """Return the survey of the rows before ``end``."""
        self._surveys = [Survey.join(self._surveys)]
        return self._surveys[0].until(end)

    def _held_out(self, codes: NDArray[np.uint8], splits: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the rows that are held out.

        The first micro-epoch also takes later ones until there is a sample. Later micro-epochs do not train on them.
        """
        rows = np.flatnonzero((codes == KEPT) & (splits == IN_VALIDATION))
        if not self.needs_validation or self._count(rows) >= self._kind.min_held_out:
            return rows
        all_codes, all_splits = self._decide(len(self))
        later = np.flatnonzero((all_codes == KEPT) & (all_splits == IN_VALIDATION))
        for row in later[later >= len(codes)].tolist():
            if self._count(rows) < self._kind.min_held_out:
                rows = np.append(rows, row)
        return rows

    def _report(self, codes: NDArray[np.uint8]) -> CleaningReport:
        counts = Counter(REASONS[code - 1] for code in codes[codes != KEPT].tolist())
        examples: dict[Reason, list[str]] = {}
        for row in np.flatnonzero(codes != KEPT).tolist():
            shown = examples.setdefault(REASONS[codes[row] - 1], [])
            if len(shown) < MAX_EXAMPLES:
                shown.append(_excerpt(self._messages[row]))
        kept = int((codes == KEPT).sum())
        return CleaningReport(what="messages", given=len(codes), kept=kept, dropped=dict(counts), examples=examples)

    def _stop_after(self, count: int) -> Offsets:
        return self._start | {message.partition: message.offset + 1 for message in self._messages[:count]}


RowsFactory = Callable[[Mapping[int, int], bool], StreamRows]
"""Returns a collector of the rows of one micro-epoch, given its first offsets and whether it is the first."""


def decide(encoding: Encoding, survey: Survey, label_names: Sequence[str]) -> tuple[NDArray[np.uint8], Surveys]:
    """Return the code of each row of a few in memory, after duplicates and conflicts are found."""
    kind, config, codes = encoding.kind, encoding.config, survey.codes.copy()
    surveys = Surveys([[survey]], [label_names], np.array([0, len(codes)]))
    resolve(surveys, Duplicates(kind.deduplicates(config.clean), kind.drops_conflicts, 0), codes, config.shards.memory)
    return codes, surveys


def _excerpt(message: Message) -> str:
    return message.value[:_MAX_EXAMPLE].decode("utf-8", "replace")
