"""Multi-label: each text or row of a table has any number of labels."""

from typing import TYPE_CHECKING

from app.data.tabular import TabularProcessor
from app.data.targets import Answer, LabelSets, Outputs
from app.data.text import TextProcessor
from app.tasks.base import ServedTask
from app.tasks.features import MODEL, PREPARED, ROWS, TEXTS
from app.tasks.metrics import Metric, sum_and_count

if TYPE_CHECKING:
    from torch import Tensor


class F1(Metric):
    """Harmonic mean of precision and recall over all pairs of a row and a label (micro average)."""

    name = "f1"
    size = 3

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the numbers of right, of given and of true labels."""
        import torch

        given, true = outputs > 0, targets > 0.5
        return torch.stack([(given & true).sum(), given.sum(), true.sum()])

    def value(self, sums: "Tensor") -> float:
        right, given, true = sums.tolist()
        return float(2.0 * right / (given + true)) if given + true else 1.0


class ExactMatch(Metric):
    """Share of the rows whose labels are all right."""

    name = "exact_match"

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        return sum_and_count(((outputs > 0) == (targets > 0.5)).all(dim=1))


class MultiLabel(ServedTask):
    """Any number of labels for each input, by binary cross-entropy. Subclasses name the processor of the inputs."""

    targets = LabelSets
    metrics = (F1(), ExactMatch())

    def loss(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=1)

    def agrees(self, ours: Answer, theirs: Answer, targets: Outputs) -> bool:
        """Compare the sets of labels."""
        return super().agrees(_sorted(ours), _sorted(theirs), targets)


class TextMultiLabel(MultiLabel):
    """Texts, each with any number of labels."""

    processor = TextProcessor
    supports = PREPARED | MODEL | TEXTS | {"label separator", "named labels"}


class TabularMultiLabel(MultiLabel):
    """Rows of a table, each with any number of labels."""

    processor = TabularProcessor
    supports = PREPARED | MODEL | ROWS | {"label separator", "named labels", "linear baseline"}


def _sorted(answer: Answer) -> Answer:
    return {**answer, "labels": sorted(answer["labels"])}
