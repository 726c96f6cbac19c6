"""A custom task with metrics of torchmetrics and scikit-learn that are not means over rows."""

from functools import partial

from sklearn.metrics import matthews_corrcoef, roc_auc_score
from torch import Tensor
from torchmetrics.classification import MulticlassF1Score

from app.tasks import SklearnMetric, TorchMetric
from app.tasks.classification import ImageClassification


def by_class(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.argmax(-1), targets


def by_probability(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.softmax(-1), targets


class JudgedDigits(ImageClassification):
    """Digits, each with one label."""

    metrics = (
        TorchMetric("f1", lambda targets: MulticlassF1Score(targets.num_outputs)),
        SklearnMetric("matthews", matthews_corrcoef, inputs=by_class),
        SklearnMetric("auroc", partial(roc_auc_score, multi_class="ovr"), inputs=by_probability),
    )
