"""Decide which rows are kept, between the two passes over the source, and whether they are enough."""

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.config import DataConfig
from app.data.examples import REASONS, CleaningReport, Reason
from app.data.preparation.held_out import hold_out
from app.data.preparation.near_duplicates import NearDuplicates
from app.data.preparation.stratify import Moves, stratify
from app.data.preparation.survey import IN_TRAIN, KEPT, SPLITS
from app.data.preparation.surveys import Duplicates, Surveys, resolve
from app.data.preparation.work import UnitWork
from app.data.sources.formats.base import PAIRS
from app.data.sources.source import Source, require_readable
from app.errors import DataError
from app.storage import write_atomically


@dataclass(frozen=True)
class Decision:
    """What is kept of a source."""

    report: CleaningReport
    labels: list[str]
    kept: NDArray[np.int64]
    """Kept rows of each label in each split, of shape (labels, splits)."""

    def rows_of(self, *splits: int) -> dict[str, int]:
        """Return the number of rows of each label that some splits have, without those that they do not have."""
        counts = self.kept[:, splits].sum(axis=1).tolist()
        return {label: count for label, count in zip(self.labels, counts, strict=True) if count}


def decide(work: UnitWork, judge_units: Callable[[], None]) -> Decision:
    """Decide which rows are kept.

    ``judge_units`` looks for suspect labels in each unit. It is called if ``data.clean.label_noise`` is set.
    """
    facts = [work.facts(unit.number) for unit in work.units]
    surveys = Surveys(
        units=[work.survey_of(unit.number) for unit in work.units],
        label_names=[unit.label_names for unit in facts],
        starts=np.cumsum([0, *(unit.rows for unit in facts)]),
    )
    kind, config, total = work.encoding.kind, work.encoding.config, int(surveys.starts[-1])
    if not total:
        raise DataError(f"data.source {config.source!r} has no rows: give a source that has some").of(
            "source.empty", "data.source"
        )
    with tempfile.TemporaryFile(prefix="rayloom-codes-") as file:
        # A byte for each row of the source: on a disk, since there may be very many.
        file.truncate(total)
        codes = np.memmap(file, np.uint8, "r+", shape=(total,))
        for start, survey in surveys:
            codes[start : start + len(survey.codes)] = survey.codes
        tests = sum(one.rows for unit, one in zip(work.units, facts, strict=True) if unit.is_test)
        rules = Duplicates(kind.deduplicates(config.clean), kind.drops_conflicts, tests)
        resolve(surveys, rules, codes, config.shards.memory)
        if threshold := config.clean.near_duplicates:
            files = [work.signature_files(unit.number) for unit in work.units]
            NearDuplicates(files, surveys.starts, threshold, config.shards.memory).drop(codes)
        doubted, examples = 0, list[str]()
        if config.clean.label_noise:
            from app.data.preparation.noisy_labels import find_noise  # scikit-learn takes a second to import

            doubted, examples = find_noise(work, surveys, codes, judge_units)
        unreadable = next((unit.unreadable for unit in facts if unit.unreadable), "")
        moves = hold_out(config, surveys, codes, tests) if kind.contents == PAIRS else None
        report, kept = _count(work, surveys, codes, unreadable, moves)
    if doubted:
        suspected = doubted if config.clean.label_noise == "report" else 0
        report = report.model_copy(update={"suspected": suspected, "examples": {"label_noise": examples}})
    return Decision(report, surveys.labels, kept)


def _count(
    work: UnitWork, surveys: Surveys, codes: NDArray[np.uint8], unreadable: str, moves: Moves | None
) -> tuple[CleaningReport, NDArray[np.int64]]:
    """Save the decision for each unit, and check that there is enough in each split.

    Args:
        unreadable: the first row that is not a text or picture, if there is any.
        moves: the pairs that are held out. None: rows are split by their hash.
    """
    kind, config = work.encoding.kind, work.encoding.config
    kept = np.zeros((len(surveys.labels) + 1, len(SPLITS)), np.int64)
    dropped: Counter[Reason] = Counter()
    for first, survey in surveys:
        part = codes[first : first + len(survey.codes)]
        chosen = part == KEPT
        np.add.at(kept, (survey.labels[chosen], survey.splits[chosen]), 1)
        for code, count in zip(*np.unique(part[~chosen], return_counts=True), strict=True):
            dropped[REASONS[code - 1]] += int(count)
    # The last row is that of rows without a label.
    for place in (moves or {}).values():
        kept[-1, [IN_TRAIN, place]] += -1, 1
    if moves is None and not config.group_column:
        moves = stratify(surveys, codes, kept, _fractions(config) > 0.0, kind)
    moved = np.array(sorted((moves or {}).items()), np.int64).reshape(-1, 2)
    for unit, start, stop in zip(work.units, surveys.starts[:-1], surveys.starts[1:], strict=True):
        write_atomically(work.file("codes", unit.number), codes[start:stop].tobytes())
        mine = moved[(moved[:, 0] >= start) & (moved[:, 0] < stop)] - [start, 0]
        write_atomically(work.file("moves", unit.number), np.ascontiguousarray(mine.T).tobytes())
    report = CleaningReport(what=kind.what, given=len(codes), kept=int(kept.sum()), dropped=dropped)
    require_readable(Source(config.source), dropped, len(codes), config.clean, unreadable)
    _require_splits(config, kept.sum(axis=0), str(report))
    if kind.are_classes:
        of_classes = np.zeros_like(kept)
        np.add.at(of_classes, surveys.classes, kept)
        _require_classes(config, surveys.labels, of_classes)
    return report, kept[:-1]


def _fractions(config: DataConfig) -> NDArray[np.float64]:
    """Return the recipe's fraction of each split, of shape (splits,); 1 for training, which gets the rest."""
    return np.array([1.0, config.validation_fraction, config.test_fraction or 0.0])


def _require_splits(config: DataConfig, sizes: NDArray[np.int64], report: str) -> None:
    if not sizes.sum():
        raise DataError(
            f"data.source {config.source!r} has no row left after cleaning ({report}): correct data.columns, "
            "data.clean or the source"
        ).of("source.nothing_left", "data.source")
    for split, size, fraction in zip(SPLITS, sizes.tolist(), _fractions(config).tolist(), strict=True):
        if fraction and not size:
            raise DataError(
                f"data.source {config.source!r} leaves the {split} split empty ({report}); rows are split by the "
                f"hash of {config.group_column or 'their content'}: give more data or other fractions"
            ).of("split.empty", "data.source")


def _require_classes(config: DataConfig, labels: list[str], kept: NDArray[np.int64]) -> None:
    for label, (train, validation, test) in zip(labels, kept.tolist(), strict=False):
        held_out = validation + (test if config.test_fraction else 0)
        if not train and held_out:
            raise DataError(
                f"data.source {config.source!r} has no training example of {label!r}: its {held_out} are in other "
                "splits; give more"
            ).of("labels.too_few", "data.source")
