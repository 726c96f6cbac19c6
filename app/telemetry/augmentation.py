"""``augmentation.json``: ten training samples before and after ``train.augment``, kept for the run's page."""

from typing import Self

from pydantic import BaseModel
from upath import UPath

from app.shared_files import read
from app.storage import write_atomically

_FILE = "augmentation.json"


class ShownInput(BaseModel):
    """A text, or a picture as PNG in base64."""

    text: str = ""
    png_base64: str | None = None
    caption: str = ""
    """The share of each label, for a picture mixed from two."""


class AugmentedSamples(BaseModel):
    """Samples as they are, each with several of its changes."""

    before: list[ShownInput]
    after: list[list[ShownInput]]
    """The changes of each sample."""

    def save(self, run_folder: UPath) -> None:
        """Write the samples for ``load``."""
        write_atomically(run_folder / _FILE, self.model_dump_json().encode())

    @classmethod
    def load(cls, run_folder: UPath) -> Self | None:
        """Return what ``save`` wrote; None for a run without ``train.augment``."""
        content = read(run_folder / _FILE)
        return None if content is None else cls.model_validate_json(content)
