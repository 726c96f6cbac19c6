"""The first pass over the data: a hash, a label and a split for each row.

The rows themselves are not kept. What is dropped is decided afterwards, from the hashes of all units.
"""

import hashlib
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from upath import UPath

from app.config import CleanConfig, DataConfig
from app.data.examples import REASONS, Input, Reason, refuse
from app.data.preparation.sample import Hashes, SampleBuilder, fractions_of
from app.data.preparation.samples import SampleKind
from app.data.preparation.slices import Arrays, Slices
from app.data.prepared import TEST, TRAIN, VALIDATION
from app.data.rows import number_of
from app.data.targets import LabelError
from app.data.written import spelling_of

_MAX_LABELS = 100_000
"""Number of different labels of a unit above which the column is taken for something else."""
KEPT = 0
"""Code of a row that is kept. Others are 1 + the place of the reason in ``REASONS``."""
SPLITS = (TRAIN, VALIDATION, TEST)
IN_TRAIN, IN_VALIDATION, IN_TEST = range(3)
"""Places in ``SPLITS``."""
DIGEST_BYTES = 16
_BOOLEAN = re.compile('"((?i:true|false))"')
_MAX_DIGITS = 100
"""Decimal exponent, of either sign, from which a number is compared as a text."""
SPLIT_SALT = 0x9E3779B97F4A7C15
NO_GROUPS: Hashes = np.empty(0, np.uint64)


def code_of(reason: Reason) -> int:
    """Return the code of rows that are dropped for a reason."""
    return 1 + REASONS.index(reason)


@dataclass(frozen=True)
class SplitRule:
    """In which split a row is, by the hash of its key alone: it does not change when the data grow."""

    seed: int
    validation_fraction: float
    test_fraction: float

    @classmethod
    def of(cls, config: DataConfig) -> "SplitRule":
        """Return the rule of a recipe."""
        return cls(config.seed, config.validation_fraction, config.test_fraction or 0.0)

    def split(self, keys: Hashes) -> NDArray[np.uint8]:
        """Return the place in ``SPLITS`` of each key."""
        fractions = fractions_of(keys, SPLIT_SALT ^ (self.seed % 2**64))
        splits = np.zeros(len(keys), np.uint8)
        splits[fractions < self.validation_fraction + self.test_fraction] = IN_TEST
        splits[fractions < self.validation_fraction] = IN_VALIDATION
        return splits


@dataclass(frozen=True)
class _Whole:
    """All rows are in one split."""

    place: int
    """In ``SPLITS``."""

    def split(self, keys: Hashes) -> NDArray[np.uint8]:
        return np.full(len(keys), self.place, np.uint8)


Rule = SplitRule | _Whole
ALL_TRAIN, ALL_TEST = _Whole(IN_TRAIN), _Whole(IN_TEST)


@dataclass(frozen=True)
class Survey:
    """The survey of a slice of a unit's rows, in their order."""

    high: Hashes
    low: Hashes
    """The two halves of each row's hash."""
    splits: NDArray[np.uint8]
    """Place in ``SPLITS``."""
    codes: NDArray[np.uint8]
    """Of rows that are dropped whatever the others are."""
    labels: NDArray[np.int32]
    """Index into the labels of the unit; -1: the row has no label."""

    @classmethod
    def join(cls, parts: "Sequence[Survey]") -> "Survey":
        """Return the survey of the rows of all parts."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def until(self, end: int) -> "Survey":
        """Return the survey of the rows before ``end``."""
        return Survey(*(getattr(self, field.name)[:end] for field in fields(self)))

    def with_labels(self, labels: NDArray[np.int32]) -> "Survey":
        """Return the survey with other labels."""
        return replace(self, labels=labels)


@dataclass(frozen=True)
class SurveyFile:
    """The survey of a unit in a file, in slices."""

    path: UPath

    def __iter__(self) -> Iterator[Survey]:
        with self.path.open("rb") as file, pa.ipc.open_file(file) as table:
            for number in range(table.num_record_batches):
                yield Survey(*(column.to_numpy() for column in table.get_batch(number).columns))


SURVEY_SCHEMA = pa.schema(
    {"high": pa.uint64(), "low": pa.uint64(), "splits": pa.uint8(), "codes": pa.uint8(), "labels": pa.int32()}
)
"""The columns of a unit's survey."""


