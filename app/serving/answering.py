"""What a request is answered by."""

from typing import Protocol

from app.serving.protocol.infer import InferRequest, InferResponse
from app.serving.protocol.natural import PredictRequest, PredictResponse
from app.tensors import TensorSpec


class Answering(Protocol):
    """What one request is handed to, and answered by alone."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What a request may hold."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer a request of the protocol."""

    async def predict(self, request: PredictRequest) -> PredictResponse:
        """Answer with labels."""
