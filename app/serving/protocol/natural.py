"""Natural input and its answer, in JSON, for people."""

from pydantic import BaseModel


class PredictRequest(BaseModel):
    """The body of ``predict``: one text or base64 image, or several."""

    inputs: str | list[str]


class Prediction(BaseModel):
    """The most likely label of an input, and the probability of each."""

    label: str
    scores: dict[str, float]


class PredictResponse(BaseModel):
    """The answer of ``predict``, a prediction for each input."""

    model_name: str
    model_version: str
    predictions: list[Prediction]
