"""Stratified splits: the few rows that leave the split of their hash, so that each label is in every split."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from app.data.preparation.samples import SampleKind
from app.data.preparation.survey import IN_TRAIN, KEPT
from app.data.preparation.surveys import Surveys

Moves = Mapping[int, int]
"""The index in ``SPLITS`` of the split that a row moves to, by the row's number."""


def stratify(
    surveys: Surveys, codes: NDArray[np.uint8], kept: NDArray[np.int64], is_used: NDArray[np.bool_], kind: SampleKind
) -> dict[int, int]:
    """Return rows that move to another split, so that each label with enough rows is in all splits. Update ``kept``.

    If a split lacks a label, the label's row with the lowest hash moves there from the split with the most. All other
    rows stay in the split of their hash, whatever the size of the data. Without classes, all rows count as one label.

    Args:
        kept: number of kept rows of each label in each split, of shape (labels + 1, splits). The last is no label.
        is_used: whether the recipe has the split, of shape (splits,).
        kind: whether labels are classes.
    """
    counts = kept[:-1] if kind.are_classes else kept.sum(axis=0, keepdims=True)
    used = np.flatnonzero(is_used)
    targets: dict[int, list[int]] = {}
    donors = used[counts[:, used].argmax(axis=1)]
    for label in np.flatnonzero((counts[:, used] == 0).any(axis=1) & (counts[:, used].sum(axis=1) > 0)).tolist():
        lacking = [split for split in used.tolist() if not counts[label, split]]
        # Training comes first, and another split keeps one row.
        spare = int(counts[label, donors[label]]) - (IN_TRAIN not in lacking or counts[label, used].sum() > 1)
        targets[label] = lacking[:spare]
    moves = {}
    for label, rows in _lowest(
        surveys, codes, donors, {label: len(splits) for label, splits in targets.items()}, kind.are_classes
    ).items():
        for (row, of_row), split in zip(rows, targets[label], strict=True):
            moves[row] = split
            kept[of_row, donors[label]] -= 1
            kept[of_row, split] += 1
    return moves


def _lowest(
    surveys: Surveys,
    codes: NDArray[np.uint8],
    donors: NDArray[np.int64],
    counts: Mapping[int, int],
    are_classes: bool,
) -> dict[int, list[tuple[int, int]]]:
    """Return the rows with the lowest hashes of each label, in the split that gives them, each with its own label."""
    found: dict[int, list[tuple[int, int, int]]] = {label: [] for label in counts}
    labels = np.array(sorted(counts), np.int32)
    if not len(labels):
        return {}
    for start, survey in surveys:
        is_kept = codes[start : start + len(survey.codes)] == KEPT
        groups = survey.labels if are_classes else np.zeros_like(survey.labels)
        chosen = is_kept & np.isin(groups, labels) & (survey.splits == donors[groups])
        for row in np.flatnonzero(chosen).tolist():
            label = int(groups[row])
            hashed = (int(survey.high[row]), start + row, int(survey.labels[row]))
            found[label] = sorted([*found[label], hashed])[: counts[label]]
    return {label: [(row, own) for _, row, own in rows] for label, rows in found.items()}
