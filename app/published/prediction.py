"""What a model answers for one input."""

from pydantic import BaseModel, ConfigDict


class Prediction(BaseModel):
    """What the task answers for an input: of a classifier, the most likely label and the probability of each."""

    model_config = ConfigDict(extra="allow")

    label: str | None = None
    scores: dict[str, float] | None = None
    stage: int | None = None
    """The stage of a cascade that answered; None for a single model."""
