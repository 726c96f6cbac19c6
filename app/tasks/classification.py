"""Classification: each text, image, record or custom input has one of several labels."""

from app.data.images import ImageProcessor
from app.data.processor import Processor
from app.data.records import RecordProcessor
from app.data.tabular import TabularProcessor
from app.data.targets import Classes
from app.data.text import TextProcessor
from app.tasks.base import ServedTask
from app.tasks.metrics import Accuracy


class Classification(ServedTask):
    """One label of several. Subclasses name the processor of the inputs."""

    targets = Classes
    metrics = (Accuracy(),)
    learns_classes = True


class TextClassification(Classification):
    """Texts, each with one label."""

    processor = TextProcessor


class TabularClassification(Classification):
    """Rows of a table, each with one label."""

    processor = TabularProcessor


class ImageClassification(Classification):
    """Images, each with one label."""

    processor = ImageProcessor


class MultimodalClassification(Classification):
    """Records of several fields, such as a text with a picture, each with one label."""

    processor = RecordProcessor


def classify(processor: type[Processor]) -> type[Classification]:
    """Return the classification of inputs that ``processor`` reads."""
    return type(f"{processor.__name__}Classification", (Classification,), {"processor": processor})
