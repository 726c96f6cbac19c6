"""Preparation from the source to an index of shards. It goes on where an earlier one was interrupted."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.checksums import checksum_lines, sha256_of
from app.config import Recipe
from app.data.examples import MAX_EXAMPLES, REASONS, CleaningReport, Input, Modality, Reason
from app.data.preparation.near_duplicates import NearDuplicates
from app.data.preparation.progress import UnitProgress
from app.data.preparation.rows import merge_types
from app.data.preparation.stratify import stratify
from app.data.preparation.survey import KEPT, SPLITS, Sample
from app.data.preparation.surveys import Surveys, resolve
from app.data.preparation.units import (
    TABLE_KINDS,
    SourceFile,
    Unit,
    cut_sources,
    fingerprint_of,
    list_files,
    list_unread,
)
from app.data.preparation.work import UnitResult, UnitWork
from app.data.preparation.writers import block_schema, labelled_schema
from app.data.shards import FORMAT, Shard, ShardIndex
from app.data.targets import save_labels
from app.data.tokenizer import SETTINGS_FILE, LanguageTokenizer, read_tokenizer
from app.errors import DataError, RecipeError
from app.heartbeat import wait_for_lock
from app.pretrained import PretrainedFolder, open_pretrained
from app.storage import list_names, write_atomically

SHARDS = "data"
"""Folder of storage that has the shards of each source and way to prepare it."""
_OF_TEXTS = ("near_duplicates", "min_length", "max_length", "max_symbol_share", "languages")
SAMPLE_FILE = "sample.arrow"
SAMPLE_BYTES = 16_000_000
"""Bytes of texts, about, of which a tokenizer is learned."""
_UNIT_SHARDS = 8
_UNREAD = {"shards", "buckets", "image", "tokenizer", "block_length", "chat", "sampling"}
"""Keys that the shards of labelled examples do not depend on: processors read them."""

RunUnits = Callable[[Callable[[int], int], Sequence[int]], Iterable[int]]
"""Calls a function with the number of each unit, and yields each number when that unit is done."""


@dataclass(frozen=True)
class Preparer:
    """Prepares the data of one recipe."""

    recipe: Recipe
    modality: Modality
    storage: UPath
    run_units: RunUnits = map

    def prepare(self) -> UPath:
        """Return the folder of the shards. They are made unless they are there.

        Raises:
            DataError: the source cannot be read, or has too few rows.
        """
        config = self.recipe.data
        assert config.shards is not None
        sources = self._sources()
        files = [file for found in sources for file in found]
        self._require_keys(files)
        settings = self._settings()
        fingerprint = fingerprint_of(files, settings)
        folder = self.storage / SHARDS / fingerprint[:16]
        if ShardIndex.find(folder) is not None:
            return folder
        with wait_for_lock(folder, f"preparing {config.source!r}"):
            if ShardIndex.find(folder) is None:  # else the job that had the lock has made it
                self._make(folder, sources, fingerprint, settings)
        return folder

    def _require_keys(self, files: list[SourceFile]) -> None:
        """Raise RecipeError or DataError if the recipe has keys that do not suit its source."""
        config, is_image = self.recipe.data, self.modality == "image"
        if config.group_column and (file := next((file for file in files if file.kind not in TABLE_KINDS), None)):
            raise DataError(
                f"data.group_column is {config.group_column!r}, and {file.path!r} is not a table: leave it out"
            )
        if config.stratify and self.recipe.is_language_model:
            raise RecipeError("data.stratify is true, and language modelling has no labels: leave it out")
        of_texts = {key: getattr(config.clean, key) for key in _OF_TEXTS}
        if is_image and (key := next((key for key, value in of_texts.items() if value is not None), None)):
            raise RecipeError(f"data.clean.{key} is {of_texts[key]}, and applies to texts only: leave it out")

    def _make(self, folder: UPath, sources: list[list[SourceFile]], fingerprint: str, settings: dict[str, Any]) -> None:
        """Make the shards, or go on where an earlier job was interrupted."""
        config = self.recipe.data
        assert config.shards is not None
        kind = self.modality, self.recipe.is_language_model
        unread = [path for one in config.each_source() for path in list_unread(one, *kind)]
        # A source can have storage in it.
        if unread := [path for path in unread if not path.startswith(f"{self.storage}/")]:
            print(
                f"data.source {config.source!r}: {len(unread):,} files are not read, such as {unread[0]!r}", flush=True
            )
        units = cut_sources(sources, _UNIT_SHARDS * config.shards.size)
        _require_memory(units, config.shards.memory)
        fraction = min(1.0, SAMPLE_BYTES / max(1, sum(unit.bytes for unit in units)))
        work = UnitWork(str(folder), config, tuple(units), *kind, fraction)
        self._run("reading", work, work.survey, "facts-")
        report, labels = self._decide(work)
        self._save_codec(work, labels)
        self._run("writing shards", work, work.write, "unit-")
        self._require_unchanged(sources, folder)
        self._publish(work, folder, fingerprint, settings, report)

    def _sources(self) -> list[list[SourceFile]]:
        """Return the files of each source."""
        kind = self.modality, self.recipe.is_language_model
        return [list_files(one, *kind) for one in self.recipe.data.each_source()]

    def _require_unchanged(self, sources: list[list[SourceFile]], folder: UPath) -> None:
        """List the source again. Raises DataError if it is not as it was: its fingerprint would tell a lie."""
        before, now = ({file for found in given for file in found} for given in (sources, self._sources()))
        changed = sorted({file.path for file in before ^ now})
        # A source can have storage in it.
        if changed := [path for path in changed if not path.startswith(f"{folder}/")]:
            raise DataError(
                f"data.source {self.recipe.data.source!r} changed while it was prepared ({len(changed):,} files, such "
                f"as {changed[0]!r}): prepare the data again"
            )

    def _settings(self) -> dict[str, Any]:
        """Return everything but the source that the shards depend on."""
        config, is_language_model = self.recipe.data, self.recipe.is_language_model
        assert config.shards is not None
        unread = {"shards", "buckets", "image", "chat", "sampling"} if is_language_model else _UNREAD
        # The mix of sources does not change the shards.
        read = config.model_dump(mode="json", exclude=unread | {"sources", "temperature"})
        if config.sources:
            read["sources"] = [one.model_dump(mode="json", include={"source", "columns"}) for one in config.sources]
        pretrained = self.recipe.model.pretrained if is_language_model else None
        if pretrained is not None:
            # Its place alone would not tell another tokenizer at the same place.
            read["tokenizer_sha256"] = _tokenizer_sha256(open_pretrained(str(self.recipe.model.source)))
        kind = "language-modeling" if is_language_model else self.modality
        return {"format": FORMAT, "kind": kind, "pretrained": pretrained, "size": config.shards.size, **read}

    def _run(self, what: str, work: UnitWork, function: Callable[[int], int], prefix: str) -> None:
        """Work on the units that have no file of this prefix yet."""
        done = {int(name.removeprefix(prefix)[:5]) for name in list_names(work.work) if name.startswith(prefix)}
        left = [unit.number for unit in work.units if unit.number not in done]
        progress = UnitProgress(what, [unit.bytes for unit in work.units], done, time.monotonic)
        for number in self.run_units(function, left):
            progress.add(number)

    def _decide(self, work: UnitWork) -> tuple[CleaningReport, list[str]]:
        """Decide which rows are kept, and return how many were dropped, and the labels of those kept."""
        facts = [work.facts(unit.number) for unit in work.units]
        merge_types(unit.types for unit in facts)
        surveys = Surveys(
            paths=[work.survey_file(unit.number) for unit in work.units],
            label_names=[unit.label_names for unit in facts],
            starts=np.cumsum([0, *(unit.rows for unit in facts)]),
        )
        config, total = self.recipe.data, int(surveys.starts[-1])
        assert config.shards is not None
        if not total:
            raise DataError(f"data.source {config.source!r} has no rows: give a source that has some")
        with tempfile.TemporaryFile(prefix="rayloom-codes-") as file:
            # A byte for each row of the source: on a disk, since there may be very many.
            file.truncate(total)
            codes = np.memmap(file, np.uint8, "r+", shape=(total,))
            for start, survey in surveys:
                codes[start : start + len(survey.codes)] = survey.codes
            resolve(surveys, config.clean, codes, config.shards.memory)
            if threshold := config.clean.near_duplicates:
                files = [work.signature_files(unit.number) for unit in work.units]
                NearDuplicates(files, surveys.starts, threshold, config.shards.memory).drop(codes)
            return self._count(work, surveys, codes, next((unit.unreadable for unit in facts if unit.unreadable), ""))

    def _count(
        self, work: UnitWork, surveys: Surveys, codes: NDArray[np.uint8], unreadable: str
    ) -> tuple[CleaningReport, list[str]]:
        """Save the decision for each unit, and check that there is enough in each split.

        ``unreadable`` is the first row that is not a text or picture, if there is any.
        """
        kept = np.zeros((len(surveys.labels) + 1, len(SPLITS)), np.int64)
        dropped: Counter[Reason] = Counter()
        for first, survey in surveys:
            part = codes[first : first + len(survey.codes)]
            chosen = part == KEPT
            np.add.at(kept, (survey.labels[chosen], survey.splits[chosen]), 1)
            for code, count in zip(*np.unique(part[~chosen], return_counts=True), strict=True):
                dropped[REASONS[code - 1]] += int(count)
        moves = stratify(surveys, codes, kept[:-1], self._fractions > 0.0) if self.recipe.data.stratify else {}
        moved = np.array(sorted(moves.items()), np.int64).reshape(-1, 2)
        for unit, start, stop in zip(work.units, surveys.starts[:-1], surveys.starts[1:], strict=True):
            write_atomically(work.codes_file(unit.number), codes[start:stop].tobytes())
            mine = moved[(moved[:, 0] >= start) & (moved[:, 0] < stop)] - [start, 0]
            write_atomically(work.moves_file(unit.number), np.ascontiguousarray(mine.T).tobytes())
        what = "documents" if self.recipe.is_language_model else "examples"
        report = CleaningReport(what=what, given=len(codes), kept=int(kept.sum()), dropped=dropped)
        self._require_readable(report, unreadable)
        self._require_splits(kept.sum(axis=0), str(report))
        if self.recipe.is_language_model:
            return report, []
        self._require_classes(surveys.labels, kept)
        return report, [label for label, row in zip(surveys.labels, kept, strict=False) if row.sum()]

    @property
    def _fractions(self) -> NDArray[np.float64]:
        """The recipe's fraction of each split; 1 for training, which gets the rest."""
        config = self.recipe.data
        return np.array([1.0, config.validation_fraction, config.test_fraction or 0.0])

    def _require_readable(self, report: CleaningReport, first: str) -> None:
        limit = self.recipe.data.clean.max_unreadable
        unreadable: dict[Reason, str] = {
            "unreadable": "pictures that cannot be decoded",
            "not_text": "texts not in UTF-8",
        }
        for reason, what in unreadable.items():
            if (count := report.dropped.get(reason, 0)) > limit * report.given:
                raise DataError(
                    f"data.source {self.recipe.data.source!r} has {count:,} {what} among {report.given:,} rows, more "
                    f"than {limit:.0%}, such as {first!r}: repair or remove them, or raise data.clean.max_unreadable"
                )

    def _require_splits(self, sizes: NDArray[np.int64], report: str) -> None:
        config = self.recipe.data
        for split, size, fraction in zip(SPLITS, sizes.tolist(), self._fractions.tolist(), strict=True):
            if fraction and not size:
                raise DataError(
                    f"data.source {config.source!r} leaves the {split} split empty ({report}); rows are split by the "
                    f"hash of {config.group_column or 'their content'}: give more data or other fractions"
                )

    def _require_classes(self, labels: list[str], kept: NDArray[np.int64]) -> None:
        source = f"data.source {self.recipe.data.source!r}"
        found = [label for label, row in zip(labels, kept, strict=False) if row.sum()]
        if len(found) < 2:
            raise DataError(f"{source} has the classes {found} after cleaning: expected two or more")
        for label, (train, *others) in zip(labels, kept.tolist(), strict=False):
            if not train and sum(others):
                raise DataError(
                    f"{source} has no training example of {label!r}: its {sum(others)} are in other splits; give more"
                )

    def _save_codec(self, work: UnitWork, labels: list[str]) -> None:
        """Save what the shards are written with, and the sample that a processor is fitted on."""
        folder = work.work.parent
        sample, is_whole = self._sample(work)
        if not sample.inputs and self.recipe.model.pretrained is None:
            raise DataError(
                f"data.source {self.recipe.data.source!r} has no training row in the sample of {SAMPLE_BYTES:,} bytes "
                "that a tokenizer is learned from: give more or shorter rows, or another data.seed"
            )
        if not is_whole:
            what = "parts of documents" if work.is_language_model else "examples"
            print(f"tokenizers are learned from a sample of {len(sample.inputs):,} training {what}", flush=True)
        if not work.is_language_model:
            save_labels(labels, folder)
            sample.save(folder / SAMPLE_FILE)
        elif not (folder / SETTINGS_FILE).exists():  # it is written last
            self._fit_tokenizer(sample.inputs).save(folder)

    def _sample(self, work: UnitWork) -> tuple[Sample, bool]:
        """Return a sample of the training rows that are kept, and whether it has all of them."""
        inputs: list[Input] = []
        for unit in work.units:
            sample = Sample.load(work.sample_file(unit.number))
            codes = np.frombuffer(work.codes_file(unit.number).read_bytes(), np.uint8)
            is_kept = (codes == KEPT) & (work.splits(unit.number) == SPLITS.index("train"))
            inputs += [item for row, item in zip(sample.rows, sample.inputs, strict=True) if is_kept[row]]
        # The texts of a compressed file take more than the file.
        step = max(1, -(-sum(map(len, inputs)) // SAMPLE_BYTES))
        inputs = inputs[::step]
        return Sample(np.arange(len(inputs)), inputs), work.sample_fraction == 1.0 and step == 1

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
            result = UnitResult.model_validate_json(work.result_file(unit.number).read_bytes())
            for split, shards in result.shards.items():
                splits[split] += [shard.model_copy(update={"source": unit.source}) for shard in shards]
            for reason, shown in result.examples.items():
                examples[reason] = [*examples.get(reason, []), *shown][:MAX_EXAMPLES]
        self._require_blocks(splits)
        report.model_copy(update={"examples": examples}).save(folder)
        schema = (
            block_schema(LanguageTokenizer.load(folder)) if work.is_language_model else labelled_schema(self.modality)
        )
        index = ShardIndex(
            fingerprint=fingerprint,
            created=datetime.now(UTC),
            task=self.recipe.task,
            source=self.recipe.data.source,
            settings=settings,
            columns={field.name: str(field.type) for field in schema},
            splits={split: shards for split, shards in splits.items() if shards},
        )
        index.save(folder)
        work.work.fs.rm(work.work.path, recursive=True)

    def _require_blocks(self, splits: dict[str, list[Shard]]) -> None:
        config = self.recipe.data
        for split in ("train", "validation"):
            if not splits[split]:
                raise DataError(
                    f"data.source {config.source!r} has too few tokens in its {split} documents for one block: give "
                    f"more text, or lower data.block_length, which is {config.block_length}"
                )


def _require_memory(units: Sequence[Unit], max_bytes: int) -> None:
    """Raise DataError for an Arrow file whose record batches, which are read one by one, are too large."""
    for piece in (piece for unit in units for piece in unit.pieces if piece.kind == "arrow"):
        if piece.bytes > max_bytes:
            raise DataError(
                f"{piece.path!r} has record batches of about {piece.bytes:,} bytes, and data.shards.memory is "
                f"{max_bytes:,}: write smaller batches, or write Parquet"
            )


def _tokenizer_sha256(folder: PretrainedFolder) -> str:
    """Return the sha256 of a pretrained tokenizer and of the files beside it."""
    sums = {"tokenizer": sha256_of(read_tokenizer(folder).to_str().encode())}
    sums |= {name: sha256_of(content) for name, content in folder.companions.items()}
    return sha256_of(checksum_lines(sums))
