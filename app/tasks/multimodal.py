"""Tasks of records: samples of several fields, such as a text with a picture."""

from app.data.records import RecordProcessor
from app.tasks.classification import Classification
from app.tasks.multilabel import MultiLabel
from app.tasks.regression import Regression


class MultimodalClassification(Classification):
    """Records, each with one label."""

    processor = RecordProcessor


class MultimodalRegression(Regression):
    """Records, each with a number."""

    processor = RecordProcessor


class MultimodalMultiLabel(MultiLabel):
    """Records, each with any number of labels."""

    processor = RecordProcessor
