"""The sources of a run, and how much of an epoch each of them is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter
from upath import UPath

from app.config import DataConfig
from app.data.origins import Origins
from app.data.prepared import PreparedData
from app.errors import RecipeError
from app.shared_files import read
from app.storage import write_atomically

_FILE = "mixture.json"


class MixturePeriod(BaseModel):
    """A part of a run in which its sources and their shares stay the same."""

    epoch: int = 1
    number: int = 0
    """The epoch and the global batch with which it begins."""
    names: list[str]
    """Names of the sources. Those of earlier periods come first."""
    shares: list[float]
    window_rows: int
    """Rows of these sources that are shuffled together."""

    @property
    def start(self) -> tuple[int, int]:
        """The epoch and the global batch with which it begins."""
        return self.epoch, self.number


_PERIODS = TypeAdapter(list[MixturePeriod])


def recorded_periods(run_folder: UPath) -> list[MixturePeriod]:
    """Return the periods of a run in order; empty if it has one source, or has not been opened."""
    content = read(run_folder / _FILE)
    return [] if content is None else _PERIODS.validate_json(content)


def with_period(earlier: Sequence[MixturePeriod], period: MixturePeriod) -> list[MixturePeriod]:
    """Return the periods of a run in which all batches from here on belong to ``period``."""
    if earlier and (earlier[-1].names, earlier[-1].shares) == (period.names, period.shares):
        return [*earlier]
    kept = [one for one in earlier if one.start < period.start]
    return [*kept, period if kept else period.model_copy(update={"epoch": 1, "number": 0})]


def save_periods(run_folder: UPath, periods: Sequence[MixturePeriod]) -> None:
    """Record the periods of a run for ``recorded_periods``."""
    write_atomically(run_folder / _FILE, _PERIODS.dump_json([*periods], indent=1))


@dataclass(frozen=True)
class Mixture:
    """The sources of a run, and how much of an epoch each of them is."""

    names: list[str]
    shares: NDArray[np.float64]
    """Share of the training samples of each source. They add up to 1."""
    origins: Origins
    """Of all samples. Samples of sources added later have no name here."""
    window_rows: int
    """Rows of these sources that are shuffled together."""

    @classmethod
    def of(cls, config: DataConfig, data: PreparedData) -> "Mixture | None":
        """Return the mixture of ``data.sources``; None without them.

        Raises:
            RecipeError: there are several, and the data do not say which of them a sample is from.
        """
        if not config.sources:
            return None
        origins = data.origins
        if origins is None:
            if len(config.sources) > 1:
                raise RecipeError(
                    "data.sources has several sources, and the task's data have no origins, which say where each "
                    "sample is from: give one source, or have the task's data tell their origins"
                ).of("origins.missing", "data.sources")
            origins = Origins(*(np.zeros(len(split), np.int16) for split in (data.train, data.validation)))
        shards = data.train.shards
        sizes = np.bincount(origins.train, minlength=len(config.sources)).astype(np.float64)
        given = [source.weight for source in config.sources if source.weight is not None]
        weights = np.array(given) if given else sizes ** (1.0 / config.temperature)
        names = [source.title for source in config.sources]
        return cls(names, weights / weights.sum(), origins, shards.window_rows if shards else len(data.train))

    def __str__(self) -> str:
        shares = zip(self.names, self.shares.tolist(), strict=True)
        return ", ".join(f"{name} {share:.1%}" for name, share in shares)

    def during(self, period: MixturePeriod) -> "Mixture":
        """Return the mixture of an earlier period."""
        return Mixture(period.names, np.array(period.shares), self.origins, period.window_rows)

    def period(self, epoch: int = 1, number: int = 0) -> MixturePeriod:
        """Return the period that begins with a global batch and has this mixture."""
        shares, window_rows = self.shares.tolist(), self.window_rows
        return MixturePeriod(epoch=epoch, number=number, names=self.names, shares=shares, window_rows=window_rows)

    @property
    def num_samples(self) -> int:
        """Number of training samples of all its sources."""
        return int(np.count_nonzero(self.origins.train < len(self.names)))

    def split(self, total: int) -> NDArray[np.int64]:
        """Return how many of ``total`` samples are of each source."""
        exact = self.shares * total
        counts = np.floor(exact).astype(np.int64)
        # The largest remainders get the samples that are left.
        counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
        return counts

    def counts(self, total: int, what: str = "an epoch") -> NDArray[np.int64]:
        """Return how many of ``total`` samples, of ``what``, are of each source. Raise RecipeError if one has none."""
        counts = self.split(total)
        for name, count in zip(self.names, counts.tolist(), strict=True):
            if not count:
                raise RecipeError(f"data.sources {name} has no sample among {total:,} of {what}: raise its weight").of(
                    "source.never_drawn", "data.sources"
                )
        return counts

    def validation_rows(self) -> dict[str, NDArray[np.int64]]:
        """Return the validation samples of each source."""
        return {name: np.flatnonzero(self.origins.validation == place) for place, name in enumerate(self.names)}
