"""Natural input and its answer, for people."""

import sys
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, NonNegativeInt, PositiveFloat


class NaturalModel(BaseModel):
    """What a person can ask: a model, what it takes, and the labels that it answers."""

    name: str
    version: str
    input: Literal["text", "image"]
    labels: list[str]


class PredictRequest(BaseModel):
    """What ``predict`` is asked: one text or image, or several. In JSON an image is base64."""

    inputs: str | bytes | list[str]
    timeout_s: PositiveFloat | None = None
    """Until the answer; the server may allow less."""
    priority: NonNegativeInt = 0
    """1 is the most urgent; 0 means the default."""

    @property
    def listed(self) -> Sequence[str | bytes]:
        """The inputs, be it one."""
        return self.inputs if isinstance(self.inputs, list) else [self.inputs]

    @property
    def num_bytes(self) -> int:
        """Of the inputs, in memory."""
        return sum(map(sys.getsizeof, self.listed))


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
