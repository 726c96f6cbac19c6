"""Tasks: what kind of input a model takes. Each is named by its processor; the model answers one logit a label."""

from app.data.images import ImageProcessor
from app.data.processor import Processor
from app.data.text import TextProcessor
from app.errors import RecipeError
from app.import_string import import_attribute

PROCESSORS: dict[str, type[Processor]] = {
    "text-classification": TextProcessor,
    "image-classification": ImageProcessor,
}


def find_processor(task: str) -> type[Processor]:
    """The processor of a task, or the one that an import string names. Raises RecipeError if it names none."""
    processor = PROCESSORS.get(task) or import_attribute(task)
    if not (isinstance(processor, type) and callable(getattr(processor, "fit", None))):
        raise RecipeError(
            f"task {task!r} names a {type(processor).__name__}: expected a class like app.data.text:TextProcessor"
        )
    found: type[Processor] = processor
    return found
