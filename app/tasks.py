"""Tasks: the kinds of data that models learn from.

A classification task has a processor. Its model returns one logit per label, and can be compiled and served. Language
modelling and chats have no processor. Their models return one logit per token of the vocabulary.
"""

from dataclasses import replace

from upath import UPath

from app.config import CHAT, LANGUAGE_MODELING, TENSORS, Recipe
from app.data import classification, language
from app.data.classification import ClassificationData, load_test
from app.data.images import ImageProcessor
from app.data.language import LanguageData
from app.data.prepared import PreparedData
from app.data.processor import Processor
from app.data.text import TextProcessor
from app.errors import RecipeError
from app.import_string import import_attribute

PROCESSORS: dict[str, type[Processor]] = {
    "text-classification": TextProcessor,
    "image-classification": ImageProcessor,
}


def prepare(recipe: Recipe) -> PreparedData:
    """Load, clean, split and encode the data of a recipe. Raises RecipeError or DataError."""
    if recipe.task == CHAT:
        from app.data import chat

        assert recipe.model.pretrained is not None
        return chat.prepare(recipe.data, recipe.model.pretrained)
    if recipe.is_language_model:
        return language.prepare(recipe.data, recipe.model.pretrained)
    return classification.prepare(recipe.data, find_processor(recipe.task), recipe.model.pretrained)


def load_prepared(recipe: Recipe, folder: UPath) -> PreparedData:
    """Load the data that a run of the recipe has saved in ``folder``."""
    if recipe.task == CHAT:
        from app.data.chat import ChatData

        return ChatData.load(folder, recipe.data)
    if recipe.is_language_model:
        return LanguageData.load(folder)
    return ClassificationData.load(folder, find_processor(recipe.task))


def load_with_test(recipe: Recipe, folder: UPath) -> PreparedData:
    """Load the data of a recipe with its test split, so that a run can save all of it again."""
    data = load_prepared(recipe, folder)
    if isinstance(data, ClassificationData):
        return replace(data, test=load_test(folder, data.processor))
    return data


def find_processor(task: str) -> type[Processor]:
    """Return the processor of a classification task, or the one that an import string names.

    Raises:
        RecipeError: the import string names no processor, or the task has none and cannot be compiled or served.
    """
    if task == TENSORS:
        raise RecipeError(
            f"task {task} is that of imported models, which take tensors as they are: only 'rayloom models import' "
            f"publishes one; expected {', '.join(PROCESSORS)}, or the import string of a processor"
        )
    if task in (LANGUAGE_MODELING, CHAT):
        raise RecipeError(
            f"task {task} cannot be compiled or served: expected {', '.join(PROCESSORS)}, or the import string of a "
            "processor"
        )
    processor = PROCESSORS.get(task) or import_attribute(task)
    if not (isinstance(processor, type) and callable(getattr(processor, "fit", None))):
        raise RecipeError(
            f"task {task!r} names a {type(processor).__name__}: expected a class like app.data.text:TextProcessor"
        )
    found: type[Processor] = processor
    return found
