"""Decide which rows are kept, between the two passes over the source, and whether they are enough."""

import tempfile
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from app.config import DataConfig
from app.data.examples import REASONS, CleaningReport, Reason
from app.data.preparation.near_duplicates import NearDuplicates
from app.data.preparation.stratify import stratify
from app.data.preparation.survey import KEPT, SPLITS
from app.data.preparation.surveys import Surveys, resolve
from app.data.preparation.work import UnitWork
from app.errors import DataError
from app.storage import write_atomically


def decide(work: UnitWork, judge_units: Callable[[], None]) -> tuple[CleaningReport, list[str]]:
    """Decide which rows are kept. Return the counts of dropped rows, and the labels of the kept rows.

    ``judge_units`` looks for suspect labels in each unit. It is called if ``data.clean.label_noise`` is set.
    """
    facts = [work.facts(unit.number) for unit in work.units]
    surveys = Surveys(
        paths=[work.survey_file(unit.number) for unit in work.units],
        label_names=[unit.label_names for unit in facts],
        starts=np.cumsum([0, *(unit.rows for unit in facts)]),
    )
    config, total = work.config, int(surveys.starts[-1])
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
        doubted, examples = 0, list[str]()
        if config.clean.label_noise:
            from app.data.preparation.noisy_labels import find_noise  # scikit-learn takes a second to import

            doubted, examples = find_noise(work, surveys, codes, judge_units)
        unreadable = next((unit.unreadable for unit in facts if unit.unreadable), "")
        report, labels = _count(work, surveys, codes, unreadable)
    if doubted:
        suspected = doubted if config.clean.label_noise == "report" else 0
        report = report.model_copy(update={"suspected": suspected, "examples": {"label_noise": examples}})
    return report, labels


def _count(
    work: UnitWork, surveys: Surveys, codes: NDArray[np.uint8], unreadable: str
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
    moves = stratify(surveys, codes, kept[:-1], _fractions(work.config) > 0.0) if work.config.stratify else {}
    moved = np.array(sorted(moves.items()), np.int64).reshape(-1, 2)
    for unit, start, stop in zip(work.units, surveys.starts[:-1], surveys.starts[1:], strict=True):
        write_atomically(work.codes_file(unit.number), codes[start:stop].tobytes())
        mine = moved[(moved[:, 0] >= start) & (moved[:, 0] < stop)] - [start, 0]
        write_atomically(work.moves_file(unit.number), np.ascontiguousarray(mine.T).tobytes())
    what = "documents" if work.contents == "language-modeling" else "examples"
    report = CleaningReport(what=what, given=len(codes), kept=int(kept.sum()), dropped=dropped)
    _require_readable(work.config, report, unreadable)
    _require_splits(work.config, kept.sum(axis=0), str(report))
    if work.contents == "language-modeling":
        return report, []
    _require_classes(work.config, surveys.labels, kept)
    return report, [label for label, row in zip(surveys.labels, kept, strict=False) if row.sum()]


def _fractions(config: DataConfig) -> NDArray[np.float64]:
    """Return the recipe's fraction of each split, of shape (splits,); 1 for training, which gets the rest."""
    return np.array([1.0, config.validation_fraction, config.test_fraction or 0.0])


def _require_readable(config: DataConfig, report: CleaningReport, first: str) -> None:
    limit = config.clean.max_unreadable
    unreadable: dict[Reason, str] = {
        "unreadable": "pictures that cannot be decoded",
        "not_text": "texts not in UTF-8",
    }
    for reason, what in unreadable.items():
        if (count := report.dropped.get(reason, 0)) > limit * report.given:
            raise DataError(
                f"data.source {config.source!r} has {count:,} {what} among {report.given:,} rows, more "
                f"than {100 * limit:g}%, such as {first!r}: repair or remove them, or raise data.clean.max_unreadable"
            )


def _require_splits(config: DataConfig, sizes: NDArray[np.int64], report: str) -> None:
    if not sizes.sum():
        raise DataError(
            f"data.source {config.source!r} has no row left after cleaning ({report}): correct data.columns, "
            "data.clean or the source"
        )
    for split, size, fraction in zip(SPLITS, sizes.tolist(), _fractions(config).tolist(), strict=True):
        if fraction and not size:
            raise DataError(
                f"data.source {config.source!r} leaves the {split} split empty ({report}); rows are split by the "
                f"hash of {config.group_column or 'their content'}: give more data or other fractions"
            )


def _require_classes(config: DataConfig, labels: list[str], kept: NDArray[np.int64]) -> None:
    source = f"data.source {config.source!r}"
    found = [label for label, row in zip(labels, kept, strict=False) if row.sum()]
    if len(found) < 2:
        raise DataError(f"{source} has the classes {found} after cleaning: expected two or more")
    for label, (train, *others) in zip(labels, kept.tolist(), strict=False):
        if not train and sum(others):
            raise DataError(
                f"{source} has no training example of {label!r}: its {sum(others)} are in other splits; give more"
            )
