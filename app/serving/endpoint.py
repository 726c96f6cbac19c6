"""The models that one process serves."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, TypeVar

from app.engines.base import Engine
from app.errors import EngineError, ModelLoadError, NotServedError, RequestError, short_repr
from app.published.engine import open_published
from app.published.loaded import load_model
from app.repository.manifest import Manifest
from app.serving.access import Access
from app.serving.batching.statistics import Durations
from app.serving.cascade.served import ServedCascade
from app.serving.config import (
    AnyDeployed,
    CandidateConfig,
    DeployedGenerator,
    DeployedModel,
    EndpointConfig,
    GeneratorConfig,
    LoadedConfig,
    VersionConfig,
)
from app.serving.generation.loading import load_generator
from app.serving.generation.rollout import GenerationTarget, GeneratorRollout
from app.serving.generation.served import ServedGenerator
from app.serving.model.health import choose_probes
from app.serving.model.served import ServedModel
from app.serving.on_demand import OnDemandModels
from app.serving.protocol.management import ModelIndex, ModelMetadata, ModelStatistics, ServerMetadata
from app.serving.reading import Reader
from app.serving.rollout import InferenceTarget, Rollout, Served, TrafficShare, VersionChoice, unknown_version
from app.serving.traffic import Traffic
from app.storage import open_storage
from app.telemetry.tracing import find_request_tracer

_METADATA = ServerMetadata(version=version_of("rayloom"))
_TARGETED_SHARE = 0.95

Config = TypeVar("Config", bound=LoadedConfig)
Loaded = TypeVar("Loaded", ServedModel, ServedGenerator)
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
        self._served: Mapping[VersionConfig, ServedModel] = {}
        self._generators: Mapping[GeneratorConfig, ServedGenerator] = {}
        self._on_demand = OnDemandModels(self._load_at_request, self._forget)
        self._models: dict[str, Rollout] = {}
        self._languages: dict[str, GeneratorRollout] = {}
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
            loaded = await self._load_all(config.versions, self._served, self._load)
            try:
                generators = await self._load_all(config.generator_versions, self._generators, self._load_generator)
            except BaseException:
                self._close(loaded, keep=self._served)
                raise
            # No await from here on, so no request meets a mix of old and new models.
            removed, self._served, self._config = self._served, loaded, config
            removed_generators, self._generators = self._generators, generators
            resident = {name: model for name, model in config.models.items() if name not in config.on_demand}
            self._models = {name: self._rollout(name, model) for name, model in resident.items()}
            self._languages = {name: self._language(name, model) for name, model in config.generators.items()}
            replaced = self._on_demand.switch(config.on_demand, config.on_demand_bytes)
            self._models |= {name: self._alone(name, served) for name, served in self._on_demand.loaded.items()}
            for forget in self._on_update:
                forget()
            for served in replaced:
                self._close_later(served)
            self._close(removed, keep=loaded)
            self._close(removed_generators, keep=generators)

    async def load_on_demand(self, name: str) -> None:
        """Load a model that is loaded on demand, unless it is. Without an await in between, it can be asked then.

        Raises:
            RayloomError: it cannot be loaded.
        """
        if name in self._models or name not in self._config.on_demand:
            return
        if (served := await self._on_demand.get(name)) and name not in self._models:
            self._models[name] = self._alone(name, served)

    def _alone(self, name: str, served: ServedModel) -> Rollout:
        return Rollout(name, served, canary=None, shadow=None, cascade=None, chance=self._chance)

    def _forget(self, name: str) -> None:
        """Drop a model that is loaded on demand, and what was read for it."""
        self._models.pop(name, None)
        for forget in self._on_update:
            forget()

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

    def route(self, name: str, version: str | None = None, *, takes_tensors: bool = False) -> InferenceTarget:
        """Choose the target of a request as ``Rollout.route`` does: at random with a canary, so call it once a request.

        Raises:
            NotServedError: the model or version is not served.
        """
        return self._model(name).route(version, takes_tensors=takes_tensors)

    def route_single(self, name: str, version: str | None = None) -> ServedModel | None:
        """Choose as ``route`` does for tensors, if a single version answers. Otherwise return None without choosing.

        Raises:
            NotServedError: as ``route``.
        """
        model = self._model(name)
        target = model.route(version, takes_tensors=True) if model.has_single_target(version) else None
        return target if isinstance(target, ServedModel) else None

    def generator(self, name: str, version: str | None = None) -> GenerationTarget:
        """Choose the language model that answers a request: at random if a canary is served, so call this once.

        Raises:
            NotServedError: the model or version is not served.
            RequestError: the model answers batches.
        """
        if name in self._config.models:
            raise RequestError(
                f"model {name!r} does not generate text: send a POST to /v1/models/{name}/predict, or to "
                f"/v2/models/{name}/infer"
            ).of("model.no_text", "model")
        self.require_served(name)
        return self._languages[name].route(version)

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """Return a version that answers batches, by default the one in production.

        Raises:
            NotServedError: the model or version is not served.
            RequestError: the model generates text.
        """
        return self._model(name).find(version)

    def require_deployed(self, name: str, version: str | None = None) -> None:
        """Raise NotServedError if a model or version is not served, be it loaded or not.

        The versions of another pool's model are not known here, so all of them pass.
        """
        if name in self._config.elsewhere:
            return
        on_demand = self._config.on_demand.get(name)
        if on_demand is None:
            self.require_served(name, version)
        elif version not in (None, str(on_demand.version)):
            raise unknown_version(name, version, [str(on_demand.version)])

    def require_served(self, name: str, version: str | None = None) -> None:
        """Raise NotServedError if a model or version is not served."""
        self._versions_of(name).find(version)

    def serves(self, name: str, version: str | None = None) -> bool:
        """Return whether a model and version are served, be they loaded or not."""
        try:
            self.require_deployed(name, version)
        except NotServedError:
            return False
        return True

    def model_metadata(self, name: str, version: str | None = None) -> ModelMetadata:
        """Return a version's inputs and outputs, and all served versions. Raises NotServedError if it is not served."""
        return self._versions_of(name).metadata(version)

    def statistics(self, name: str | None = None, version: str | None = None) -> list[ModelStatistics]:
        """Return the statistics of all versions of all models, of one model, or of one version.

        Raises:
            NotServedError: the model or version is not served.
        """
        asleep = self._config.on_demand.keys() | self._config.elsewhere.keys()
        if name is not None and name in asleep and name not in self._models:
            self.require_deployed(name, version)
            return []
        if name is not None and version is not None:
            return [self._versions_of(name).statistics_of(version)]
        rollouts = self._all_rollouts if name is None else [self._versions_of(name)]
        return [statistics for rollout in rollouts for statistics in rollout.statistics]

    async def load(self, name: str) -> None:
        """Load a model that is loaded on demand. All others are loaded.

        Raises:
            NotServedError: the model is not served.
            RayloomError: it cannot be loaded.
        """
        await self.load_on_demand(name)
        self.require_served(name)

    def unload(self, name: str) -> None:
        """Refuse to unload a model: only one replica would get the request, and then differ from the others.

        Raises:
            NotServedError: the model is not served.
            RequestError: the model is served.
        """
        self.require_deployed(name)
        raise RequestError(f"model {name!r} cannot be unloaded by a client: run jobs.undeploy").of("unload.unsupported")

    @property
    def models(self) -> list[ServedModel]:
        """All served versions that answer batches, sorted by name, with production first within each model."""
        return [served for model in self._rollouts for served in model.versions]

    @property
    def index(self) -> list[ModelIndex]:
        """All served versions, as the repository extension lists them, and then those that are not loaded."""
        loaded = [version for model in self._all_rollouts for version in model.index]
        return [*loaded, *(_cold_index(config) for config in self._on_demand.cold)]

    def index_of(self, pool: str, reason: str) -> list[ModelIndex]:
        """Return the index of another pool that cannot be asked, with the reason."""
        names = sorted(name for name, other in self._config.elsewhere.items() if other == pool)
        return [ModelIndex(name=name, state="UNAVAILABLE", reason=reason) for name in names]

    @property
    def counted(self) -> list[tuple[str, ServedModel]]:
        """All versions that answer batches and earlier stages of cascades, with their names in the statistics."""
        return [named for model in self._rollouts for named in model.counted]

    @property
    def latency_to_target(self) -> float:
        """The recent 95th percentile of latency as a share of its target, for the worst model; 0 if idle.

        Models without a target do not count, nor do shadows, because no client waits for them.
        """
        return max((self._to_target(name, model) for name, model in self._config.deployed.items()), default=0.0)

    async def check(self) -> None:
        """Check that every engine answers, except those of shadows, which no client needs.

        Raises:
            EngineError: an engine does not answer.
        """
        # By health, because a version may stand under several names, and is probed once.
        answering = {served.health: served for model in self._rollouts for served in model.answering}
        probed = choose_probes(answering)
        # Concurrently, because a check may wait a moment for its engine.
        await asyncio.gather(
            *(self._check(served, health in probed) for health, served in answering.items()),
            *(self._check_generator(served) for model in self._languages.values() for served in model.answering),
        )

    async def _load_all(
        self,
        configs: Sequence[Config],
        served: Mapping[Config, Loaded],
        load: Callable[[Config], Coroutine[Any, Any, Loaded]],
    ) -> Mapping[Config, Loaded]:
        """Return what is served by its configuration. A version that is served already keeps its engine and queue."""
        loaded: dict[Config, Loaded] = {}
        try:
            for config in configs:
                loaded[config] = served.get(config) or await load(config)
        except BaseException:  # a cancelled update must not leak what it has loaded
            self._close(loaded, keep=served)
            raise
        return loaded

    async def _load_generator(self, config: GeneratorConfig) -> ServedGenerator:
        began_s = time.monotonic()
        served = await load_generator(config)
        self.loads[config.name, served.version].add(time.monotonic() - began_s)
        return served

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

    async def _load_at_request(self, config: VersionConfig) -> ServedModel:
        try:
            return await self._load(config)
        except Exception as error:  # its files may have been removed or damaged since the deployment
            raise ModelLoadError(
                f"model {config.title} cannot be loaded: see the replica's log in Ray's dashboard, and deploy it again"
            ).of("model.not_loaded") from error

    @property
    def rollouts(self) -> dict[str, Rollout]:
        """What answers batches under each name."""
        return self._models

    @property
    def generators(self) -> dict[str, GeneratorRollout]:
        """What generates text under each name."""
        return self._languages

    @property
    def _rollouts(self) -> list[Rollout]:
        return [self._models[name] for name in sorted(self._models)]

    @property
    def _all_rollouts(self) -> list[VersionChoice[Any]]:
        return [self._versions_of(name) for name in sorted([*self._models, *self._languages])]

    async def _check(self, served: ServedModel, may_probe: bool) -> None:
        try:
            await served.check(may_probe=may_probe)
        except EngineError:
            # Else it was removed meanwhile.
            if served in (*self._served.values(), *self._on_demand.loaded.values()):
                raise

    async def _check_generator(self, served: ServedGenerator) -> None:
        try:
            await served.check()
        except EngineError:
            if served in self._generators.values():  # else it was removed meanwhile
                raise

    def _model(self, name: str) -> Rollout:
        if model := self._models.get(name):
            return model
        if name in self._languages:
            raise RequestError(
                f"model {name!r} generates text: send a POST to /v1/chat/completions or /v1/completions"
            ).of("model.only_text", "model")
        raise self._not_deployed(name)

    def _versions_of(self, name: str) -> VersionChoice[Any]:
        model = self._models.get(name) or self._languages.get(name)
        if model is None:
            raise self._not_deployed(name)
        return model

    def _not_deployed(self, name: str) -> NotServedError:
        known = ", ".join(sorted({**self._config.deployed, **self._config.elsewhere})) or "none"
        return NotServedError(f"model {short_repr(name)} is not deployed: deployed are {known}")

    def _rollout(self, name: str, model: DeployedModel) -> Rollout:
        production, cascade = self._served[model.production], None
        if model.cascade:
            before = [self._served[version] for version in model.cascade.before]
            cascade = ServedCascade([*before, production], model.cascade.rule)
        canary, shadow = _share_of(model.canary, self._served), _share_of(model.shadow, self._served)
        return Rollout(name, production, canary, shadow, cascade, self._chance)

    def _language(self, name: str, model: DeployedGenerator) -> GeneratorRollout:
        served = self._generators
        canary, shadow = _share_of(model.canary, served), _share_of(model.shadow, served)
        return GeneratorRollout(name, served[model.production], canary, shadow, self._chance)

    def _to_target(self, name: str, model: AnyDeployed) -> float:
        target_s = model.scaling.latency_target_s
        # A model that is not loaded has no latencies.
        if target_s is None or (name not in self._models and name not in self._languages):
            return 0.0
        # The worst counts: an average would hide a slow canary or stage.
        percentiles = [latencies.percentile_s(_TARGETED_SHARE) for latencies in self._versions_of(name).latencies]
        return max(latency_s or 0.0 for latency_s in percentiles) / target_s

    def _close(self, models: Mapping[Config, Loaded], keep: Mapping[Config, Loaded]) -> None:
        """Close models in the background, except those to keep."""
        for version, served in models.items():
            if version not in keep:
                self._close_later(served)

    def _close_later(self, served: ServedModel | ServedGenerator) -> None:
        # The switch does not wait for the requests to the old models.
        task = asyncio.create_task(served.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _cold_index(config: VersionConfig) -> ModelIndex:
    reason = "not loaded: the next request loads it"
    return ModelIndex(name=config.name, version=str(config.version), state="UNAVAILABLE", reason=reason)


def _share_of(
    candidate: CandidateConfig[Config] | None, served: Mapping[Config, Served]
) -> TrafficShare[Served] | None:
    return TrafficShare(served[candidate.version], candidate.percent) if candidate else None
