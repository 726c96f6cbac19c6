"""Requests for embeddings and their answers.

https://developers.openai.com/api/reference/resources/embeddings/methods/create
"""

import base64
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from app.errors import RequestError, short_repr
from app.serving.protocol.openai.models import predict_path
from app.serving.protocol.predict import ONLY_VALID, PredictRequest, PredictResponse


class EmbeddingsRequest(BaseModel):
    """The body of ``/v1/embeddings``."""

    model_config = ConfigDict(extra="forbid")

    model: str
    input: (
        str
        | Annotated[list[str], ONLY_VALID]
        | Annotated[list[int], ONLY_VALID]
        | Annotated[list[Annotated[list[int], ONLY_VALID]], ONLY_VALID]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = Field(default=None, description="changes nothing")

    def as_predict(self) -> PredictRequest:
        """Return the texts. Raises RequestError for tokens, which belong to a tokenizer that the client has guessed."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) != len(texts):
            raise RequestError(
                "input holds tokens: send a text, or a list of texts, which the model's tokenizer reads"
            ).of("input.tokens", "input")
        return PredictRequest(inputs=strings)


class Embedding(BaseModel):
    """The vector of one text: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that the model read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """The answer: a vector for each text, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage = Field(description="tokens of all texts")

    @classmethod
    def of(cls, request: EmbeddingsRequest, answer: PredictResponse) -> Self:
        """Return a model's predictions in this format.

        Raises:
            RequestError: the model answers no vectors, or vectors of another size than asked for.
        """
        vectors: list[list[float]] = []
        for prediction in answer.predictions:
            extra: dict[str, Any] = prediction.model_extra or {}
            if "embedding" not in extra:
                raise RequestError(
                    f"model {short_repr(request.model)} answers labels, not vectors: ask "
                    f"{predict_path(request.model)}, or deploy a model of task sentence-embedding"
                ).of("model.no_vectors", "model")
            vectors.append(extra["embedding"])
        # A vector is not truncated, because its model was not trained for that.
        if request.dimensions not in (None, len(vectors[0])):
            raise RequestError(
                f"dimensions is {request.dimensions}: model {short_repr(request.model)} has vectors of "
                f"{len(vectors[0])} numbers; leave it out"
            ).of("dimensions.differ", "dimensions")
        # A custom task may not count tokens.
        tokens = sum((prediction.model_extra or {}).get("tokens", 0) for prediction in answer.predictions)
        return cls(
            data=[
                Embedding(index=index, embedding=vector if request.encoding_format == "float" else _base64(vector))
                for index, vector in enumerate(vectors)
            ],
            model=answer.model_name,
            usage=Usage(prompt_tokens=tokens, total_tokens=tokens),
        )


def _base64(vector: list[float]) -> str:
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
