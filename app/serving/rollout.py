"""The versions that answer under one name, and which of them a request gets."""

import asyncio
import logging
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from app.errors import DeadlineError, NotServedError, OverloadError, short_repr
from app.serving.batching.statistics import FailureReason, RecentLatencies
from app.serving.cascade.served import ServedCascade
from app.serving.model.served import ServedModel
from app.serving.protocol.infer import InferRequest, InferResponse
from app.serving.protocol.management import ModelIndex, ModelMetadata, ModelStatistics
from app.serving.protocol.natural import PredictRequest, PredictResponse
from app.tensors import TensorSpec


class InferenceTarget(Protocol):
    """What one request is handed to, and answered by alone."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What a request may hold."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer a request of the protocol."""

    async def predict(self, request: PredictRequest) -> PredictResponse:
        """Answer with labels."""


LOG = logging.getLogger(__name__)

_MAX_BYTES = 2**30


class Shadow:
    """A version that is sent copies. One that finds its queue full is dropped, and so is one too many in bytes."""

    def __init__(self, served: ServedModel, most_bytes: int = _MAX_BYTES) -> None:
        """Send copies to a version, of ``most_bytes`` at a time: the requests that they are of have been answered."""
        self.served = served
        self._max_bytes = most_bytes
        self._bytes = 0  # of the copies that wait or run
        self._copies: dict[asyncio.Task[object], int] = {}  # and their bytes
        self._told: set[type[BaseException]] = set()

    def send(self, copy: Coroutine[Any, Any, object], num_bytes: int) -> None:
        """Let a copy of so many bytes run in the background.

        What it raises is in the version's statistics, and goes no further.
        """
        if self._bytes + num_bytes > self._max_bytes:
            copy.close()
            self.served.batching.failed(FailureReason.REJECTED, 0.0)
            return
        task: asyncio.Task[object] = asyncio.create_task(copy)
        self._copies[task] = num_bytes  # the loop alone would let go of it
        self._bytes += num_bytes
        task.add_done_callback(self._done)

    def _done(self, copy: asyncio.Task[object]) -> None:
        self._bytes -= self._copies.pop(copy)
        error = None if copy.cancelled() else copy.exception()
        if error is None or isinstance(error, OverloadError | DeadlineError) or type(error) in self._told:
            return
        self._told.add(type(error))  # once for each kind: it may be so of every copy
        manifest = self.served.model.manifest
        LOG.warning("the shadow of model %r, version %s, failed", manifest.name, manifest.version, exc_info=error)


class MirroredTarget:
    """What answers, with a shadow that is sent what it has answered.

    So a copy never runs before its request, and what cannot be answered at all is not held against the shadow.
    """

    def __init__(self, answering: InferenceTarget, shadow: Shadow) -> None:
        self._answering = answering
        self._shadow = shadow

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What a request may hold."""
        return self._answering.inputs

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer a request of the protocol."""
        response = await self._answering.infer(request)
        self._shadow.send(self._shadow.served.infer(request), request.num_bytes)
        return response

    async def predict(self, request: PredictRequest) -> PredictResponse:
        """Answer with labels."""
        response = await self._answering.predict(request)
        self._shadow.send(self._shadow.served.predict(request), request.num_bytes)
        return response


@dataclass(frozen=True)
class TrafficShare:
    """A version beside the one in production."""

    served: ServedModel
    percent: float
    """Of the requests that name no version."""


class Rollout:
    """A version in production, and those that are tried beside it."""

    def __init__(
        self,
        name: str,
        production: ServedModel,
        canary: TrafficShare | None,
        shadow: TrafficShare | None,
        cascade: ServedCascade | None,
        chance: random.Random,
    ) -> None:
        """Route requests; a cascade answers in place of production, its last stage."""
        self._name = name
        self._production = production
        self._cascade = cascade
        self._canary = canary
        self._shadow = shadow
        self._copies = Shadow(shadow.served) if shadow else None
        self._chance = chance

    def route(self, version: str | None) -> InferenceTarget:
        """What answers a request: the version that it names, else production, its cascade or, by chance, the canary.

        Raises:
            NotServedError: that version is not served.
        """
        if version is not None:
            return self.find(version)
        canary = self._canary
        chosen: InferenceTarget = self._cascade or self._production
        if canary and self._draws(canary):
            chosen = canary.served
        if self._copies and self._shadow and self._draws(self._shadow):
            return MirroredTarget(chosen, self._copies)
        return chosen

    def has_single_target(self, version: str | None) -> bool:
        """Whether ``route`` gives one version itself: no cascade, and none that a shadow follows."""
        return version is not None or not (self._cascade or self._shadow)

    def find(self, version: str | None) -> ServedModel:
        """A version, else production. Raises NotServedError if it is not served."""
        if version is None:
            return self._production
        for served in self.versions:
            if served.version == version:
                return served
        known = ", ".join(served.version for served in self.versions)
        raise NotServedError(
            f"model {short_repr(self._name)} has no version {short_repr(version)} here: served are {known}"
        )

    @property
    def versions(self) -> list[ServedModel]:
        """All of them, production first."""
        return [self._production, *(beside.served for _, beside in self._beside)]

    @property
    def answering(self) -> list[ServedModel]:
        """Those that clients need, with the earlier stages of a cascade."""
        canary = [self._canary.served] if self._canary else []
        return [self._production, *canary, *(self._cascade.earlier if self._cascade else [])]

    @property
    def latencies(self) -> list[RecentLatencies]:
        """Of all for which clients wait."""
        cascade = [self._cascade.latencies] if self._cascade else []
        return [*cascade, *(served.latencies for served in self.answering)]

    @property
    def counted(self) -> list[tuple[str, ServedModel]]:
        """All versions, production first, and the earlier stages of a cascade, which are counted as CASCADE/STAGE."""
        earlier = self._cascade.earlier if self._cascade else []
        stages = [(f"{self._name}/{served.model.manifest.name}", served) for served in earlier]
        return [*((self._name, served) for served in self.versions), *stages]

    @property
    def statistics(self) -> list[ModelStatistics]:
        """Of all that are counted."""
        return [served.statistics.model_copy(update={"name": name}) for name, served in self.counted]

    def metadata(self, version: str | None) -> ModelMetadata:
        """What a version takes and gives, and which others there are. Raises NotServedError if it is not served."""
        versions = [served.version for served in self.versions]
        return self.find(version).metadata.model_copy(update={"versions": versions})

    @property
    def index(self) -> list[ModelIndex]:
        """All versions as the repository extension lists them, production first."""
        roles = ["", *(f"{role}, {beside.percent:g} %" for role, beside in self._beside)]
        return [
            ModelIndex(name=self._name, version=served.version, state="READY", reason=role)
            for served, role in zip(self.versions, roles, strict=True)
        ]

    @property
    def _beside(self) -> list[tuple[str, TrafficShare]]:
        named = (("canary", self._canary), ("shadow", self._shadow))
        return [(role, beside) for role, beside in named if beside]

    def _draws(self, beside: TrafficShare) -> bool:
        return self._chance.random() * 100 < beside.percent
