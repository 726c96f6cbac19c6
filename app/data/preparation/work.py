"""The work on one unit: the survey, and later the shards. It runs in this process or in any other of a cluster."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel
from upath import UPath

from app.config import DataConfig
from app.data.examples import MAX_EXAMPLES, REASONS, Natural, Reason
from app.data.kinds import ColumnKind, merge_kinds
from app.data.preparation.encoding import Encoding
from app.data.preparation.sample import Hashes, SampleBuilder
from app.data.preparation.samples import TokenKind, groups_in
from app.data.preparation.signatures import SignatureFiles
from app.data.preparation.survey import (
    ALL_TEST,
    ALL_TRAIN,
    KEPT,
    NO_GROUPS,
    SPLITS,
    Cleaner,
    Rule,
    SplitRule,
    SurveyFile,
    SurveyWriter,
    group_keys,
)
from app.data.preparation.writers import SplitWriter
from app.data.shards import Shard, ShardPlace
from app.data.sources.cells import Rows
from app.data.sources.formats.base import PAIRS
from app.data.sources.labelled import kinds_of
from app.data.sources.units import Unit, read_unit
from app.data.targets import LabelError
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError
from app.storage import list_names, stream_atomically, to_path, write_atomically

_MAX_EXAMPLE = 120
WORK = ".work"
"""Folder of what a preparation needs until it ends."""
Part = Literal["kinds", "survey", "sample", "codes", "facts", "moves", "digest", "groups", "named", "doubts", "result"]
"""What is kept of a unit there.

