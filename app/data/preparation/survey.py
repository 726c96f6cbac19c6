"""The first pass over the data: a hash, a label and a split for each row, and a sample of the texts.

The rows themselves are not kept. What is dropped is decided afterwards, from the hashes of all units.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image
from upath import UPath

from app.config import CleanConfig
from app.data.examples import REASONS, Input, Reason
from app.data.preparation.rows import Rows
from app.storage import write_atomically

Hashes = NDArray[np.uint64]
_COLUMNS = ("high", "low", "splits", "codes", "labels")
KEPT = 0
"""Code of a row that is kept. Others are 1 + the place of the reason in ``REASONS``."""
SPLITS = ("train", "validation", "test")
_SPLIT_SALT, _SAMPLE_SALT = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
"""Odd numbers, by which the same hash gives unrelated fractions."""
_SLICE = 4096
"""Characters of a document that are in the sample together, or not."""


def code_of(reason: Reason) -> int:
    """Return the code of rows that are dropped for a reason."""
    return 1 + REASONS.index(reason)


@dataclass(frozen=True)
class SplitRule:
    """In which split a row is, by the hash of its key alone: it does not change when the data grow."""

    seed: int
    validation_fraction: float
    test_fraction: float

    def split(self, keys: Hashes) -> NDArray[np.uint8]:
        """Return the place in ``SPLITS`` of each key."""
        fractions = fractions_of(keys, _SPLIT_SALT ^ (self.seed % 2**64))
        splits = np.zeros(len(keys), np.uint8)
        splits[fractions < self.validation_fraction + self.test_fraction] = SPLITS.index("test")
        splits[fractions < self.validation_fraction] = SPLITS.index("validation")
        return splits


@dataclass(frozen=True)
class Survey:
    """What is known of the rows of a unit, in their order."""

    high: Hashes
    low: Hashes
    """The two halves of each row's hash."""
    splits: NDArray[np.uint8]
    """Place in ``SPLITS``."""
    codes: NDArray[np.uint8]
    """Of rows that are dropped whatever the others are."""
    labels: NDArray[np.int32]
    """Index into ``label_names``; -1: the row has no label."""
    label_names: list[str]

    def save(self, path: UPath) -> None:
        """Write the survey for ``load``."""
        rows = pa.table({name: pa.array(getattr(self, name)) for name in _COLUMNS})
        write_tables(path, rows, pa.table({"label_names": pa.array(self.label_names, pa.string())}))

    @classmethod
    def load(cls, path: UPath) -> "Survey":
        """Return what ``save`` wrote."""
        rows, names = read_tables(path, 2)
        high, low, splits, codes, labels = (rows[name].to_numpy() for name in _COLUMNS)
        return cls(high, low, splits, codes, labels, names["label_names"].to_pylist())


@dataclass(frozen=True)
class Sample:
    """Some rows of a unit, of which a tokenizer can be learned."""

    rows: NDArray[np.int64]
    inputs: list[Input]

    def save(self, path: UPath) -> None:
        """Write the sample for ``load``."""
        is_text = all(isinstance(item, str) for item in self.inputs)
        inputs = pa.array(self.inputs, pa.string() if is_text else pa.binary())
        write_tables(path, pa.table({"rows": pa.array(self.rows), "inputs": inputs}))

    @classmethod
    def load(cls, path: UPath) -> "Sample":
        """Return what ``save`` wrote."""
        (table,) = read_tables(path, 1)
        return cls(table["rows"].to_numpy(), table["inputs"].to_pylist())


def write_tables(path: UPath, *tables: pa.Table) -> None:
    """Write tables into one file, atomically."""
    buffer = BytesIO()
    for table in tables:
        with pa.ipc.new_stream(buffer, table.schema) as stream:
            stream.write_table(table)
    write_atomically(path, buffer.getvalue())


def read_tables(path: UPath, count: int) -> list[pa.Table]:
    """Return the tables that ``write_tables`` wrote."""
    reader = pa.BufferReader(path.read_bytes())
    return [pa.ipc.open_stream(reader).read_all() for _ in range(count)]


