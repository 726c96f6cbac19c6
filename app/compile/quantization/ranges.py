"""Find the clipping threshold of a tensor from the histogram of its magnitudes."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from app.config import CalibrationMethod

_BINS = 4096
_LEVELS = 128
"""The number of levels of |x| in int8."""

_STRIDE = 16
"""Distance in bins between two thresholds that the entropy method compares."""

_PERCENTILE = 99.99


@dataclass
class Histogram:
    """Counts the magnitudes of a tensor, in ``_BINS`` bins of equal width from 0.

    If a larger value comes, pairs of bins are merged. So the data is read once, and all counts are exact.
    """

    largest: float = 0.0
    """The largest |x|; NaN or infinite if a value was."""

    width: float = 0.0
    """The width of a bin."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))

    def add(self, values: NDArray[np.float32]) -> None:
        """Count the values of a tensor of any shape."""
        magnitudes = np.abs(values).ravel()
        largest = float(magnitudes.max(initial=0.0))
        # Unlike ``max``, this propagates NaN.
        self.largest = float(np.maximum(self.largest, largest))
        if not np.isfinite(self.largest):
            return
        if self.width == 0.0 and largest > 0.0:
            # A smaller width would be 0 in float32.
            self.width = max(largest / (_BINS - 1), float(np.finfo(np.float32).tiny))
        while self.width and largest >= self.width * _BINS:
            self.counts[: _BINS // 2] = self.counts.reshape(-1, 2).sum(1)
            self.counts[_BINS // 2 :] = 0
            self.width *= 2
        bins = (magnitudes / np.float32(self.width or 1.0)).astype(np.int32)
        # Rounding in float32 may put the largest value one bin too far.
        self.counts += np.bincount(np.minimum(bins, _BINS - 1), minlength=_BINS)

    @property
    def seen(self) -> NDArray[np.int64]:
        """The counts up to the bin of the largest value."""
        return np.trim_zeros(self.counts, "b")


def threshold(histogram: Histogram, method: CalibrationMethod) -> float:
    """Return the magnitude that becomes 127. Larger values are clipped to it.

    - minmax: the largest magnitude.
    - percentile: 99.99 % of all values are below it (Wu et al. 2020, arXiv:2004.09602, section 5).
    - entropy: see ``_entropy_bins``.
    """
    match method:
        case "minmax":
            return histogram.largest
        case "percentile":
            counts = histogram.seen
            bins = int(np.searchsorted(np.cumsum(counts), counts.sum() * _PERCENTILE / 100)) + 1
        case "entropy":
            bins = _entropy_bins(histogram.seen)
    return min(bins * histogram.width, histogram.largest)


def _entropy_bins(counts: NDArray[np.int64]) -> int:
    """Return the number of bins after which to clip, such that int8 loses the least information.

    This is TensorRT's calibration (Migacz, "8-bit Inference with TensorRT", GTC 2017). The reference P is the histogram
    with the clipped counts added to its last bin. Q is the histogram merged into 128 levels, each spread evenly over
    those of its bins that are not empty. The candidate with the smallest divergence KL(P || Q) wins.

    The first bin counts like the second: a ReLU's zeros are exact in int8, and would outweigh everything else. Of
    equal candidates the largest wins: with few distinct values, such as grey levels, clipping can cost nothing by this
    measure.
    """
    weights: NDArray[np.float64] = counts.astype(np.float64)
    if len(weights) > 1:
        weights[0] = weights[1]
    candidates: list[int] = [*range(_LEVELS, len(weights), _STRIDE), len(weights)]
    return min(candidates, key=lambda bins: (_divergence(weights, bins), -bins))


def _divergence(counts: NDArray[np.float64], bins: int) -> float:
    kept = counts[:bins]
    filled = kept > 0
    # The bins are shared out evenly among the levels.
    starts = np.arange(min(_LEVELS, bins)) * bins // min(_LEVELS, bins)
    shared = np.add.reduceat(kept, starts) / np.maximum(np.add.reduceat(filled, starts, dtype=np.int64), 1)
    merged = np.where(filled, np.repeat(shared, np.diff(starts, append=bins)), 0.0)
    reference = kept.copy()
    reference[-1] += counts[bins:].sum()
    # KL is infinite where Q has nothing and P has something.
    if not merged.sum() or not merged[reference > 0].all():
        return float("inf")
    reference, merged = reference[reference > 0] / reference.sum(), merged[reference > 0] / merged.sum()
    return float((reference * np.log(reference / merged)).sum())
