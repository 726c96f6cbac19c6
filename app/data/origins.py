"""Which of several sources each sample came from."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import DataConfig
from app.errors import DataError
from app.storage import stream_atomically

if TYPE_CHECKING:  # it imports pyarrow
    from app.data.shards import Shard

_FILE = "origins.npz"


@dataclass(frozen=True)
class Origins:
    """The source of each training and validation sample, as its place in ``data.sources``."""

    train: NDArray[np.int16]
    validation: NDArray[np.int16]

    @classmethod
    def of(cls, config: DataConfig, train: Sequence[int], validation: Sequence[int]) -> Self | None:
        """Return the origins, or None if there is one source. Raise DataError if one has nothing to learn."""
        if not config.sources:
            return None
        found = cls(np.array(train, np.int16), np.array(validation, np.int16))
        found.require_all(config)
        return found

    def require_all(self, config: DataConfig) -> None:
        """Raise DataError if a source has no training sample."""
        counts = np.bincount(self.train, minlength=len(config.sources))
        for place, (source, count) in enumerate(zip(config.sources, counts, strict=True)):
            if not count:
                raise DataError(
                    f"data.sources.{place} {source.source!r} has no training sample after cleaning and the split: give "
                    "more, or leave it out"
                )

    @classmethod
    def of_shards(cls, train: "Sequence[Shard]", validation: "Sequence[Shard]") -> Self:
        """Return the origins of rows in shards."""
        parts = (
            np.repeat([one.source for one in shards], [one.rows for one in shards]) for shards in (train, validation)
        )
        return cls(*(part.astype(np.int16) for part in parts))

    def save(self, folder: UPath) -> None:
        """Write them for ``load``."""
        with stream_atomically(folder / _FILE) as file:
            np.savez(file, train=self.train, validation=self.validation)

    @classmethod
    def load(cls, folder: UPath) -> Self | None:
        """Return what ``save`` wrote; None if there is one source."""
        if not (folder / _FILE).exists():
            return None
        with np.load(io.BytesIO((folder / _FILE).read_bytes()), allow_pickle=False) as arrays:
            return cls(arrays["train"], arrays["validation"])
