"""What is searched: two recipes with small models, and the spaces that come with Rayloom."""

from dataclasses import dataclass

from app.config import Recipe, load_recipe


@dataclass(frozen=True)
class Case:
    """A recipe, and how much of it a search may train."""

    name: str
    recipe_file: str
    space: str
    overrides: tuple[str, ...]
    epochs: int
    """Of a trial, at most."""
    trials: int
    """Of the random search, which trains each to its end."""

    @property
    def budget(self) -> int:
        """Epochs that every search may train."""
        return self.epochs * self.trials

    def recipe(self) -> Recipe:
        """Without early stopping, which would count epochs of its own."""
        overrides = [*self.overrides, f"train.epochs={self.epochs}", "train.early_stopping=null", "train.workers=1"]
        return load_recipe(self.recipe_file, [*overrides, f"tune.space={self.space}", "tune.metric=val_accuracy"])


# Half of the digits validates: with a fifth, several configurations reach every one of them.
CASES = (
    Case(
        "digits",
        "recipes/digits.yaml",
        "tune_spaces.image:space",
        ("data.validation_fraction=0.5",),
        epochs=12,
        trials=24,
    ),
    Case(
        "reviews, small model",
        "recipes/reviews.yaml",
        "tune_spaces.text:rates",
        (
            "model.args={layers: 1, width: 32, heads: 2, dropout: 0.2, embedding_dropout: 0.2, token_dropout: 0.1}",
            "train.global_batch_size=256",
            "train.linear_baseline=false",
            "data.buckets=[16, 32, 64]",
        ),
        epochs=8,
        trials=16,
    ),
)
