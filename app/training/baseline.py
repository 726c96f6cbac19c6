"""The linear baseline: the score of a simple model on the same texts, for the log and the run's result."""

from app.best_effort import best_effort
from app.data.labelled import LabelledData
from app.data.prepared import PreparedData
from app.training.records import EpochRecord

_TITLE = "linear baseline (character 1- and 2-grams, TF-IDF, logistic regression)"


def baseline_of(data: PreparedData, best: EpochRecord) -> float | None:
    """Return the accuracy of the linear baseline, and print it beside the model's. None: it cannot be fitted."""
    assert isinstance(data, LabelledData)  # recipes of other tasks are refused
    baselines: list[float] = []

    def fit() -> None:
        baselines.append(_linear_baseline(data))
        ours = "" if best.val_accuracy is None else f"val_accuracy {best.val_accuracy:.4f}; "
        print(f"{ours}{_TITLE}: {baselines[0]:.4f}", flush=True)

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
