"""Classification: each text, image, row of a table or custom input has one of several labels."""

from app.data.examples import Modality
from app.data.images import ImageProcessor
from app.data.processor import Processor
from app.data.tabular import TabularProcessor
from app.data.targets import Classes
from app.data.text import TextProcessor
from app.tasks.base import ServedTask
from app.tasks.features import CLASSES, IMAGES, MODEL, PREPARED, READ, ROWS, TEXTS
from app.tasks.metrics import Accuracy


class Classification(ServedTask):
    """One label of several. Subclasses name the processor of the inputs."""

    targets = Classes
    metrics = (Accuracy(),)
    learns_classes = True
    supports = ServedTask.supports | CLASSES | {"mixup"}


class TextClassification(Classification):
    """Texts, each with one label."""

    processor = TextProcessor
    supports = PREPARED | MODEL | TEXTS | CLASSES | {"label noise"}


class TabularClassification(Classification):
    """Rows of a table, each with one label."""

    processor = TabularProcessor
    supports = PREPARED | MODEL | ROWS | CLASSES | {"mixup", "linear baseline"}


class ImageClassification(Classification):
    """Images, each with one label."""

    processor = ImageProcessor
    supports = PREPARED | MODEL | IMAGES | CLASSES | {"mixup", "audio augmentation"}  # spectrograms may be images


_OF_INPUTS: dict[Modality, type[Classification]] = {
    "text": TextClassification,
    "row": TabularClassification,
    "image": ImageClassification,
}


def classify(processor: type[Processor]) -> type[Classification]:
    """Return the classification of inputs that ``processor`` reads. It may read every key of inputs."""
    base = _OF_INPUTS.get(processor.modality, Classification)
    parts = {"processor": processor, "supports": base.supports | READ}
    return type(f"{processor.__name__}Classification", (base,), parts)
