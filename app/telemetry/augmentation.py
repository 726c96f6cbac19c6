"""``augmentation.json``: ten training samples before and after ``train.augment``, kept for the run's page."""

from typing import ClassVar

from pydantic import BaseModel

from app.shared_files import KeptFile


class ShownInput(BaseModel):
    """A text, or a picture as PNG in base64."""

    text: str = ""
    png_base64: str | None = None
    caption: str = ""
    """The share of each label, for a picture mixed from two."""


class AugmentedSamples(KeptFile):
    """Samples as they are, each with several of its changes."""

    file: ClassVar[str] = "augmentation.json"
    before: list[ShownInput]
    after: list[list[ShownInput]]
    """The changes of each sample."""