- ``kinds``: its ``UnitKinds``, of a table;
- ``survey``, ``sample``: its ``SurveyFile`` and its ``Sample``;
- ``digest``: its ``RowsDigest``, by which the second pass notices that the source changed;
- ``groups``: the keys of its groups, only for a unit of ``data.test_source``;
- ``named``: the locations of the files that its cells name, if there are any;
- ``facts``: its ``UnitFacts``, written last when it is surveyed;
- ``doubts``: its ``UnitDoubts``, with ``data.clean.label_noise``;
- ``codes``: one byte for each row: whether it is kept;
- ``moves``: the rows that moved from the split of their hash, with their new splits;
- ``result``: its ``UnitResult``, written when its shards are.
"""


class UnitFacts(BaseModel):
    """Facts about a whole unit."""

    rows: int
    label_names: list[str]
    unreadable: str | None
    """Where the first row lies that is not a text or picture."""


class UnitKinds(BaseModel):
    """The kinds of the columns of a table, in the rows of a unit."""

    kinds: dict[str, ColumnKind] = {}


class UnitResult(BaseModel):
    """The shards of a unit, by split, and some of the rows that were dropped."""

    shards: dict[str, list[Shard]]
    examples: dict[Reason, list[str]]


class RowsDigest:
    """A hash of rows in their order, however they come in batches: the second pass notices that a source changed."""

    def __init__(self) -> None:
        self._columns: dict[str, blake2b] = {}

    def add(self, rows: Rows) -> None:
        """Add rows, with all of their cells."""
        for key, cells in rows.cells.items():
            digest = self._columns.setdefault(key, blake2b(digest_size=16))
            texts = cells if pa.types.is_binary(cells.type) else cells.cast(pa.string())
            for cell in texts.cast(pa.binary()).to_pylist():
                # With its length, a cell cannot run into the next one.
                digest.update((-1 if cell is None else len(cell)).to_bytes(8, signed=True))
                digest.update(cell or b"")

    def digest(self) -> bytes:
        """Return the hash of all rows that were added."""
        return blake2b(b"".join(part.digest() for part in self._columns.values()), digest_size=16).digest()


@dataclass(frozen=True)
class UnitWork:
    """What the work on any unit needs. It can be pickled."""

    folder: str
    encoding: Encoding
    """How rows are read. Its targets, and the columns of rows or records, are known once all is decided."""
    units: tuple[Unit, ...]
    sample_fraction: float

    @property
    def work(self) -> UPath:
        """The folder of files that are needed until the preparation ends."""
        return to_path(self.folder) / WORK

    @property
    def judge_file(self) -> UPath:
        """The ``LabelJudge``, if ``data.clean.label_noise`` is set."""
        return self.work / "judge.npz"

    def file(self, part: Part, number: int) -> UPath:
        """The file of a part of what is kept of a unit."""
        return self.work / f"{part}-{number:05d}"

    def finished(self, part: Part) -> set[int]:
        """Return the numbers of the units that have this part."""
        return {int(name.removeprefix(f"{part}-")) for name in list_names(self.work) if name.startswith(f"{part}-")}

    @property
    def kinds(self) -> dict[str, ColumnKind]:
        """The kinds of the columns of a table, once all units are examined."""
        kinds: dict[str, ColumnKind] = {}
        for unit in self.units:
            merge_kinds(kinds, UnitKinds.model_validate_json(self.file("kinds", unit.number).read_bytes()).kinds)
        return kinds

    def survey_of(self, number: int) -> SurveyFile:
        """The survey of a unit."""
        return SurveyFile(self.file("survey", number))

    def signature_files(self, number: int) -> SignatureFiles:
        """The signatures of a unit, for near duplicates."""
        threshold = self.encoding.config.clean.near_duplicates
        assert threshold is not None
        return SignatureFiles(self.work, number, threshold)

    def facts(self, number: int) -> UnitFacts:
        """Return the facts about a surveyed unit."""
        return UnitFacts.model_validate_json(self.file("facts", number).read_bytes())

    @property
    def named(self) -> set[str]:
        """The locations of all files that cells name, once all units are surveyed."""
        found = [json.loads(self.file("named", number).read_bytes()) for number in sorted(self.finished("named"))]
        return {location for locations in found for location in locations}

    def unmoved_splits(self, number: int) -> NDArray[np.uint8]:
        """Return the split of each row of a unit by its hash, as an index into ``SPLITS``."""
        found = [survey.splits for survey in self.survey_of(number)]
        return np.concatenate([np.empty(0, np.uint8), *found])

    def splits(self, number: int) -> NDArray[np.uint8]:
        """Return the split of each row of a unit, as an index into ``SPLITS``, once all is decided."""
        splits = self.unmoved_splits(number)
        rows, places = np.frombuffer(self.file("moves", number).read_bytes(), np.int64).reshape(2, -1)
        splits[rows] = places
        return splits

    def examine(self, number: int) -> int:
        """Find the kinds of a table's columns in a unit, and return its number. Raises DataError as ``survey``."""
        columns, found = self.encoding.kind.columns(self._config_of(number)), UnitKinds()
        values = replace(columns, all=columns.values)
        for rows in read_unit(self.units[number], values):
            merge_kinds(found.kinds, kinds_of(rows, values))
        write_atomically(self.file("kinds", number), found.model_dump_json().encode())
        return number

    def survey(self, number: int) -> int:
        """Survey a unit, and return its number. Raises DataError if it cannot be read."""
        # Pairs are held out afterwards.
        of_source = ALL_TRAIN if self.encoding.kind.contents == PAIRS else SplitRule.of(self.encoding.config)
        rule: Rule = ALL_TEST if self.units[number].is_test else of_source
        config, groups = self._config_of(number), set[str]()
        facts, digest, named = UnitFacts(rows=0, label_names=[], unreadable=None), RowsDigest(), set[str]()
        with ExitStack() as stack:
            file = stack.enter_context(stream_atomically(self.survey_of(number).path))
            sample = SampleBuilder(self.sample_fraction, cuts=not self.encoding.kind.strips)
            cleaner = Cleaner(self.encoding.config.clean, self.encoding.kind)
            surveyor = SurveyWriter(cleaner, rule, sample, file, self._test_groups(number))
            near = self.encoding.config.clean.near_duplicates is not None
            signatures = stack.enter_context(self.signature_files(number).writer()) if near else None
            for rows in self._rows(number):
                digest.add(rows)
                named |= rows.files
                groups.update(groups_in(rows) or ())
                inputs = self.encoding.kind.inputs(rows, config, verify=True)
                try:
                    cleaned = surveyor.add(inputs, self.encoding.kind.labels(rows, config), groups_in(rows))
                except LabelError as error:
                    raise self.located(error, [number]) from error
                if facts.unreadable is None and None in cleaned:
                    facts.unreadable = rows.place(cleaned.index(None))
                if signatures and cleaned:
                    signatures.add(cleaned)
            surveyor.close()
            sample.build().save(self.file("sample", number))
        facts.rows, facts.label_names = surveyor.num_rows, surveyor.label_names
        write_atomically(self.file("digest", number), digest.digest())
        if self.units[number].is_test:
            write_atomically(self.file("groups", number), group_keys(groups).tobytes())
        if named:
            write_atomically(self.file("named", number), json.dumps(sorted(named)).encode())
        write_atomically(self.file("facts", number), facts.model_dump_json().encode())  # marks the unit as done
        return number

    def _test_groups(self, number: int) -> Hashes:
        """Return the keys of the groups of ``data.test_source``, which is surveyed first; none for its own units."""
        tests = [] if self.units[number].is_test else [unit.number for unit in self.units if unit.is_test]
        if not tests or not self.encoding.config.group_column:
            return NO_GROUPS
        return np.concatenate([np.frombuffer(self.file("groups", test).read_bytes(), np.uint64) for test in tests])

    def write(self, number: int) -> int:
        """Write the shards of a unit, and return its number. Raises DataError if the source changed meanwhile."""
        codes = np.frombuffer(self.file("codes", number).read_bytes(), np.uint8)
        splits = self.splits(number)
        examples: dict[Reason, list[str]] = {}
        found = [survey.labels for survey in self.survey_of(number)]
        places = np.concatenate([np.empty(0, np.int32), *found])
        names = [*self.facts(number).label_names, ""]  # -1 is no label
        config, writers = self._config_of(number), {split: self._writer(split, number) for split in SPLITS}
        for start, inputs, rows in self.converted(number):
            part = slice(start, start + len(inputs))
            labels = self.encoding.kind.labels(rows, config) or [""] * len(inputs)
            if [names[place] for place in places[part]] != list(map(self.encoding.kind.counted, labels)):
                raise self._changed(number)
            try:
                self._add(writers, inputs, labels, codes[part], splits[part])
            except LabelError as error:
                raise self.located(error, [number]) from error
            _collect(examples, inputs, rows, codes[part])
        shards = {split: writer.close() for split, writer in writers.items()}
        result = UnitResult(shards=shards, examples=examples)
        write_atomically(self.file("result", number), result.model_dump_json().encode())
        return number

    def located(self, error: LabelError, numbers: Iterable[int]) -> LabelError:
        """Return the error with the file and the row of the first such label in some units. They are read again."""
        for number in numbers:
            config = self._config_of(number)
            for rows in self._rows(number):
                for row, label in enumerate(self.encoding.kind.labels(rows, config) or ()):
                    if error.is_of(label):
                        return LabelError(f"{rows.place(row)}: {error}", error.label).of(error.rule, error.key)
        return error

    def converted(self, number: int) -> Iterator[tuple[int, list[Natural | None], Rows]]:
        """Yield the first row of each batch of a unit, its converted inputs, and the batch."""
        start, cleaner, digest = 0, Cleaner(self.encoding.config.clean, self.encoding.kind), RowsDigest()
        config = self._config_of(number)
        for rows in self._rows(number):
            digest.add(rows)
            yield start, [cleaner.convert(item) for item in self.encoding.kind.written(rows, config)], rows
            start += len(rows)
        if digest.digest() != self.file("digest", number).read_bytes():
            raise self._changed(number)

    def _changed(self, number: int) -> DataError:
        pieces = self.units[number].pieces
        where = repr(pieces[0].path) + (f" and {len(pieces) - 1} more parts" if len(pieces) > 1 else "")
        return DataError(f"{where} changed since the first pass over the source: prepare the data again").of(
            "source.changed"
        )

    @staticmethod
    def _add(
        writers: dict[str, SplitWriter],
        inputs: list[Natural | None],
        labels: list[str],
        codes: NDArray[np.uint8],
        splits: NDArray[np.uint8],
    ) -> None:
        for place, split in enumerate(SPLITS):
            chosen = np.flatnonzero((codes == KEPT) & (splits == place)).tolist()
            kept = [item for row in chosen if (item := inputs[row]) is not None]
            if kept:
                writers[split].add(kept, [labels[row] for row in chosen])

    def _writer(self, split: str, number: int) -> SplitWriter:
        key = "test_source" if self.units[number].is_test else "source"
        place = ShardPlace(to_path(self.folder), f"{split}-{number:05d}", self.encoding.config.shards.size)
        encoding = self.encoding
        if isinstance(encoding.kind, TokenKind):
            encoding = replace(encoding, tokenizer=LanguageTokenizer.load(place.folder))
        return encoding.writer(place, key)

    def _rows(self, number: int) -> Iterator[Rows]:
        return read_unit(self.units[number], self.encoding.kind.columns(self._config_of(number)))

    def _config_of(self, number: int) -> DataConfig:
        """Return the configuration of a unit's source."""
        return self.encoding.config.each_source()[self.units[number].source]


def _collect(
    examples: dict[Reason, list[str]], inputs: list[Natural | None], rows: Rows, codes: NDArray[np.uint8]
) -> None:
    """Keep the first few rows that are dropped for each reason: their texts, or else where they lie."""
    for row in np.flatnonzero(codes != KEPT).tolist():
        shown = examples.setdefault(REASONS[codes[row] - 1], [])
        if len(shown) < MAX_EXAMPLES:
            item = inputs[row]
            shown.append(item[:_MAX_EXAMPLE] if isinstance(item, str) else rows.place(row))
