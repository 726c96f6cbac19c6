"""Prepared data: cleaned, split and kept in a folder that every worker and every later job reads."""

from collections.abc import Mapping
from typing import Protocol

from upath import UPath

from app.data.dataset import Dataset


class PreparedData(Protocol):
    """What training needs of data, whatever its kind; ``app.tasks`` makes and loads it."""

    @property
    def train(self) -> Dataset: ...

    @property
    def validation(self) -> Dataset:
        """What the model is measured on, and has never seen."""
        ...

    @property
    def facts(self) -> Mapping[str, int]:
        """What a model factory may want to know, by the name of its argument."""
        ...

    @property
    def tokens_per_sample(self) -> int | None:
        """Where each token is a target, as in language modelling; None where a sample has one target."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 over all that the model can see, in order."""
        ...

    @property
    def summary(self) -> str:
        """What was kept and how it was split, in a line or two for the log."""
        ...

    def save(self, folder: UPath) -> None:
        """Write everything, with checksums; every worker loads it."""
        ...

    def save_codec(self, folder: UPath) -> None:
        """Write what turns inputs into a trained model's tensors, and its answers into words."""
        ...
