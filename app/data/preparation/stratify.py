"""Stratified splits: the few rows that leave the split of their hash, so that each label is in every split."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from app.data.preparation.survey import KEPT
from app.data.preparation.surveys import Surveys

Moves = Mapping[int, int]
"""The index in ``SPLITS`` of the split that a row moves to, by the row's number."""


def stratify(
    surveys: Surveys, codes: NDArray[np.uint8], kept: NDArray[np.int64], is_used: NDArray[np.bool_]
) -> dict[int, int]:
    """Return rows that move to another split, so that each label with enough rows is in all splits. Update ``kept``.

    If a split lacks a label, the label's row with the lowest hash moves there from the split with the most. All other
    rows stay in the split of their hash, whatever the size of the data.

    Args:
        kept: number of kept rows of each label in each split, of shape (labels, splits).
        is_used: whether the recipe has the split, of shape (splits,).
    """
    targets: dict[int, list[int]] = {}
    donors = kept.argmax(axis=1)
    for label in np.flatnonzero((kept[:, is_used] == 0).any(axis=1) & (kept.sum(axis=1) > 1)).tolist():
        lacking = [split for split in np.flatnonzero(is_used).tolist() if not kept[label, split]]
        # Training comes first, and the donor keeps one row.
        targets[label] = lacking[: int(kept[label, donors[label]]) - 1]
    moves = {}
    for label, rows in _lowest(
        surveys, codes, donors, {label: len(splits) for label, splits in targets.items()}
    ).items():
        for row, split in zip(rows, targets[label], strict=True):
            moves[row] = split
            kept[label, donors[label]] -= 1
            kept[label, split] += 1
    return moves


def _lowest(
    surveys: Surveys, codes: NDArray[np.uint8], donors: NDArray[np.int64], counts: Mapping[int, int]
) -> dict[int, list[int]]:
    """Return the rows with the lowest hashes of each label, in the split that gives them."""
    found: dict[int, list[tuple[int, int]]] = {label: [] for label in counts}
    labels = np.array(sorted(counts), np.int32)
    if not len(labels):
        return {}
    for start, survey in surveys:
        is_kept = codes[start : start + len(survey.codes)] == KEPT
        chosen = is_kept & np.isin(survey.labels, labels) & (survey.splits == donors[survey.labels])
        for row in np.flatnonzero(chosen).tolist():
            label = int(survey.labels[row])
            hashed = (int(survey.high[row]), start + row)
            found[label] = sorted([*found[label], hashed])[: counts[label]]
    return {label: [row for _, row in rows] for label, rows in found.items()}
