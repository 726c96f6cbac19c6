"""The versions that answer under one name, and the choice between them for each request."""

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from app.errors import DeadlineError, NotServedError, OverloadError, short_repr
from app.published.loaded import LoadedModel
from app.serving.agreement import Response, agreeing_rows
from app.serving.batching.statistics import FailureReason, RecentLatencies
from app.serving.cascade.served import ServedCascade
from app.serving.cascade.stages import read_alike
from app.serving.model.served import ServedModel
from app.serving.protocol.infer import InferRequest, InferResponse
from app.serving.protocol.management import ModelIndex, ModelMetadata, ModelStatistics
from app.serving.protocol.predict import PredictRequest, PredictResponse
from app.tensors import TensorSpec

LOG = logging.getLogger(__name__)

_MAX_BYTES = 2**30


class InferenceTarget(Protocol):
    """The target of one request: a version, a cascade, or either with a shadow."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs that a request may have."""

    @property
    def version(self) -> str:
        """The version that answers, as the client is told."""

    @property
    def model(self) -> LoadedModel:
        """The version, which defines what its answers mean."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer an inference request."""

    async def predict(self, request: PredictRequest) -> PredictResponse:
        """Answer natural input with labels."""


class Shadow:
    """A version that gets copies of requests. Copies are dropped if its queue is full, or if they are too large."""

    def __init__(self, served: ServedModel, max_bytes: int = _MAX_BYTES) -> None:
        """Send copies to a version, at most ``max_bytes`` at a time.

        The limit is needed because nothing else holds the copies back: their requests have been answered already.
        """
        self.served = served
        self._max_bytes = max_bytes
        self._bytes = 0  # of the copies that wait or run
        self._copies: dict[asyncio.Task[object], int] = {}  # with their bytes
        self._logged: set[type[BaseException]] = set()
        self.rows = {True: 0, False: 0}
        """Answered rows of copies, by whether they agree with the client's answer (``agreeing_rows``)."""

    def send(
        self, copy: Coroutine[Any, Any, Response], answer: Response, answering: LoadedModel, num_bytes: int
    ) -> None:
        """Run a copy in the background, and compare its answer with the client's, which ``answering`` gave.

        Errors of the copy only count in the version's statistics.
        """
        if self._bytes + num_bytes > self._max_bytes:
            # Python warns of a coroutine that is dropped before it began.
            copy.close()
            self.served.batching.count_failure(FailureReason.REJECTED, 0.0)
            return
        # In a context of its own: the trace of the client's request has ended.
        task: asyncio.Task[object] = asyncio.create_task(self._compare(copy, answer, answering), context=Context())
        self._copies[task] = num_bytes  # the event loop itself holds tasks only weakly
        self._bytes += num_bytes
        task.add_done_callback(self._done)

    async def _compare(self, copy: Coroutine[Any, Any, Response], answer: Response, answering: LoadedModel) -> None:
        # In a thread, because reading the answers to many rows takes long.
        agreed, rows = await asyncio.to_thread(agreeing_rows, await copy, self.served.model, answer, answering)
        self.rows[True] += agreed
        self.rows[False] += rows - agreed

    def _done(self, copy: asyncio.Task[object]) -> None:
        self._bytes -= self._copies.pop(copy)
        error = None if copy.cancelled() else copy.exception()
        # A shadow that is too slow drops copies, which its statistics count.
        if error is None or isinstance(error, OverloadError | DeadlineError) or type(error) in self._logged:
            return
        self._logged.add(type(error))  # once for each type, since every copy may fail
        manifest = self.served.model.manifest
        LOG.warning("the shadow of model %r, version %s, failed", manifest.name, manifest.version, exc_info=error)


