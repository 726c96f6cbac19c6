"""The linear baseline: the score of a simple model on the same texts, for the log and the run's result."""

from app.best_effort import best_effort
from app.config import Recipe
from app.data.labelled import LabelledData
from app.data.prepared import PreparedData
from app.data.targets import Classes
from app.errors import RecipeError
from app.tasks import find_task
from app.tasks.metrics import Accuracy
from app.training.records import EpochRecord

_TITLE = "linear baseline (character 1- and 2-grams, TF-IDF, logistic regression)"


def texts_of(recipe: Recipe, data: PreparedData) -> LabelledData:
    """Return ``data`` if the linear baseline can be fitted on it. Raises RecipeError otherwise."""
    has_accuracy = any(isinstance(metric, Accuracy) for metric in find_task(recipe.task).metrics)
    is_text = isinstance(data, LabelledData) and data.processor.modality == "text"
    if not (isinstance(data, LabelledData) and is_text and isinstance(data.targets, Classes) and has_accuracy):
        raise RecipeError(
            f"train.linear_baseline is for texts with one label each and a task with an accuracy, which {recipe.task} "
            "has not: set it to false"
        )
    return data


def baseline_of(recipe: Recipe, data: PreparedData, best: EpochRecord) -> float | None:
    """Return the accuracy of the linear baseline, and print it beside the model's. None: it cannot be fitted."""
    baselines: list[float] = []

    def fit() -> None:
        baselines.append(_linear_baseline(texts_of(recipe, data)))
        print(f"val_accuracy {best.val_accuracy:.4f}; {_TITLE}: {baselines[0]:.4f}", flush=True)

    best_effort(fit, "the linear baseline cannot be fitted", "the job")
    return next(iter(baselines), None)


def _linear_baseline(data: LabelledData) -> float:
    """Return the validation accuracy of a linear model of character n-grams, which a larger model has to beat."""
    # These imports take a second, and other runs do not need them.
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    # Characters need no tokenizer, and suit every language.
    vectors = TfidfVectorizer(analyzer="char", ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(vectors, LogisticRegression(C=4.0, max_iter=500))
    train, validation = data.train.split, data.validation.split
    model.fit(train.inputs, train.classes)
    return float(model.score(validation.inputs, validation.classes))
