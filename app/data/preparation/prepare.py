"""Preparation from the source to an index of shards. It goes on where an earlier one was interrupted."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from upath import UPath

from app.checksums import sha256_of
from app.config import ColumnsConfig, DataConfig, Recipe
from app.data.chat import CUT
from app.data.examples import MAX_EXAMPLES, CleaningReport, Input, Reason
from app.data.kinds import in_words, resolve_kinds
from app.data.preparation.decision import Decision, decide
from app.data.preparation.encoding import Encoding
from app.data.preparation.fingerprint import fingerprint_of, settings_of
from app.data.preparation.named_files import NamedFiles
from app.data.preparation.progress import UnitProgress
from app.data.preparation.sample import SAMPLE_FILE, Sample, SampleBuilder, fraction_for
from app.data.preparation.samples import SampleKind, TokenKind
from app.data.preparation.survey import IN_TEST, IN_TRAIN, IN_VALIDATION, KEPT, SPLITS
from app.data.preparation.work import WORK, Part, UnitResult, UnitWork
from app.data.preparation.writers import UNIT_SHARDS
from app.data.prepared import TEST, TRAIN, VALIDATION
from app.data.shards import Shard, ShardIndex
from app.data.sources.formats import FORMATS
from app.data.sources.formats.base import DOCUMENTS, SourceFile
from app.data.sources.source import Source
from app.data.sources.units import Unit, cut_sources, list_all, list_files, tell_unread
from app.data.targets import LabelError
from app.data.tokenizer import SETTINGS_FILE, LanguageTokenizer
from app.errors import DataError
from app.heartbeat import wait_for_lock
from app.pretrained import open_pretrained
from app.process_state import return_freed_memory
from app.storage import absolute_location

SHARDS = "data"
"""Folder of storage that has the shards of each source and way to prepare it."""
RunUnits = Callable[[Callable[[int], int], Sequence[int]], Iterable[int]]
"""Calls a function with the number of each unit, and yields each number when that unit is done."""


@dataclass(frozen=True)
class _Listed:
    """The files of a recipe, by one listing of each source."""

    sources: list[list[SourceFile]]
    tests: list[SourceFile]
    unread: list[list[str]]
    """The paths of each source that the task does not read."""

    @property
    def files(self) -> list[SourceFile]:
        """All that are read."""
        return [*self.tests, *(file for found in self.sources for file in found)]


@dataclass(frozen=True)
class Preparer:
    """Prepares the data of one recipe."""

    recipe: Recipe
    kind: SampleKind
    storage: UPath
    run_units: RunUnits = map

    def prepare(self) -> UPath:
        """Return the folder of the shards. They are made unless they are there.

        Raises:
            DataError: the source cannot be read, or has too few rows.
        """
        config = self.recipe.data
        listed = self._listed()
        self._require_columns([file for found in listed.sources for file in found])
        settings = settings_of(self.recipe, self.kind)
        fingerprint = self._with_named(fingerprint_of(listed.files, settings))
        folder = self._folder(fingerprint)
        if ShardIndex.find(folder) is not None:
            return folder
        with wait_for_lock(folder, f"preparing {config.source!r}"):
            if ShardIndex.find(folder) is None:  # else the job that had the lock has made it
                try:
                    self._make(folder, listed, fingerprint, settings)
                except DataError as error:
                    if error.rule == "source.changed":
                        _discard(folder)
                    raise
        return folder

    def _folder(self, fingerprint: str) -> UPath:
        return self.storage / SHARDS / fingerprint[:16]

    def _with_named(self, fingerprint: str) -> str:
        """Return the fingerprint of the source. Files that its tables name are added once one of them has changed."""
        found = NamedFiles.find(self._folder(fingerprint))
        if found is None or (now := NamedFiles.of(found.versions)) == found:
            return fingerprint
        return sha256_of(f"{fingerprint} {now.sha256}".encode())

    def _require_columns(self, files: list[SourceFile]) -> None:
        """Raise DataError if the recipe names a column of a source that has none."""
        config = self.recipe.data
        has_columns = {name for name, one in FORMATS.items() if one.has_columns}
        if config.group_column and (file := next((file for file in files if file.format not in has_columns), None)):
            raise DataError(
                f"data.group_column is {config.group_column!r}, and {file.path!r} is not a table: leave it out"
            ).of("group.no_table", "data.group_column")

    def _make(self, folder: UPath, listed: _Listed, fingerprint: str, settings: dict[str, Any]) -> None:
        """Make the shards, or go on where an earlier job was interrupted."""
        config = self._resolved(listed.sources, listed.tests)
        for one, unread in zip(config.each_source(), listed.unread, strict=True):
            tell_unread(Source(one.source), unread)
        units = cut_sources(listed.sources, listed.tests, UNIT_SHARDS * config.shards.size)
        _require_memory(units, config.shards.memory)
        fraction = fraction_for(sum(unit.bytes for unit in units))
        work, columns = self._with_kinds(UnitWork(str(folder), Encoding(self.kind, config), tuple(units), fraction))
        # The test source is surveyed first, because other sources drop rows of its groups.
        tests = [unit for unit in units if unit.is_test and config.group_column]
        for part in filter(None, (tests, units[len(tests) :])):
            self._run("reading", work, work.survey, "facts", part)
        decision = decide(work, lambda: self._judge(work))
        work = self._with_codec(work, decision)
        self._run("writing shards", work, work.write, "result")
        self._require_unchanged(listed)
        report = decision.report.model_copy(update={"columns": columns})
        self._publish(work, folder, fingerprint, settings, report)

    def _resolved(self, sources: list[list[SourceFile]], tests: list[SourceFile]) -> DataConfig:
        """Return the section ``data`` with all columns that are read. Raises DataError if a table lacks one."""
        config, named = self.recipe.data, list[ColumnsConfig]()
        for one, files in zip(config.each_source(), sources, strict=True):
            # Rows of all sources have the features of the first one.
            shared = {"features": named[0].features} if named and one.columns.features is None else {}
            named.append(self.kind.resolve(files, one.columns.model_copy(update=shared), config.group_column))
            if self.kind.contents == "row" and not named[-1].features:
                raise DataError(
                    f"data.source {one.source!r} has no columns except the label and the group: add columns of features"
                ).of("columns.only_label", "data.source")
        for place, columns in enumerate(named):
            if {*(columns.features or ())} != {*(named[0].features or ())}:
                raise DataError(
                    f"data.sources.{place}.columns.features has other columns than the first source: name the same, or "
                    "leave them out"
                ).of("sources.differ", "data.sources")
        if tests:
            self.kind.resolve(tests, named[0], config.group_column)
        if not config.sources:
            return config.model_copy(update={"columns": named[0]})
        each = [one.model_copy(update={"columns": columns}) for one, columns in zip(config.sources, named, strict=True)]
        return config.model_copy(update={"sources": each})

    def _with_kinds(self, work: UnitWork) -> tuple[UnitWork, dict[str, str]]:
        """Return the work with the kinds of a table's columns, and a description of each column."""
        config = given = work.encoding.config
        names = [column.name for column in self.kind.columns(config.each_source()[0]).values]
        require_known(config.columns, names)
        if not names:
            return work, {}
        self._run("reading columns", work, work.examine, "kinds")
        kinds = work.kinds
        columns = resolve_kinds(kinds, config.columns)
        config = config.model_copy(update={"columns": columns})
        return replace(work, encoding=replace(work.encoding, config=config)), in_words(kinds, given.columns)

    def _judge(self, work: UnitWork) -> None:
        from app.data.preparation.noisy_labels import judge_unit  # scikit-learn takes a second to import

        self._run("judging labels", work, partial(judge_unit, work), "doubts")

    def _listed(self) -> _Listed:
        """List the files of each source, and of the test source, without those of a storage inside a source."""
        config, contents, test = self.recipe.data, self.kind.contents, self.recipe.data.test_source
        listed = _Listed([], [] if test is None else list_files(Source(test, "data.test_source"), contents), [])
        for one in config.each_source():
            files, unread = list_all(Source(one.source), contents)
            listed.sources.append([file for file in files if self._is_data(one, file.path)])
            listed.unread.append([path for path in unread if self._is_data(one, path)])
        return listed

    def _is_data(self, one: DataConfig, path: str) -> bool:
        """Return whether a file of a source is none of the storage, which may lie in the source."""
        source, root = (f"{absolute_location(str(place)).rstrip('/')}/" for place in (one.source, self.storage))
        if not root.startswith(source):
            return True
        return not absolute_location(path).startswith(f"{root}{SHARDS}/" if root == source else root)

    def _require_unchanged(self, listed: _Listed) -> None:
        """List the source again. Raises DataError if it is not as it was: its fingerprint would tell a lie."""
        if changed := sorted({file.path for file in {*listed.files} ^ {*self._listed().files}}):
            raise DataError(
                f"data.source {self.recipe.data.source!r} changed while it was prepared ({len(changed):,} files, such "
                f"as {changed[0]!r}): prepare the data again"
            ).of("source.changed", "data.source")

    def _run(
        self,
        what: str,
        work: UnitWork,
        function: Callable[[int], int],
        part: Part,
        units: Sequence[Unit] | None = None,
    ) -> None:
        """Run ``function`` on each of ``units`` (default: all) that lacks this part."""
        units, done = work.units if units is None else units, work.finished(part)
        sizes = {unit.number: unit.bytes for unit in units}
        left = [number for number in sizes if number not in done]
        progress = UnitProgress(what, sizes, done & sizes.keys(), time.monotonic)
        _release_memory()
        # Small data are worked on here: a task on a cluster would take longer to start.
        run_units = self.run_units if len(units) > 1 else map
        for number in run_units(function, left):
            progress.add(number)
        _release_memory()

    def _with_codec(self, work: UnitWork, decision: Decision) -> UnitWork:
        """Save what the shards are written with, and the sample that a processor is fitted on. Return the work."""
        folder = work.work.parent
        sample = self._sample(work)
        if not sample.inputs and self.recipe.model.pretrained is None:
            raise DataError(
                f"data.source {self.recipe.data.source!r} has no training row in the sample that a "
                "tokenizer is learned from: give more or shorter rows, or another data.seed"
            ).of("tokenizer.no_text", "data.source")
        if sample.fraction < 1.0 and self.recipe.model.pretrained is None:
            what = "parts of documents" if self.kind.contents == DOCUMENTS else self.kind.what
            print(
                f"the processor is fitted to a sample of the training data: {len(sample.inputs):,} {what}", flush=True
            )
        if isinstance(self.kind, TokenKind):
            if not (folder / SETTINGS_FILE).exists():  # it is written last
                self._fit_tokenizer(sample.inputs).save(folder)
            return work
        sample.save(folder / SAMPLE_FILE)
        known = (
            (IN_TRAIN, IN_VALIDATION, IN_TEST) if self.recipe.data.test_source is None else (IN_TRAIN, IN_VALIDATION)
        )
        learned, trained = decision.rows_of(*known), decision.rows_of(IN_TRAIN)
        try:
            return replace(work, encoding=work.encoding.fitted(folder, learned, trained))
        except LabelError as error:
            raise work.located(error, [unit.number for unit in work.units]) from error

    def _sample(self, work: UnitWork) -> Sample:
        """Return a sample of the training rows that are kept. Compressed files may have more text than they say."""
        builder = SampleBuilder(work.sample_fraction)
        for unit in work.units:
            sample = Sample.load(work.file("sample", unit.number))
            codes = np.frombuffer(work.file("codes", unit.number).read_bytes(), np.uint8)
            is_kept = (codes == KEPT) & (work.splits(unit.number) == IN_TRAIN)
            builder.limit(sample.fraction)
            for row, item, fraction in zip(sample.rows, sample.inputs, sample.fractions.tolist(), strict=True):
                if is_kept[row]:
                    builder.keep(row, item, fraction)
        return builder.build()

    def _fit_tokenizer(self, documents: Sequence[Input]) -> LanguageTokenizer:
        config, pretrained = self.recipe.data, self.recipe.model.source
        if pretrained is not None:
            return LanguageTokenizer.from_pretrained(open_pretrained(pretrained), config)
        return LanguageTokenizer.fit((document for document in documents if isinstance(document, str)), config)

    def _publish(
        self, work: UnitWork, folder: UPath, fingerprint: str, settings: dict[str, Any], report: CleaningReport
    ) -> None:
        """Write the report and the index, and remove what is no longer needed."""
        splits: dict[str, list[Shard]] = {split: [] for split in SPLITS}
        examples: dict[Reason, list[str]] = {}
        for unit in work.units:
            result = UnitResult.model_validate_json(work.file("result", unit.number).read_bytes())
            for split, shards in result.shards.items():
                splits[split] += [shard.model_copy(update={"source": unit.source}) for shard in shards]
            for reason, shown in result.examples.items():
                examples[reason] = [*examples.get(reason, []), *shown][:MAX_EXAMPLES]
        self._require_blocks(splits)
        cut = sum(shard.totals.get(CUT, 0) for shards in splits.values() for shard in shards)
        report.model_copy(update={"examples": examples | report.examples, "cut": cut}).save(folder)
        index = ShardIndex(
            fingerprint=fingerprint,
            created=datetime.now(UTC),
            task=self.recipe.task,
            source=self.recipe.data.source,
            settings=settings,
            columns=work.encoding.columns,
            splits={split: shards for split, shards in splits.items() if shards},
        )
        if named := work.named:
            NamedFiles.of(named).save(folder)
        index.save(folder)
        work.work.fs.rm(work.work.path, recursive=True)

    def _require_blocks(self, splits: dict[str, list[Shard]]) -> None:
        config = self.recipe.data
        is_tested = config.test_fraction is not None or config.test_source is not None
        for split in (TRAIN, VALIDATION, *((TEST,) if is_tested else ())):
            if not splits[split]:
                raise DataError(
                    f"data.source {config.source!r} has too few tokens in its {split} documents for one block: give "
                    f"more text, or lower data.block_length, which is {config.block_length}"
                ).of("text.too_short", "data.source")


