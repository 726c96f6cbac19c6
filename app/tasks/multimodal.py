"""Tasks of records, which are samples of several fields, such as a text with a picture."""

from app.config import Recipe
from app.data.records import RecordProcessor
from app.errors import RecipeError
from app.tasks.base import ServedTask
from app.tasks.classification import Classification
from app.tasks.features import CLASSES, MODEL, PREPARED, RECORDS
from app.tasks.multilabel import MultiLabel
from app.tasks.regression import Regression


class _OfRecords(ServedTask):
    """Records. Their fields are named in the recipe."""

    processor = RecordProcessor
    supports = (PREPARED - {"sources"}) | (MODEL - {"pretrained model"}) | RECORDS

    def require(self, recipe: Recipe) -> None:
        super().require(recipe)
        if not recipe.data.columns.fields:
            raise RecipeError(
                f"data.columns.fields is empty: task {recipe.task} learns from samples of several fields; name each "
                "with its kind, such as {title: {kind: text}, photo: {kind: image}}"
            ).of("fields.empty", "data.columns.fields")


class MultimodalClassification(_OfRecords, Classification):
    """Records, each with one label."""

    supports = _OfRecords.supports | CLASSES


class MultimodalRegression(_OfRecords, Regression):
    """Records, each with a number."""


class MultimodalMultiLabel(_OfRecords, MultiLabel):
    """Records, each with any number of labels."""

    supports = _OfRecords.supports | {"label separator", "named labels"}
