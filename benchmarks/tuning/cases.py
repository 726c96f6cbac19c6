"""What is searched: two recipes with small models, and the spaces that come with Rayloom."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.checksums import sha256_of
from app.config import Recipe, load_recipe
from app.data.builtin import BUILTIN
from app.storage import to_path, write_atomically

_SHORT_REVIEW = 32
"""Characters. A third of the reviews are no longer."""


@dataclass(frozen=True)
class Case:
    """A recipe, and how much of it a search may train."""

    name: str
    title: str
    recipe_file: str
    space: str
    overrides: tuple[str, ...]
    epochs: int
    """Maximum number of epochs of a trial."""
    trials: int
    """Number of trials of the random search, which trains all of them to their end."""
    make_source: Callable[[Path], Path] | None = None
    """Writes what is trained on into a folder; without it, the recipe's own."""

    @property
    def budget(self) -> int:
        """Epochs that every search may train."""
        return self.epochs * self.trials

    def recipe(self, folder: Path) -> Recipe:
        """Without early stopping, which would count epochs of its own; ``folder`` is for data that is made for it."""
        source = [f"data.source={self.make_source(folder)}"] if self.make_source else []
        trial = [f"train.epochs={self.epochs}", "train.early_stopping=null", "train.workers=1"]
        tune = [f"tune.space={self.space}", "tune.metric=val_accuracy"]
        return load_recipe(self.recipe_file, [*self.overrides, *source, *trial, *tune])


def _short_reviews(folder: Path) -> Path:
    """The reviews that are short, as a file whose name tells its content."""
    reviews = BUILTIN["reviews"]()
    rows = [{"text": text, "label": label} for text, label in reviews if len(text) <= _SHORT_REVIEW]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    file = folder.absolute() / f"short-reviews-{sha256_of(content)[:12]}.jsonl"
    write_atomically(to_path(file), content)
    return file


# Much of the data validates: with less, a few examples decide which configuration is the best.
CASES = (
    Case(
        "digits",
        "Digits",
        "recipes/digits.yaml",
        "tune_spaces.image:space",
        ("data.validation_fraction=0.5",),
        epochs=12,
        trials=24,
    ),
    Case(
        "reviews",
        "Short reviews, small model",
        "recipes/reviews.yaml",
        "tune_spaces.text:rates",
        (
            "model.args={layers: 1, width: 32, heads: 2, dropout: 0.2, embedding_dropout: 0.2, token_dropout: 0.1}",
            "train.linear_baseline=false",
            "data.validation_fraction=0.4",
            "data.buckets=[16, 32]",
        ),
        epochs=6,
        trials=16,
        make_source=_short_reviews,
    ),
)
