"""``evaluation.json``: what a trained model predicts of its validation split, kept for the run's page."""

from pydantic import BaseModel

EVALUATION_FILE = "evaluation.json"


class WorstSample(BaseModel):
    """A sample with a high loss."""

    loss: float
    """In nats; of language modelling the mean over the tokens of the block."""
    text: str | None = None
    png_base64: str | None = None
    label: str | None = None
    predicted: str | None = None
    probability: float | None = None
    """That the model gives the true label."""


class Evaluation(BaseModel):
    """What the model predicts of some or all rows of the validation split."""

    rows: int
    """That were evaluated."""
    of: int
    """Rows of the split."""
    labels: list[str] = []
    matrix: list[list[int]] | None = None
    """``matrix[i][j]``: rows of label i for which label j was predicted. None: too many labels, or none."""
    worst: list[WorstSample] = []
    skipped: str | None = None
    """Why nothing was evaluated."""
