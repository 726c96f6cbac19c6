"""Natural input and its answer, in JSON, for people."""

from typing import Literal

from pydantic import BaseModel


class NaturalModel(BaseModel):
    """What a person can ask: a model, what it takes, and the labels that it answers."""

    name: str
    version: str
    input: Literal["text", "image"]
    labels: list[str]


class PredictRequest(BaseModel):
    """The body of ``predict``: one text or base64 image, or several."""

    inputs: str | list[str]


class Prediction(BaseModel):
    """The most likely label of an input, and the probability of each."""

    label: str
    scores: dict[str, float]
    stage: int | None = None
    """Of a cascade, which answered; None of a single model."""


class PredictResponse(BaseModel):
    """The answer of ``predict``, a prediction for each input."""

    model_name: str
    model_version: str
    predictions: list[Prediction]