@dataclass(frozen=True)
class Cleaner:
    """How an input is cleaned on its own."""

    config: CleanConfig
    strips: bool
    """Whether white space around a text is dropped, as in labelled examples."""
    is_image: bool

    def clean(self, item: Input) -> Input | None:
        """Return an input as training sees it; None if it is not a text in UTF-8, or not a picture."""
        if self.is_image and not (isinstance(item, bytes) and _is_picture(item)):
            return None
        return self.convert(item)

    def convert(self, item: Input) -> Input | None:
        """Return an input as training sees it, without a look at pictures."""
        if self.is_image:
            return item
        if isinstance(item, bytes):
            try:
                item = item.decode("utf-8")
            except UnicodeDecodeError:
                return None
        return item.strip() if self.strips else item

    def code(self, item: Input | None, label: str | None) -> int:
        """Return the code of a cleaned row that is dropped whatever the others are; else ``KEPT``."""
        if item is None:
            return code_of("unreadable" if self.is_image else "not_text")
        if self.config.drop_empty and not (item if self.strips or isinstance(item, bytes) else item.strip()):
            return code_of("empty")
        if reason := self.config.length_refused(item):
            return code_of(reason)
        return code_of("unlabelled") if label == "" else KEPT


class Surveyor:
    """Surveys the rows of one unit."""

    def __init__(self, cleaner: Cleaner, rule: SplitRule, sample_fraction: float) -> None:
        """``sample_fraction`` is the share of the rows, or of the text of documents, that is kept as a sample."""
        self._cleaner, self._rule, self._sample_fraction = cleaner, rule, sample_fraction
        self._digests, self._groups, self._codes = bytearray(), bytearray(), bytearray()
        self._labels: list[int] = []
        self._label_names: dict[str, int] = {}
        self._sample: list[tuple[int, Input]] = []

    def add(self, rows: Rows) -> list[Input | None]:
        """Survey some rows, and return the cleaned inputs."""
        first = len(self._codes)
        cleaned = [self._cleaner.clean(item) for item in rows.inputs]
        digests = b"".join(map(_digest, cleaned))
        self._digests += digests
        for place, group in enumerate(rows.groups or ()):
            # A row without a group is on its own, by its content: else all of them would be in one split.
            own = digests[16 * place + 8 : 16 * place + 16]
            self._groups += hashlib.blake2b(group.encode(), digest_size=8).digest() if group else own
        labels: Sequence[str | None] = rows.labels or [None] * len(cleaned)
        for item, label in zip(cleaned, labels, strict=True):
            self._codes.append(self._cleaner.code(item, label))
            self._labels.append(self._label_names.setdefault(label, len(self._label_names)) if label else -1)
        lows = np.frombuffer(digests, np.uint64)[1::2]
        is_sampled = fractions_of(lows, _SAMPLE_SALT) < self._sample_fraction
        for place, item in enumerate(cleaned):
            if item is None or self._codes[first + place] != KEPT:
                continue
            if self._is_sliced(item):
                self._sample += [(first + place, part) for part in self._slices(item, lows[place])]
            elif is_sampled[place]:
                self._sample.append((first + place, item))
        return cleaned

    def _is_sliced(self, item: Input) -> bool:
        """Return whether the sample has parts of an input: of a long document, unless it has all."""
        return self._sample_fraction < 1.0 and not self._cleaner.strips and len(item) > _SLICE

    def _slices(self, item: Input, low: np.uint64) -> Iterator[Input]:
        """Yield the slices of a document that are in the sample. A few whole documents may be too many or none."""
        keys = low ^ np.arange(-(-len(item) // _SLICE), dtype=np.uint64)
        for place in np.flatnonzero(fractions_of(keys, _SAMPLE_SALT) < self._sample_fraction).tolist():
            yield item[place * _SLICE : (place + 1) * _SLICE]

    def finish(self) -> tuple[Survey, Sample]:
        """Return what is known of the rows, and the sample."""
        high, low = np.frombuffer(bytes(self._digests), np.uint64).reshape(-1, 2).T
        keys = np.frombuffer(bytes(self._groups), np.uint64) if self._groups else low
        codes, labels = np.frombuffer(bytes(self._codes), np.uint8), np.array(self._labels, np.int32)
        survey = Survey(high.copy(), low.copy(), self._rule.split(keys), codes, labels, list(self._label_names))
        rows = np.array([row for row, _ in self._sample], np.int64)
        return survey, Sample(rows, [item for _, item in self._sample])


def _is_picture(content: bytes) -> bool:
    try:
        with Image.open(BytesIO(content)) as image:
            image.load()
    except Exception:  # Pillow's decoders raise errors of many types
        return False
    return True


def _digest(item: Input | None) -> bytes:
    content = b"" if item is None else item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item
    return hashlib.blake2b(content, digest_size=16).digest()


def fractions_of(keys: Hashes, salt: int) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each key (the mix of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        mixed = keys ^ np.uint64(salt)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed.astype(np.float64) / 2.0**64


def resolve(surveys: "Surveys", clean: CleanConfig, codes: NDArray[np.uint8], max_bytes: int) -> None:
    """Write the codes of duplicates and of inputs under several labels into ``codes``, of all rows.

    Rows are compared in parts, by their hash, so that ``max_bytes`` suffice. Of equal rows the first is kept.
    """
    parts = max(1, -(-len(codes) * _BYTES_PER_ROW // max_bytes))
    for part in range(parts):
        rows, high, low, labels = surveys.hashes(part, parts)
        order = np.lexsort((rows, low, high))
        rows, high, low, labels = rows[order], high[order], low[order], labels[order]
        is_first = np.ones(len(rows), bool)
        is_first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        if not len(rows):
            continue
        starts = np.flatnonzero(is_first)
        group = np.cumsum(is_first) - 1
        conflicts = (np.minimum.reduceat(labels, starts) != np.maximum.reduceat(labels, starts))[group]
        if clean.deduplicate:
            codes[rows[~is_first]] = code_of("duplicate")
            codes[rows[is_first & conflicts]] = code_of("conflicting")
        else:
            codes[rows[conflicts]] = code_of("conflicting")


_BYTES_PER_ROW = 96
"""Memory that ``resolve`` takes for a row: its hash, its number, its label, and their sorted copies."""


@dataclass(frozen=True)
class Surveys:
    """The surveys of all units, in files."""

    paths: list[UPath]
    labels: list[str]
    """All labels, sorted."""
    starts: NDArray[np.int64]
    """Number of the first row of each unit, and of all rows."""

    @classmethod
    def of(cls, paths: list[UPath]) -> "Surveys":
        """Read how many rows and which labels the units have."""
        sizes, labels = [0], set[str]()
        for path in paths:
            survey = Survey.load(path)
            sizes.append(len(survey.codes))
            labels.update(survey.label_names)
        return cls(paths, sorted(labels), np.cumsum(sizes))

    def __iter__(self) -> Iterator[tuple[int, Survey]]:
        """Yield the first row of each unit, and its survey."""
        for start, path in zip(self.starts[:-1], self.paths, strict=True):
            yield int(start), Survey.load(path)

    def labels_of(self, survey: Survey) -> NDArray[np.int32]:
        """Return the place in ``labels`` of each row of a unit; -1 for none."""
        places = {label: place for place, label in enumerate(self.labels)}
        table = np.array([*(places[name] for name in survey.label_names), -1], np.int32)
        return table[survey.labels]

    def hashes(self, part: int, parts: int) -> tuple[NDArray[np.int64], Hashes, Hashes, NDArray[np.int32]]:
        """Return rows, hashes and labels of those rows that are not dropped yet and whose hash is in a part of all."""
        found = []
        for start, survey in self:
            chosen = np.flatnonzero((survey.codes == KEPT) & (survey.high % np.uint64(parts) == part))
            labels = self.labels_of(survey)[chosen]
            found.append((start + chosen, survey.high[chosen], survey.low[chosen], labels))
        rows, high, low, labels = (np.concatenate(column) for column in zip(*found, strict=True))
        return rows, high, low, labels
