"""The rows of a micro-epoch: JSON messages, cleaned and split like rows of other sources."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from app.config import DataConfig
from app.data.examples import MAX_EXAMPLES, REASONS, CleaningReport, Reason, in_words
from app.data.preparation.rows import cell_text
from app.data.preparation.survey import KEPT, SPLITS, Cleaner, SplitRule, code_of, digest_of, key_of
from app.data.streaming.messages import Message, Offsets
from app.errors import DataError

_TRAIN, _VALIDATION = SPLITS.index("train"), SPLITS.index("validation")
_BAD: tuple[Reason, ...] = ("malformed", "unlabelled", "unknown_label")
_MIN_JUDGED = 100
"""Number of messages from which the share of bad ones is judged: among fewer, one says little."""
_MAX_EXAMPLE = 120


@dataclass(frozen=True)
class LabelledTexts:
    """Cleaned texts with the label of each."""

    inputs: Sequence[str]
    labels: Sequence[str]


@dataclass(frozen=True)
class ChosenRows:
    """The rows of a micro-epoch, and the range of messages that they come from."""

    start: Offsets
    stop: Offsets
    """Offset after the last message, by partition."""
    train: LabelledTexts
    """In whole batches."""
    validation: LabelledTexts
    """Empty after the first micro-epoch."""
    report: CleaningReport


@dataclass(frozen=True)
class _Row:
    """A message as it was read."""

    partition: int
    offset: int
    text: str
    label: str
    code: int
    """``KEPT``, or the code of the reason for which it is dropped whatever the other messages are."""
    group: str
    digest: bytes
    """Hash of the text."""
    shown: str
    """The beginning of the message, if it is dropped."""


class StreamRows:
    """Collects the rows of one micro-epoch."""

    def __init__(self, config: DataConfig, start: Mapping[int, int], is_first: bool) -> None:
        """``is_first``: rows are also held out for validation. Later ones that would be are left out."""
        assert config.stream is not None
        self._config, self._start, self._is_first = config, dict(start), is_first
        self._known = config.stream.labels or ()
        self._max_bad = config.stream.max_bad
        self._cleaner = Cleaner(config.clean, strips=True, is_image=False)
        self._rule = SplitRule(config.seed, config.validation_fraction, 0.0)
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

    def choose(self, samples: int, batch_size: int, takes_fewer: bool) -> ChosenRows | None:
        """Return whole batches from the beginning, at most ``samples`` training rows. None: there are not enough.

        ``takes_fewer``: one batch is enough. The first micro-epoch also needs a row for validation.
        """
        wanted = samples // batch_size * batch_size
        codes, splits = self._decide()
        train = np.flatnonzero((codes == KEPT) & (splits == _TRAIN))
        count = min(len(train) // batch_size * batch_size, wanted)
        if count < (batch_size if takes_fewer else wanted):
            return None
        # Rows after the last one belong to the next micro-epoch.
        end = int(train[count - 1]) + 1
        held_out = np.flatnonzero((codes[:end] == KEPT) & (splits[:end] == _VALIDATION))
        if self._is_first and not len(held_out):
            return None
        report = self._report(codes[:end])
        return ChosenRows(
            start=self._start,
            stop=self._stop_after(end),
            train=self._texts(train[:count]),
            validation=self._texts(held_out),
            report=report,
        )

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
        names = [name for name in (columns.input, columns.label, group_column) if name is not None]
        text, label, group, code = "", "", "", code_of("malformed")
        try:
            row = orjson.loads(message.value)
        except orjson.JSONDecodeError:
            row = None
        if isinstance(row, dict) and all(name in row for name in names):
            text, label = _text_of(row[columns.input]).strip(), _text_of(row[columns.label])
            group = _text_of(row[group_column]) if group_column else ""
            code = self._cleaner.code(text, label)
            if code == KEPT and label not in self._known:
                code = code_of("unknown_label")
        shown = "" if code == KEPT else message.value[:_MAX_EXAMPLE].decode("utf-8", "replace")
        return _Row(message.partition, message.offset, text, label, code, group, digest_of(text), shown)

    def _decide(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the code and the split of each row, of shape (rows,)."""
        codes = np.array([row.code for row in self._rows], np.uint8)
        low = np.frombuffer(b"".join(row.digest for row in self._rows), np.uint64)[1::2]
        splits = self._rule.split(self._keys(low))
        self._drop_duplicates(codes)
        if not self._is_first:
            codes[(codes == KEPT) & (splits == _VALIDATION)] = code_of("held_out")
        return codes, splits

    def _drop_duplicates(self, codes: NDArray[np.uint8]) -> None:
        """Write the codes of texts that repeat an earlier one, and of texts under several labels, into ``codes``."""
        places: dict[bytes, list[int]] = {}
        for place in np.flatnonzero(codes == KEPT).tolist():
            places.setdefault(self._rows[place].digest, []).append(place)
        for first, *others in places.values():
            has_conflict = any(self._rows[place].label != self._rows[first].label for place in others)
            if has_conflict:
                codes[first] = code_of("conflicting")
            if self._config.clean.deduplicate or has_conflict:
                codes[others] = code_of("duplicate" if self._config.clean.deduplicate else "conflicting")

    def _keys(self, low: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return what decides the split of each row: the hash of its group, or of its text."""
        if self._config.group_column is None:
            return low
        keys = low.copy()
        for place, row in enumerate(self._rows):
            if row.group:
                keys[place] = key_of(row.group)
        return keys

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

    def _texts(self, rows: NDArray[np.int64]) -> LabelledTexts:
        chosen = [self._rows[row] for row in rows.tolist()]
        return LabelledTexts([row.text for row in chosen], [row.label for row in chosen])


def _text_of(value: object) -> str:
    text = cell_text(value)
    assert isinstance(text, str)  # JSON has no bytes
    return text


_BAD_CODES = {code_of(reason) for reason in _BAD}
