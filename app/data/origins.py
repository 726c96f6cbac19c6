"""Which of several sources each sample came from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from app.config import DataConfig
from app.errors import DataError

if TYPE_CHECKING:  # it imports pyarrow
    from app.data.shards import Shard


@dataclass(frozen=True)
class Origins:
    """The source of each training and validation sample, as its place in ``data.sources``."""

    train: NDArray[np.int16]
    validation: NDArray[np.int16]

    def require_all(self, config: DataConfig) -> None:
        """Raise DataError if a source has no training sample."""
        counts = np.bincount(self.train, minlength=len(config.sources))
        for place, (source, count) in enumerate(zip(config.sources, counts, strict=True)):
            if not count:
                raise DataError(
                    f"data.sources.{place} {source.source!r} has no training sample after cleaning and the split: give "
                    "more, or leave it out"
                ).of("split.empty", "data.sources")

    @classmethod
    def of_shards(cls, train: "Sequence[Shard]", validation: "Sequence[Shard]") -> Self:
        """Return the origins of rows in shards."""
        parts = (
            np.repeat([one.source for one in shards], [one.rows for one in shards]) for shards in (train, validation)
        )
        return cls(*(part.astype(np.int16) for part in parts))