def require_known(columns: ColumnsConfig, names: Sequence[str]) -> None:
    """Raise DataError if the recipe gives the kind of an unknown column."""
    for key in ("categories", "numbers"):
        if unknown := [name for name in getattr(columns, key) if name not in names]:
            raise DataError(
                f"data.columns.{key} has {unknown[0]!r}, which is no column of numbers or categories: name some of "
                f"{', '.join(names) or 'none'}"
            ).of("columns.unknown", f"data.columns.{key}")


def _discard(folder: UPath) -> None:
    """Remove the facts about a source that has changed: else each later attempt would fail on them again."""
    (folder / SETTINGS_FILE).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        folder.fs.rm((folder / WORK).path, recursive=True)


def _require_memory(units: Sequence[Unit], max_bytes: int) -> None:
    """Raise DataError for an Arrow file whose record batches, which are read one by one, are too large."""
    for piece in (piece for unit in units for piece in unit.pieces if piece.format == "arrow"):
        if piece.bytes > max_bytes:
            raise DataError(
                f"{piece.path!r} has record batches of about {piece.bytes:,} bytes, and data.shards.memory is "
                f"{max_bytes:,}: write smaller batches, or write Parquet"
            ).of("batches.too_large", "data.shards.memory")


def _release_memory() -> None:
    """Return freed memory to the system: what follows takes its own on top of it, as training does in this process."""
    pa.default_memory_pool().release_unused()
    return_freed_memory()
