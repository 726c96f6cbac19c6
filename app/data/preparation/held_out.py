"""Which pairs of texts are held out: some whose texts are in no other pair.

So exactly one positive is right for each anchor, and training has seen no held-out text.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from app.config import DataConfig
from app.data.preparation.sample import Hashes, fractions_of
from app.data.preparation.slices import Arrays, join_slices
from app.data.preparation.stratify import Moves
from app.data.preparation.survey import IN_TEST, IN_VALIDATION, KEPT, SPLIT_SALT, code_of
from app.data.preparation.surveys import Surveys
from app.errors import DataError

MAX_HELD_OUT = 2000
"""Pairs of a held-out split at most. Each is compared with all others of it."""
_PAIR_BYTES = 256
"""Memory that a candidate takes: its row, its fraction, the hashes of its texts, and their sorted copies."""


def hold_out(config: DataConfig, surveys: Surveys, codes: NDArray[np.uint8], test_rows: int) -> Moves:
    """Return the pairs that leave the training split. Those with the lowest hashes are drawn.

    The first ``test_rows`` rows are of ``data.test_source``. Pairs of it that are not drawn, and others with a text of
    one that is, get a code in ``codes``.

    Raises:
        DataError: fewer than two pairs can be held out for a split.
    """
    of_test, of_source = (
        AlonePairs(config, surveys, codes, *rows) for rows in ((0, test_rows), (test_rows, len(codes)))
    )
    if config.test_source is not None:
        drawn, texts = of_test.draw_all()
        _require_pairs(f"data.test_source {config.test_source!r}", of_test, len(drawn), drawn)
        for rows, *sides in of_source:
            codes[rows[np.isin(sides, texts).any(axis=0)]] = code_of("in_test")
    sizes = [_size(len(of_source), fraction) for fraction in (config.validation_fraction, config.test_fraction or 0.0)]
    drawn, _ = of_source.draw(sum(sizes))
    moves: dict[int, int] = {}
    for split, size, rows in zip((IN_VALIDATION, IN_TEST), sizes, np.split(drawn, sizes[:1]), strict=True):
        if size:
            _require_pairs(f"data.source {config.source!r}", of_source, len(drawn), rows)
        moves |= dict.fromkeys(rows.tolist(), split)
    return moves


def _size(total: int, fraction: float) -> int:
    return min(max(2, round(fraction * total)), MAX_HELD_OUT) if fraction else 0


def _require_pairs(source: str, pairs: "AlonePairs", alone: int, rows: NDArray[np.int64]) -> None:
    if len(rows) < 2:
        raise DataError(
            f"{source} has {len(pairs)} pairs, of which {alone} have texts that are in no other pair: a held-out split "
            "needs two such pairs or more; give more pairs"
        ).of("split.empty", "data.source")


class AlonePairs:
    """The kept rows from ``start`` to ``stop``. It draws those whose texts are in no other row."""

    def __init__(self, config: DataConfig, surveys: Surveys, codes: NDArray[np.uint8], start: int, stop: int) -> None:
        self._config, self._surveys, self._codes, self._range = config, surveys, codes, (start, stop)

    def __iter__(self) -> Iterator[Arrays]:
        """Yield the numbers of some rows, and the hashes of the anchor and the positive of each."""
        start, stop = self._range
        for first, survey in self._surveys:
            rows = np.arange(first, first + len(survey.codes))
            chosen = (self._codes[first : first + len(rows)] == KEPT) & (rows >= start) & (rows < stop)
            yield rows[chosen], survey.high[chosen], survey.low[chosen]

    def __len__(self) -> int:
        return sum(len(rows) for rows, *_ in self)

    def draw(self, count: int) -> tuple[NDArray[np.int64], Hashes]:
        """Return up to ``count`` rows whose texts are in no other row, and the hashes of their texts.

        Candidates are taken some at a time, by ascending hash, so that ``data.shards.memory`` suffices.
        """
        most = max(count, self._config.shards.memory // _PAIR_BYTES)
        drawn, texts, floor, limit = np.empty(0, np.int64), np.empty((2, 0), np.uint64), -1.0, min(4 * count, most)
        while len(drawn) < count:
            fractions, rows, *sides = self._lowest(floor, limit)
            if not len(rows):
                break
            is_alone = self._uses(np.stack(sides)).max(axis=0) == 1
            drawn, texts = np.append(drawn, rows[is_alone]), np.hstack([texts, np.stack(sides)[:, is_alone]])
            floor, limit = float(fractions[-1]), min(8 * limit, most)
        return drawn[:count], texts[:, :count]

    def draw_all(self) -> tuple[NDArray[np.int64], Hashes]:
        """Return up to ``MAX_HELD_OUT`` rows as ``draw`` does. The others get a code."""
        drawn, texts = self.draw(MAX_HELD_OUT)
        for rows, *_ in self:
            self._codes[np.setdiff1d(rows, drawn)] = code_of("untested")
        return drawn, texts

    def _lowest(self, floor: float, limit: int) -> Arrays:
        """Return the ``limit`` lowest fractions over ``floor``, ascending, with their rows as ``__iter__`` has them."""
        lowest: Arrays = (np.empty(0), np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.uint64))
        for rows, anchors, positives in join_slices(iter(self), limit):
            fractions = fractions_of(np.bitwise_xor(anchors, positives), SPLIT_SALT ^ (self._config.seed % 2**64))
            found = [column[fractions > floor] for column in (fractions, rows, anchors, positives)]
            joined = [np.concatenate(pair) for pair in zip(lowest, found, strict=True)]
            order = np.lexsort((joined[1], joined[0]))[:limit]
            lowest = tuple(column[order] for column in joined)
        return lowest

    def _uses(self, texts: Hashes) -> NDArray[np.int64]:
        """Return how often the rows have each of some texts, of the shape of ``texts``."""
        known, places = np.unique(texts, return_inverse=True)
        uses = np.zeros(len(known), np.int64)
        for _, *sides in self:
            given = np.stack(sides)
            found = np.minimum(np.searchsorted(known, given), len(known) - 1)
            uses += np.bincount(found[known[found] == given], minlength=len(known))
        return uses[places].reshape(texts.shape)
