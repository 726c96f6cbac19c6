"""The work on one unit: the survey, and later the shards. It runs in this process or in any other of a cluster."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel
from upath import UPath

from app.config import DataConfig
from app.data.examples import MAX_EXAMPLES, REASONS, Natural, Reason
from app.data.kinds import ColumnKind, merge_kinds
from app.data.preparation.encoding import Encoding
from app.data.preparation.sample import SampleBuilder
from app.data.preparation.samples import SampleKind, TokenKind, groups_in
from app.data.preparation.signatures import SignatureFiles
from app.data.preparation.survey import (
    ALL_TEST,
    ALL_TRAIN,
    KEPT,
    SPLITS,
    Cleaner,
    Rule,
    SplitRule,
    SurveyFile,
    SurveyWriter,
)
from app.data.preparation.writers import SplitWriter
from app.data.sharded import InputColumns
from app.data.shards import Shard, ShardPlace
from app.data.sources.cells import Rows
from app.data.sources.formats.base import PAIRS
from app.data.sources.labelled import kinds_of
from app.data.sources.units import Unit, read_unit
from app.data.targets import LabelError, Targets
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError
from app.storage import list_names, stream_atomically, to_path, write_atomically

_MAX_EXAMPLE = 120
WORK = ".work"
"""Folder of what a preparation needs until it ends."""


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
    config: DataConfig
    units: tuple[Unit, ...]
    kind: SampleKind
    targets: Targets | None
    """What the labels mean, once all is decided. None: not yet, or there are no labels."""
    sample_fraction: float
    columns: InputColumns = None
    """The columns of rows or records, once their kinds are decided."""

    @property
    def work(self) -> UPath:
        """The folder of files that are needed until the preparation ends."""
        return to_path(self.folder) / WORK

    @property
    def judge_file(self) -> UPath:
        """The ``LabelJudge``, if ``data.clean.label_noise`` is set."""
        return self.work / "judge.npz"

    def doubts_file(self, number: int) -> UPath:
        """The ``UnitDoubts`` of a unit."""
        return self.work / f"doubts-{number:05d}.json"

    def finished(self, prefix: str) -> set[int]:
        """Return the numbers of the units that have a file of this prefix."""
        names = [name.removeprefix(prefix) for name in list_names(self.work) if name.startswith(prefix)]
        return {int(name.partition(".")[0]) for name in names}

    def kinds_file(self, number: int) -> UPath:
        """The ``UnitKinds`` of a unit."""
        return self.work / f"kinds-{number:05d}.json"

    @property
    def kinds(self) -> dict[str, ColumnKind]:
        """The kinds of the columns of a table, once all units are examined."""
        kinds: dict[str, ColumnKind] = {}
        for unit in self.units:
            merge_kinds(kinds, UnitKinds.model_validate_json(self.kinds_file(unit.number).read_bytes()).kinds)
        return kinds

    def survey_of(self, number: int) -> SurveyFile:
        """The survey of a unit."""
        return SurveyFile(self.work / f"survey-{number:05d}.arrow")

    def sample_file(self, number: int) -> UPath:
        """The sample of a unit."""
        return self.work / f"sample-{number:05d}.arrow"

    def signature_files(self, number: int) -> SignatureFiles:
        """The signatures of a unit, for near duplicates."""
        assert self.config.clean.near_duplicates is not None
        return SignatureFiles(self.work, number, self.config.clean.near_duplicates)

    def codes_file(self, number: int) -> UPath:
        """One byte for each row of a unit: whether it is kept."""
        return self.work / f"codes-{number:05d}.bin"

    def facts_file(self, number: int) -> UPath:
        """The ``UnitFacts`` of a unit, written when it is surveyed."""
        return self.work / f"facts-{number:05d}.json"

    def facts(self, number: int) -> UnitFacts:
        """Return the facts about a surveyed unit."""
        return UnitFacts.model_validate_json(self.facts_file(number).read_bytes())

    def moves_file(self, number: int) -> UPath:
        """The file of the rows of a unit that moved from the split of their hash, with their new splits."""
        return self.work / f"moves-{number:05d}.bin"

    def unmoved_splits(self, number: int) -> NDArray[np.uint8]:
        """Return the split of each row of a unit by its hash, as an index into ``SPLITS``."""
        found = [survey.splits for survey in self.survey_of(number)]
        return np.concatenate([np.empty(0, np.uint8), *found])

    def splits(self, number: int) -> NDArray[np.uint8]:
        """Return the split of each row of a unit, as an index into ``SPLITS``, once all is decided."""
        splits = self.unmoved_splits(number)
        rows, places = np.frombuffer(self.moves_file(number).read_bytes(), np.int64).reshape(2, -1)
        splits[rows] = places
        return splits

    def digest_file(self, number: int) -> UPath:
        """The ``RowsDigest`` of a unit, by which the second pass notices that the source changed."""
        return self.work / f"digest-{number:05d}.bin"

    def result_file(self, number: int) -> UPath:
        """The ``UnitResult`` of a unit, written when its shards are."""
        return self.work / f"unit-{number:05d}.json"

    def examine(self, number: int) -> int:
        """Find the kinds of a table's columns in a unit, and return its number. Raises DataError as ``survey``."""
        columns, found = self.kind.columns(self._config_of(number)), UnitKinds()
        values = replace(columns, all=columns.values)
        for rows in read_unit(self.units[number], values):
            merge_kinds(found.kinds, kinds_of(rows, values))
        write_atomically(self.kinds_file(number), found.model_dump_json().encode())
        return number

    def survey(self, number: int) -> int:
        """Survey a unit, and return its number. Raises DataError if it cannot be read."""
        # Pairs are held out afterwards.
        of_source = ALL_TRAIN if self.kind.contents == PAIRS else SplitRule.of(self.config)
        rule: Rule = ALL_TEST if self.units[number].is_test else of_source
        config = self._config_of(number)
        facts, digest = UnitFacts(rows=0, label_names=[], unreadable=None), RowsDigest()
        with ExitStack() as stack:
            file = stack.enter_context(stream_atomically(self.survey_of(number).path))
            sample = SampleBuilder(self.sample_fraction, cuts=not self.kind.strips)
            surveyor = SurveyWriter(Cleaner(self.config.clean, self.kind), rule, sample, file)
            near = self.config.clean.near_duplicates is not None
            signatures = stack.enter_context(self.signature_files(number).writer()) if near else None
            for rows in self._rows(number):
                digest.add(rows)
                inputs = self.kind.inputs(rows, config, verify=True)
                try:
                    cleaned = surveyor.add(inputs, self.kind.labels(rows, config), groups_in(rows))
                except LabelError as error:
                    raise self.located(error, [number]) from error
                if facts.unreadable is None and None in cleaned:
                    facts.unreadable = rows.place(cleaned.index(None))
                if signatures and cleaned:
                    signatures.add(cleaned)
            surveyor.close()
            sample.build().save(self.sample_file(number))
        facts.rows, facts.label_names = surveyor.num_rows, surveyor.label_names
        write_atomically(self.digest_file(number), digest.digest())
        write_atomically(self.facts_file(number), facts.model_dump_json().encode())  # marks the unit as done
        return number

    def write(self, number: int) -> int:
        """Write the shards of a unit, and return its number. Raises DataError if the source changed meanwhile."""
        codes = np.frombuffer(self.codes_file(number).read_bytes(), np.uint8)
        splits = self.splits(number)
        examples: dict[Reason, list[str]] = {}
        found = [survey.labels for survey in self.survey_of(number)]
        places = np.concatenate([np.empty(0, np.int32), *found])
        names = [*self.facts(number).label_names, ""]  # -1 is no label
        config, writers = self._config_of(number), {split: self._writer(split, number) for split in SPLITS}
        for start, inputs, rows in self.converted(number):
            part = slice(start, start + len(inputs))
            labels = self.kind.labels(rows, config) or [""] * len(inputs)
            if [names[place] for place in places[part]] != list(map(self.kind.counted, labels)):
                raise self._changed(number)
            try:
                self._add(writers, inputs, labels, codes[part], splits[part])
            except LabelError as error:
                raise self.located(error, [number]) from error
            _collect(examples, inputs, rows, codes[part])
        shards = {split: writer.close() for split, writer in writers.items()}
        result = UnitResult(shards=shards, examples=examples)
        write_atomically(self.result_file(number), result.model_dump_json().encode())
        return number

    def located(self, error: LabelError, numbers: Iterable[int]) -> LabelError:
        """Return the error with the file and the row of the first such label in some units. They are read again."""
        for number in numbers:
            config = self._config_of(number)
            for rows in self._rows(number):
                for row, label in enumerate(self.kind.labels(rows, config) or ()):
                    if error.is_of(label):
                        return LabelError(f"{rows.place(row)}: {error}", error.label).of(error.rule, error.key)
        return error

    def converted(self, number: int) -> Iterator[tuple[int, list[Natural | None], Rows]]:
        """Yield the first row of each batch of a unit, its converted inputs, and the batch."""
        start, cleaner, digest = 0, Cleaner(self.config.clean, self.kind), RowsDigest()
        config = self._config_of(number)
        for rows in self._rows(number):
            digest.add(rows)
            yield start, [cleaner.convert(item) for item in self.kind.written(rows, config)], rows
            start += len(rows)
        if digest.digest() != self.digest_file(number).read_bytes():
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
        place, tokenizer = ShardPlace(to_path(self.folder), f"{split}-{number:05d}", self.config.shards.size), None
        if isinstance(self.kind, TokenKind):
            tokenizer = LanguageTokenizer.load(place.folder)
        return Encoding(self.kind, self.config, self.targets, self.columns, tokenizer).writer(place, key)

    def _rows(self, number: int) -> Iterator[Rows]:
        return read_unit(self.units[number], self.kind.columns(self._config_of(number)))

    def _config_of(self, number: int) -> DataConfig:
        """Return the configuration of a unit's source."""
        return self.config.each_source()[self.units[number].source]


def _collect(
    examples: dict[Reason, list[str]], inputs: list[Natural | None], rows: Rows, codes: NDArray[np.uint8]
) -> None:
    """Keep the first few rows that are dropped for each reason: their texts, or else where they lie."""
    for row in np.flatnonzero(codes != KEPT).tolist():
        shown = examples.setdefault(REASONS[codes[row] - 1], [])
        if len(shown) < MAX_EXAMPLES:
            item = inputs[row]
            shown.append(item[:_MAX_EXAMPLE] if isinstance(item, str) else rows.place(row))
