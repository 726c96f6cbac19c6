"""The models that one process serves."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path

from app.engines.base import Engine
from app.errors import EngineError, NotServedError, RequestError, short_repr
from app.published.engine import open_published
from app.published.loaded import load_model
from app.repository.manifest import Manifest
from app.serving.access import Access
from app.serving.batching.statistics import Durations
from app.serving.cascade.served import ServedCascade
from app.serving.config import CandidateConfig, DeployedModel, EndpointConfig, VersionConfig
from app.serving.model.health import choose_probes
from app.serving.model.served import ServedModel
from app.serving.protocol.management import ModelIndex, ModelMetadata, ModelStatistics, ServerMetadata
from app.serving.reading import Reader
from app.serving.rollout import InferenceTarget, Rollout, TrafficShare
from app.serving.traffic import Traffic
from app.storage import open_storage
from app.telemetry.tracing import find_request_tracer

_METADATA = ServerMetadata(version=version_of("rayloom"))
_TARGETED_SHARE = 0.95

Served = Mapping[VersionConfig, ServedModel]
OpenVersion = Callable[[VersionConfig, Manifest, Path, int], Engine]


def open_unsharded(_: VersionConfig, manifest: Manifest, folder: Path, threads: int) -> Engine:
    """Open the engine of a version that is not sharded, in this process. Raises EngineError or StorageError."""
    return open_published(manifest, folder, threads)


class Endpoint:
    """Models by name. An update is atomic: earlier requests are answered by the earlier models."""

    def __init__(
        self,
        chance: random.Random | None = None,
        open_version: OpenVersion = open_unsharded,
    ) -> None:
        """Serve nothing yet.

        Args:
            chance: selects the requests for a canary and a shadow.
            open_version: opens the engine of a version whose files are in a folder.
        """
        self._open_version = open_version
        self._chance = chance or random.Random()
        self._config = EndpointConfig()
        self._served: Served = {}
        self._models: dict[str, Rollout] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._updating = asyncio.Lock()
        self._on_update: list[Callable[[], None]] = []
        self.traffic = Traffic(find_request_tracer())
        """Every request for inference, however it came."""
        self.reader = Reader()
        """Reads large requests."""
        self.loads: defaultdict[tuple[str, str], Durations] = defaultdict(Durations)
        """Cold starts, by name and version of the model."""

    @property
    def config(self) -> EndpointConfig:
        """The current configuration."""
        return self._config

    @property
    def access(self) -> Access:
        """The current access."""
        return self._config.access

    async def update(self, config: EndpointConfig) -> None:
        """Load new versions, switch to the new configuration, then close the removed versions.

        Raises:
            RayloomError: a version cannot be loaded; then nothing changes.
        """
        async with self._updating:
            loaded: dict[VersionConfig, ServedModel] = {}
            try:
                for version in config.versions:
                    # A version that is served already keeps its engine and its queue.
                    loaded[version] = self._served.get(version) or await self._load(version)
            except BaseException:  # a cancelled update must not leak what it has loaded
                self._close(loaded, keep=self._served)
                raise
            # No await from here on, so no request meets a mix of old and new models.
            removed, self._served, self._config = self._served, loaded, config
            self._models = {name: self._rollout(name, model) for name, model in config.models.items()}
            for forget in self._on_update:
                forget()
            self._close(removed, keep=loaded)

    def on_update(self, forget: Callable[[], None]) -> None:
        """Call ``forget`` after each switch: it drops what was read for replaced models or tokens."""
        self._on_update.append(forget)

    async def wait_closed(self) -> None:
        """Return when all removed versions are closed, with or without an error."""
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def metadata(self) -> ServerMetadata:
        """The server's name, version and extensions."""
        return _METADATA

    def route(self, name: str, version: str | None = None) -> InferenceTarget:
        """Choose the target of a request: at random if a canary is served, so call this once per request.

        Raises:
            NotServedError: the model or version is not served.
        """
        return self._model(name).route(version)

    def route_single(self, name: str, version: str | None = None) -> ServedModel | None:
        """Choose as ``route``, if a single version answers. Return None, without choosing, if several take part.

        Raises:
            NotServedError: as ``route``.
        """
        model = self._model(name)
        target = model.route(version) if model.has_single_target(version) else None
        return target if isinstance(target, ServedModel) else None

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """Return a version, by default the one in production. Raises NotServedError if it is not served."""
        return self._model(name).find(version)

    def serves(self, name: str, version: str | None = None) -> bool:
        """Return whether ``find`` finds the model and version."""
        try:
            self.find(name, version)
        except NotServedError:
            return False
        return True

    def model_metadata(self, name: str, version: str | None = None) -> ModelMetadata:
        """Return a version's inputs and outputs, and all served versions. Raises NotServedError if it is not served."""
        return self._model(name).metadata(version)

    def statistics(self, name: str | None = None, version: str | None = None) -> list[ModelStatistics]:
        """Return the statistics of all versions of all models, of one model, or of one version.

        Raises:
            NotServedError: the model or version is not served.
        """
        if name is not None and version is not None:
            return [self.find(name, version).statistics]
        rollouts = self._rollouts if name is None else [self._model(name)]
        return [statistics for rollout in rollouts for statistics in rollout.statistics]

    def load(self, name: str) -> None:
        """Do nothing: every model that a client may load is loaded.

        Raises:
            NotServedError: the model is not served.
        """
        self.find(name)

    def unload(self, name: str) -> None:
        """Refuse to unload a model: only one replica would get the request, and then differ from the others.

        Raises:
            NotServedError: the model is not served.
            RequestError: the model is served.
        """
        self.find(name)
        raise RequestError(f"model {name!r} cannot be unloaded by a client: run jobs.undeploy")

    @property
    def models(self) -> list[ServedModel]:
        """All served versions, sorted by name, with production first within each model."""
        return [served for model in self._rollouts for served in model.versions]

    @property
    def index(self) -> list[ModelIndex]:
        """All served versions, as the repository extension lists them."""
        return [version for model in self._rollouts for version in model.index]

    @property
    def counted(self) -> list[tuple[str, ServedModel]]:
        """All served versions and earlier stages of cascades, with their names in the statistics."""
        return [named for model in self._rollouts for named in model.counted]

    @property
    def latency_to_target(self) -> float:
        """The recent 95th percentile of latency as a share of its target, for the worst model; 0 if idle.

        Models without a target do not count, nor do shadows, because no client waits for them.
        """
        return max((self._to_target(name, model) for name, model in self._config.models.items()), default=0.0)

    async def check(self) -> None:
        """Check that every engine answers, except those of shadows, which no client needs.

        Raises:
            EngineError: an engine does not answer.
        """
        # By health, because a version may stand under several names, and is probed once.
        answering = {served.health: served for model in self._rollouts for served in model.answering}
        probed = choose_probes(answering)
        # Concurrently, because a check may wait a moment for its engine.
        await asyncio.gather(*(self._check(served, health in probed) for health, served in answering.items()))

    async def _load(self, config: VersionConfig) -> ServedModel:
        began_s = time.monotonic()
        # In a thread, because loading takes seconds, in which the loop has to answer.
        model = await asyncio.to_thread(
            load_model,
            open_storage(config.storage),
            config.name,
            config.version,
            config.threads,
            config.policy.full_batches,
            partial(self._open_version, config),
            exclude=config.shard_files,
            seal=config.seal,
        )
        self.loads[config.name, model.version].add(time.monotonic() - began_s)
        return ServedModel(model, config.policy)

    @property
    def rollouts(self) -> dict[str, Rollout]:
        """What is served under each name."""
        return self._models

    @property
    def _rollouts(self) -> list[Rollout]:
        return [self._models[name] for name in sorted(self._models)]

    async def _check(self, served: ServedModel, may_probe: bool) -> None:
        try:
            await served.check(may_probe=may_probe)
        except EngineError:
            if served in self._served.values():  # else it was removed meanwhile
                raise

    def _model(self, name: str) -> Rollout:
        model = self._models.get(name)
        if model is None:
            known = ", ".join(sorted(self._models)) or "none"
            raise NotServedError(f"model {short_repr(name)} is not deployed: deployed are {known}")
        return model

    def _rollout(self, name: str, model: DeployedModel) -> Rollout:
        def share_of(candidate: CandidateConfig | None) -> TrafficShare | None:
            return TrafficShare(self._served[candidate.version], candidate.percent) if candidate else None

        production, cascade = self._served[model.production], None
        if model.cascade:
            before = [self._served[version] for version in model.cascade.before]
            cascade = ServedCascade([*before, production], model.cascade.rule)
        return Rollout(name, production, share_of(model.canary), share_of(model.shadow), cascade, self._chance)

    def _to_target(self, name: str, model: DeployedModel) -> float:
        target_s = model.scaling.latency_target_s
        if target_s is None:
            return 0.0
        # The worst counts: an average would hide a slow canary or stage.
        percentiles = [latencies.percentile_s(_TARGETED_SHARE) for latencies in self._models[name].latencies]
        return max(latency_s or 0.0 for latency_s in percentiles) / target_s

    def _close(self, models: Served, keep: Served) -> None:
        """Close models in the background, except those to keep."""
        for version, served in models.items():
            if version not in keep:
                # The switch does not wait for the requests to the old models.
                task = asyncio.create_task(served.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