@dataclass(frozen=True)
class Cleaner:
    """How an input is cleaned on its own."""

    config: CleanConfig
    kind: SampleKind

    def convert(self, item: Any) -> Any:
        """Return an input as training sees it; None stays None."""
        return item.strip() if self.kind.strips and isinstance(item, str) else item

    def code(self, item: Input | None, label: str | None) -> int:
        """Return the code of a cleaned row that is dropped whatever the others are; else ``KEPT``."""
        if item is None:
            return code_of(self.kind.unread)
        # A record without any field cannot be encoded.
        drops_empty = self.config.drop_empty or self.kind.contents == "record"
        parts = self.kind.parts(item)
        if drops_empty and not all(part if isinstance(part, bytes) else part.strip() for part in parts):
            return code_of("empty")
        if len(set(parts)) < len(parts):  # a pair of equal texts
            return code_of("duplicate")
        reasons = [reason for part in parts if (reason := refuse(part, self.config))] if self.kind.is_text else []
        if reasons:
            return code_of(reasons[0])
        return code_of("unlabelled") if label == "" else KEPT


class Surveyor:
    """Surveys rows of one unit after another."""

    def __init__(self, cleaner: Cleaner, rule: Rule, test_groups: Hashes = NO_GROUPS) -> None:
        """``test_groups``: keys of the groups of ``data.test_source``. Other sources drop rows of these groups."""
        self._cleaner, self._rule, self._test_groups = cleaner, rule, test_groups
        self._labels: dict[str, int] = {}

    @property
    def label_names(self) -> list[str]:
        """The labels, in the order of ``Survey.labels``."""
        return list(self._labels)

    def survey(
        self, inputs: Iterable[Input | None], labels: Sequence[str] | None, groups: Sequence[str] | None
    ) -> tuple[list[Input | None], Hashes, Survey]:
        """Return cleaned inputs, half of the hash of each, and the survey. Raises LabelError if there are too many."""
        cleaned = [self._cleaner.convert(item) for item in inputs]
        kind = self._cleaner.kind
        given: Sequence[str | None] = labels or [None] * len(cleaned)
        of_inputs = hashes_of(compared_parts(kind, item, None) for item in cleaned)
        agree = labels is None or kind.labels_agree
        high, low = of_inputs if agree else hashes_of(map(partial(compared_parts, kind), cleaned, given))
        codes = np.array(
            [self._cleaner.code(item, label) for item, label in zip(cleaned, given, strict=True)], np.uint8
        )
        places = [self._labels.setdefault(kind.counted(label), len(self._labels)) if label else -1 for label in given]
        if kind.drops_conflicts and len(self._labels) > _MAX_LABELS:
            raise LabelError(
                f"the column of data.columns.label has over {_MAX_LABELS:,} different values, such as {given[-1]!r}: "
                "name the column of the class",
                given[-1] or "",
            )
        if groups is not None and len(self._test_groups):
            keys = split_keys(groups, np.zeros(len(groups), np.uint64))
            codes[(codes == KEPT) & np.isin(keys, self._test_groups)] = code_of("in_test")
        # Equal inputs are in one split, whatever their labels.
        splits = self._rule.split(split_keys(groups, of_inputs[1]))
        return cleaned, of_inputs[1], Survey(high, low, splits, codes, np.array(places, np.int32))


