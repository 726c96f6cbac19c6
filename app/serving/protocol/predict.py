"""Requests to predict from natural input, such as a text or an image, and their responses."""

import base64
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat

from app.data.examples import Modality, Natural
from app.published.prediction import Prediction


class ModelDescription(BaseModel):
    """A model, the kind of its natural input, and its labels, if it has any."""

    name: str
    version: str
    input: Modality
    labels: list[str]
    columns: list[str] = []
    """The columns of a model that takes rows, or the fields of one that takes records."""


def _require_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with files in base64. Refuse NaN and infinities, which pydantic reads but JSON does not have."""

    def encoded(value: object) -> str:
        if not isinstance(value, bytes):
            raise ValueError(f"{type(value).__name__} is not JSON")
        return base64.b64encode(value).decode()

    try:
        checked: dict[str, Any] = json.loads(json.dumps(row, allow_nan=False, default=encoded))
    except ValueError as error:
        raise ValueError("keys with values of JSON, which has no NaN and no infinity") from error
    return checked


Row = Annotated[dict[str, Any], AfterValidator(_require_json)]


ONLY_VALID = Field(max_length=2**14, fail_fast=True)
"""Settings for lists from clients. Without them pydantic reports several errors for each of a million items."""


class PredictRequest(BaseModel):
    """The body of ``predict``: one text, image, row or record, or several.

    In JSON an image is base64, and a row or a record is an object. In Python a record's files may be bytes.
    """

    model_config = ConfigDict(extra="forbid")

    inputs: str | bytes | Row | Annotated[list[str | Row], ONLY_VALID]
    timeout_s: PositiveFloat | None = None
    """Time until the answer. The server may allow less."""
    priority: NonNegativeInt = 0
    """1 is the most urgent; 0 means the default."""

    @property
    def listed(self) -> Sequence[Natural]:
        """The inputs as a list, even if there is only one."""
        return self.inputs if isinstance(self.inputs, list) else [self.inputs]

    @property
    def num_bytes(self) -> int:
        """The size of the inputs in memory."""
        parts = (item.values() if isinstance(item, dict) else [item] for item in self.listed)
        return sum(sys.getsizeof(part) for group in parts for part in group)


class PredictResponse(BaseModel):
    """The response to ``predict``, with one prediction per input."""

    model_name: str
    model_version: str
    predictions: list[Prediction]