class MirroredTarget:
    """A target whose answered requests are copied to a shadow.

    So a copy never runs before its request, and invalid requests do not count as failures of the shadow.
    """

    def __init__(self, target: InferenceTarget, shadow: Shadow) -> None:
        self._target = target
        self._shadow = shadow

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs that a request may have."""
        return self._target.inputs

    @property
    def version(self) -> str:
        """The version that answers the client."""
        return self._target.version

    @property
    def model(self) -> LoadedModel:
        """The version that answers the client."""
        return self._target.model

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer an inference request."""
        response = await self._target.infer(request)
        self._shadow.send(self._shadow.served.infer(request), response, self.model, request.num_bytes)
        return response

    async def predict(self, request: PredictRequest) -> PredictResponse:
        """Answer natural input with labels."""
        response = await self._target.predict(request)
        self._shadow.send(self._shadow.served.predict(request), response, self.model, request.num_bytes)
        return response


class ServedVersion(Protocol):
    """A version in memory, of either kind."""

    version: str
    """The version, as the protocol writes it."""


Served = TypeVar("Served", bound=ServedVersion)


def unknown_version(name: str, version: str, served: Sequence[str]) -> NotServedError:
    """Return the error for a version that is not among those served."""
    return NotServedError(
        f"model {short_repr(name)} has no version {short_repr(version)} here: served are {', '.join(served)}"
    )


@dataclass(frozen=True)
class TrafficShare(Generic[Served]):
    """A version on trial beside production."""

    served: Served
    percent: float
    """Its share of the requests that name no version."""


class VersionChoice(ABC, Generic[Served]):
    """A version in production and its candidates, and the choice between them for each request."""

    def __init__(
        self,
        name: str,
        production: Served,
        canary: TrafficShare[Served] | None,
        shadow: TrafficShare[Served] | None,
        chance: random.Random,
    ) -> None:
        self._name = name
        self._production = production
        self._canary = canary
        self._shadow = shadow
        self._chance = chance

    def find(self, version: str | None) -> Served:
        """Return a version, by default production. Raises NotServedError if it is not served."""
        if version is None:
            return self._production
        for served in self.versions:
            if served.version == version:
                return served
        raise unknown_version(self._name, version, [served.version for served in self.versions])

    @property
    def versions(self) -> list[Served]:
        """All versions, production first."""
        return [self._production, *(share.served for _, share in self._candidates)]

    @property
    def answering(self) -> list[Served]:
        """The versions that clients depend on."""
        return [self._production, *([self._canary.served] if self._canary else [])]

    @property
    def shares(self) -> list[tuple[str, Served, float]]:
        """The role of each version, and the share of the requests without a version that it gets, or copies of them."""
        candidates = [(role, share.served, share.percent / 100) for role, share in self._candidates]
        # A shadow takes nothing from production: its copies are requests that others have answered.
        rest = 1.0 - sum(ratio for role, _, ratio in candidates if role == "canary")
        return [("production", self._production, rest), *candidates]

    @property
    @abstractmethod
    def latencies(self) -> list[RecentLatencies]:
        """The latencies of everything that clients wait for."""

    @property
    @abstractmethod
    def statistics(self) -> list[ModelStatistics]:
        """The statistics of all versions."""

    @abstractmethod
    def statistics_of(self, version: str) -> ModelStatistics:
        """Return the statistics of one version. Raises NotServedError if it is not served."""

    @abstractmethod
    def metadata(self, version: str | None) -> ModelMetadata:
        """Return a version's inputs and outputs, and all versions. Raises NotServedError if it is not served."""

    @property
    def index(self) -> list[ModelIndex]:
        """All versions as the repository extension lists them, production first."""
        roles = ["", *(f"{role}, {share.percent:g} %" for role, share in self._candidates)]
        return [
            ModelIndex(name=self._name, version=served.version, state="READY", reason=role)
            for served, role in zip(self.versions, roles, strict=True)
        ]

    @property
    def _candidates(self) -> list[tuple[str, TrafficShare[Served]]]:
        shares = (("canary", self._canary), ("shadow", self._shadow))
        return [(role, share) for role, share in shares if share]

    def _draws(self, share: TrafficShare[Served]) -> bool:
        return self._chance.random() * 100 < share.percent