class SurveyWriter(Surveyor):
    """Surveys the rows of one unit into a file. It holds a slice of them in memory."""

    def __init__(
        self, cleaner: Cleaner, rule: Rule, sample: SampleBuilder, file: BinaryIO, test_groups: Hashes
    ) -> None:
        """Write the survey to ``file``. Add rows to ``sample`` unless they are dropped on their own."""
        super().__init__(cleaner, rule, test_groups)
        self._sample = sample
        self._file, self._slices = pa.ipc.new_file(file, SURVEY_SCHEMA), Slices()
        self.num_rows = 0
        """Number of rows that were added."""

    def add(
        self, inputs: Iterable[Input | None], labels: Sequence[str] | None, groups: Sequence[str] | None
    ) -> list[Input | None]:
        """Survey some rows, and return the cleaned inputs. Raises DataError if there are too many labels."""
        cleaned, low, survey = self.survey(inputs, labels, groups)
        usable = [item if code == KEPT else None for item, code in zip(cleaned, survey.codes.tolist(), strict=True)]
        self._sample.add(self.num_rows, usable, low)
        self._write(self._slices.add(survey.high, survey.low, survey.splits, survey.codes, survey.labels))
        self.num_rows += len(cleaned)
        return cleaned

    def _write(self, slices: Iterable[Arrays]) -> None:
        for columns in slices:
            self._file.write_batch(pa.record_batch([pa.array(column) for column in columns], SURVEY_SCHEMA))

    def close(self) -> None:
        """Write what is left."""
        self._write(self._slices.rest())
        self._file.close()


def compared_parts(kind: SampleKind, item: Input | None, label: str | None) -> Sequence[Input]:
    """Return the parts of a row by which it equals others: of its input, and of its label where equal inputs differ."""
    if kind.contents in ("row", "record") and isinstance(item, str):
        item = _with_one_case(item)
    if label is None or kind.labels_agree:
        return ("",) if item is None else kind.parts(item)
    return (_with_label(item, _with_one_case(f'"{label}"')),)


def _with_one_case(content: str) -> str:
    """Return JSON with each boolean text as ``True`` or ``False``, as typed files have it. csv files use any case."""
    return _BOOLEAN.sub(lambda found: f'"{found[1].capitalize()}"', content)


def _with_label(item: Input | None, label: str) -> bytes:
    """Return the bytes of an input and its label, which no other pair has."""
    content = b"" if item is None else item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item
    return f"{len(content)} ".encode() + content + label.encode()


def split_keys(groups: Sequence[str] | None, low: Hashes) -> Hashes:
    """Return the key by which each row is split: of its group, or of its content if it has none.

    Args:
        groups: the group of each row, "" for none. None: no row has one.
        low: the lower half of the hash of each row.
    """
    if groups is None:
        return low
    own = low.tolist()
    return np.array([_key_of(group) if group else own[row] for row, group in enumerate(groups)], np.uint64)


def group_keys(groups: Iterable[str]) -> Hashes:
    """Return the distinct keys of groups. Rows without a group have none."""
    return np.array(sorted({_key_of(group) for group in groups if group}), np.uint64)


def _key_of(group: str) -> int:
    return int.from_bytes(hashlib.blake2b(_one_spelling(group).encode(), digest_size=8).digest(), sys.byteorder)


def _one_spelling(group: str) -> str:
    """Return one text for all spellings of a number or boolean, or Unicode forms of a text. They are one group."""
    with suppress(ArithmeticError):  # the exponent has too many digits for Decimal
        if number_of(group) is not None and abs((number := (Decimal(group) + 0).normalize()).adjusted()) < _MAX_DIGITS:
            return format(number, "f")
    return spelling_of([group])(unicodedata.normalize("NFC", group))


def hashes_of(items: Iterable[Sequence[Input]]) -> Hashes:
    """Return the two halves of the hash of each input, of shape (2, inputs). Those of a pair are of its two texts."""
    digests = (digest_of(part, DIGEST_BYTES // len(parts)) for parts in items for part in parts)
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2).T


def digest_of(item: Input | None, size: int = DIGEST_BYTES) -> bytes:
    """Return the hash of a cleaned input, of ``size`` bytes."""
    content = b"" if item is None else item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item
    return hashlib.blake2b(content, digest_size=size).digest()
