"""The sources of a run, and how much of an epoch each of them is."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.config import DataConfig
from app.data.origins import Origins
from app.data.prepared import PreparedData
from app.errors import RecipeError


@dataclass(frozen=True)
class Mixture:
    """The sources of a run, and how much of an epoch each of them is."""

    names: list[str]
    shares: NDArray[np.float64]
    """Share of the training samples of each source. They add up to 1."""
    origins: Origins

    @classmethod
    def of(cls, config: DataConfig, data: PreparedData) -> "Mixture | None":
        """Return the mixture of ``data.sources``; None if there is one source."""
        origins = data.origins
        if not config.sources or origins is None:
            return None
        sizes = np.bincount(origins.train, minlength=len(config.sources)).astype(np.float64)
        given = [source.weight for source in config.sources if source.weight is not None]
        weights = np.array(given) if given else sizes ** (1.0 / config.temperature)
        return cls([source.title for source in config.sources], weights / weights.sum(), origins)

    def __str__(self) -> str:
        shares = zip(self.names, self.shares.tolist(), strict=True)
        return ", ".join(f"{name} {share:.1%}" for name, share in shares)

    def counts(self, total: int, what: str = "an epoch") -> NDArray[np.int64]:
        """Return how many of ``total`` samples, of ``what``, are of each source. Raise RecipeError if one has none."""
        exact = self.shares * total
        counts = np.floor(exact).astype(np.int64)
        # The largest remainders get the samples that are left.
        counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
        for name, count in zip(self.names, counts.tolist(), strict=True):
            if not count:
                raise RecipeError(f"data.sources {name} has no sample among {total:,} of {what}: raise its weight")
        return counts

    def validation_rows(self) -> dict[str, NDArray[np.int64]]:
        """Return the validation samples of each source."""
        return {name: np.flatnonzero(self.origins.validation == place) for place, name in enumerate(self.names)}