class Rollout(VersionChoice[ServedModel]):
    """The versions of a model that answers batches."""

    def __init__(
        self,
        name: str,
        production: ServedModel,
        canary: TrafficShare[ServedModel] | None,
        shadow: TrafficShare[ServedModel] | None,
        cascade: ServedCascade | None,
        chance: random.Random,
    ) -> None:
        """Route requests. A cascade answers in place of production, which is its last stage."""
        super().__init__(name, production, canary, shadow, chance)
        self._cascade = cascade
        self._copies = Shadow(shadow.served) if shadow else None
        self._unlike = {
            share.served.version
            for _, share in self._candidates
            if not _means_the_same(production.model, share.served.model)
        }

    def route(self, version: str | None, *, takes_tensors: bool = False) -> InferenceTarget:
        """Choose the target of a request: the named version, else production, its cascade or, at random, the canary.

        Args:
            version: the version that the request names.
            takes_tensors: whether the request has tensors, which the client has encoded for production.

        Raises:
            NotServedError: the named version is not served.
        """
        if version is not None:
            return self.find(version)
        # A shadow is drawn independently of the canary, so it sees requests of both.
        canary, shadow = self._canary, self._shadow
        target: InferenceTarget = self._cascade or self._production
        if canary and self._takes(canary, takes_tensors=takes_tensors):
            target = canary.served
        if self._copies and shadow and self._takes(shadow, takes_tensors=takes_tensors):
            return MirroredTarget(target, self._copies)
        return target

    def _takes(self, share: TrafficShare[ServedModel], *, takes_tensors: bool) -> bool:
        """Draw whether a candidate gets a request."""
        return not (takes_tensors and share.served.version in self._unlike) and self._draws(share)

    def has_single_target(self, version: str | None) -> bool:
        """Return whether ``route`` returns a single version, without a cascade or a shadow."""
        return version is not None or not (self._cascade or self._shadow)

    @property
    def answering(self) -> list[ServedModel]:
        """The versions that clients depend on, including the earlier stages of a cascade."""
        return [*super().answering, *(self._cascade.earlier if self._cascade else [])]

    @property
    def cascade(self) -> ServedCascade | None:
        """The cascade that answers in place of production, if there is one."""
        return self._cascade

    @property
    def shadow(self) -> Shadow | None:
        """The version that gets copies, if there is one."""
        return self._copies

    @property
    def latencies(self) -> list[RecentLatencies]:
        """The latencies of everything that clients wait for."""
        cascade = [self._cascade.latencies] if self._cascade else []
        return [*cascade, *(served.latencies for served in self.answering)]

    @property
    def counted(self) -> list[tuple[str, ServedModel]]:
        """All versions, production first, and the earlier stages of a cascade, which are named CASCADE/STAGE."""
        earlier = self._cascade.earlier if self._cascade else []
        stages = [(f"{self._name}/{served.model.manifest.name}", served) for served in earlier]
        return [*((self._name, served) for served in self.versions), *stages]

    @property
    def statistics(self) -> list[ModelStatistics]:
        """The statistics of all ``counted`` versions."""
        return [served.statistics.model_copy(update={"name": name}) for name, served in self.counted]

    def statistics_of(self, version: str) -> ModelStatistics:
        """Return the statistics of one version. Raises NotServedError if it is not served."""
        return self.find(version).statistics

    def metadata(self, version: str | None) -> ModelMetadata:
        """Return a version's inputs and outputs, and all versions. Raises NotServedError if it is not served."""
        versions = [served.version for served in self.versions]
        return self.find(version).metadata.model_copy(update={"versions": versions})


def _means_the_same(one: LoadedModel, other: LoadedModel) -> bool:
    """Return whether the same tensors mean the same to two versions of a model, and so do their answers."""
    return read_alike([one, other]) and one.labels == other.labels
