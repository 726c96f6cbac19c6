"""Classification: each text, image or input of one's own has one of several labels."""

from typing import TYPE_CHECKING

from app.config import TrainConfig
from app.data.images import ImageProcessor
from app.data.prepared import PreparedData
from app.data.processor import Processor
from app.data.targets import Classes
from app.data.text import TextProcessor
from app.tasks.base import ServedTask
from app.tasks.metrics import Accuracy

if TYPE_CHECKING:
    from app.tasks.objective import Objective


class Classification(ServedTask):
    """One label of several. Subclasses name the processor of the inputs."""

    targets = Classes
    metrics = (Accuracy(),)

    def objective(self, config: TrainConfig, data: PreparedData) -> "Objective":
        """Return the cross-entropy, with label smoothing and a teacher if the recipe has them."""
        from app.tasks.objective import CrossEntropy, Objective

        loss = CrossEntropy(config.label_smoothing, config.teacher)
        return Objective(loss, tuple(self.metrics), data.facts["num_labels"])


class TextClassification(Classification):
    """Texts, each with one label."""

    processor = TextProcessor


class ImageClassification(Classification):
    """Images, each with one label."""

    processor = ImageProcessor


def classify(processor: type[Processor]) -> type[Classification]:
    """Return the classification of inputs that ``processor`` reads."""
    return type(f"{processor.__name__}Classification", (Classification,), {"processor": processor})
