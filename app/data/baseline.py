"""A linear model on the same split: what a larger one has to beat."""

from app.data.classification import ClassificationData

LINEAR_BASELINE = "linear baseline (character 1- and 2-grams, TF-IDF, logistic regression)"


def linear_baseline(data: ClassificationData) -> float:
    """Validation accuracy of a linear model of character n-grams, for texts."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    vectors = TfidfVectorizer(analyzer="char", ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(vectors, LogisticRegression(C=4.0, max_iter=500))
    train, validation = data.train.split, data.validation.split
    model.fit(train.inputs, train.classes)
    return float(model.score(validation.inputs, validation.classes))
