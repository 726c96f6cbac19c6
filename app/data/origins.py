"""Which of several sources each sample came from."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import DataConfig
from app.errors import DataError
from app.storage import write_atomically

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
        counts = np.bincount(train, minlength=len(config.sources))
        for place, (source, count) in enumerate(zip(config.sources, counts, strict=True)):
            if not count:
                raise DataError(
                    f"data.sources.{place} {source.source!r} has no training sample after cleaning and the split: give "
                    "more, or leave it out"
                )
        return cls(np.array(train, np.int16), np.array(validation, np.int16))

    def save(self, folder: UPath) -> None:
        """Write them for ``load``."""
        buffer = io.BytesIO()
        np.savez(buffer, train=self.train, validation=self.validation)
        write_atomically(folder / _FILE, buffer.getvalue())

    @classmethod
    def load(cls, folder: UPath) -> Self | None:
        """Return what ``save`` wrote; None if there is one source."""
        if not (folder / _FILE).exists():
            return None
        with np.load(io.BytesIO((folder / _FILE).read_bytes()), allow_pickle=False) as arrays:
            return cls(arrays["train"], arrays["validation"])
