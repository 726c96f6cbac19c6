"""The models that one process answers for."""

import asyncio
import random
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path

from app.engines.base import Engine
from app.errors import EngineError, NotServedError, RequestError, short_repr
from app.repository.manifest import Manifest
from app.serving.access import Access
from app.serving.cascade.served import ServedCascade
from app.serving.config import CandidateConfig, DeployedModel, EndpointConfig, VersionConfig
from app.serving.model.engine import open_published
from app.serving.model.health import choose_probes
from app.serving.model.loaded import load_model
from app.serving.model.served import ServedModel
from app.serving.protocol.management import ModelIndex, ModelMetadata, ModelStatistics, ServerMetadata
from app.serving.rollout import InferenceTarget, Rollout, TrafficShare
from app.storage import open_storage

_METADATA = ServerMetadata(version=version_of("rayloom"))
_TARGETED_SHARE = 0.95

Served = Mapping[VersionConfig, ServedModel]
OpenVersion = Callable[[VersionConfig, Manifest, Path, int], Engine]


def open_unsharded(_: VersionConfig, manifest: Manifest, folder: Path, threads: int) -> Engine:
    """The engine of a version that is not sharded, in this process. Raises EngineError or StorageError."""
    return open_published(manifest, folder, threads)


class Endpoint:
    """Models by name. What is served changes at once, and whatever was asked before is answered by what was there."""

    def __init__(
        self,
        chance: random.Random | None = None,
        open_version: OpenVersion = open_unsharded,
    ) -> None:
        """Serve nothing yet.

        Args:
            chance: decides which requests a canary and a shadow get.
            open_version: opens the engine of a version whose files are in a folder.
        """
        self._open_version = open_version
        self._chance = chance or random.Random()
        self._config = EndpointConfig()
        self._served: Served = {}
        self._models: dict[str, Rollout] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._updating = asyncio.Lock()

    @property
    def config(self) -> EndpointConfig:
        """What is served."""
        return self._config

    @property
    def access(self) -> Access:
        """Who is answered."""
        return self._config.access

    async def update(self, config: EndpointConfig) -> None:
        """Load what is new, then let go of what is gone.

        Raises:
            RayloomError: a version cannot be loaded; then everything stays as it was.
        """
        async with self._updating:
            loaded: dict[VersionConfig, ServedModel] = {}
            try:
                for version in config.versions:
                    loaded[version] = self._served.get(version) or await self._load(version)
            except BaseException:
                self._close(loaded, besides=self._served)
                raise
            gone, self._served, self._config = self._served, loaded, config
            self._models = {name: self._rollout(name, model) for name, model in config.models.items()}
            self._close(gone, besides=loaded)

    async def wait_closed(self) -> None:
        """Return when all that was let go of so far has ended, however it ended."""
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def metadata(self) -> ServerMetadata:
        """What this is."""
        return _METADATA

    def route(self, name: str, version: str | None = None) -> InferenceTarget:
        """What answers a request, all of it: chosen once, and by chance if a canary is served.

        Raises:
            NotServedError: the model is not served here, or not in that version.
        """
        return self._model(name).route(version)

    def route_single(self, name: str, version: str | None = None) -> ServedModel | None:
        """Return what ``route`` would, if that is one version by itself; None if it is more, and nothing was chosen.

        Raises:
            NotServedError: as ``route``.
        """
        model = self._model(name)
        chosen = model.route(version) if model.has_single_target(version) else None
        return chosen if isinstance(chosen, ServedModel) else None

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """A version, or the one in production. Raises NotServedError if it is not served here."""
        return self._model(name).find(version)

    def serves(self, name: str, version: str | None = None) -> bool:
        """Whether ``find`` finds it."""
        try:
            self.find(name, version)
        except NotServedError:
            return False
        return True

    def model_metadata(self, name: str, version: str | None = None) -> ModelMetadata:
        """What a version takes and gives, with all that are served. Raises NotServedError if it is not served here."""
        return self._model(name).metadata(version)

    def statistics(self, name: str | None = None, version: str | None = None) -> list[ModelStatistics]:
        """What every version of every model has done, or of one model, or one version.

        Raises:
            NotServedError: it is not served here.
        """
        if name is not None and version is not None:
            return [self.find(name, version).statistics]
        rollouts = self._rollouts if name is None else [self._model(name)]
        return [statistics for rollout in rollouts for statistics in rollout.statistics]

    def load(self, name: str) -> None:
        """Do nothing: what can be loaded by a client is loaded.

        Raises:
            NotServedError: the model is not served.
        """
        self.find(name)

    def unload(self, name: str) -> None:
        """Refuse: replicas share their load, and one that lacks a model would answer otherwise than the rest.

        Raises:
            NotServedError: the model is not served.
            RequestError: it is.
        """
        self.find(name)
        raise RequestError(f"model {name!r} cannot be unloaded by a client: run jobs.undeploy")

    @property
    def models(self) -> list[ServedModel]:
        """Every version that is served, by name; of each model the one in production first."""
        return [served for model in self._rollouts for served in model.versions]

    @property
    def index(self) -> list[ModelIndex]:
        """The same, as the repository extension lists it."""
        return [version for model in self._rollouts for version in model.index]

    @property
    def counted(self) -> list[tuple[str, ServedModel]]:
        """The same with the earlier stages of cascades, each with the name that its statistics have."""
        return [each for model in self._rollouts for each in model.counted]

    @property
    def latency_to_target(self) -> float:
        """How long 95 in 100 requests of late took at most, as a share of their target: of the worst model; 0 if idle.

        Models without a target are left out, and so are shadows, for which nobody waits.
        """
        return max((self._to_target(name, model) for name, model in self._config.models.items()), default=0.0)

    async def check(self) -> None:
        """See whether every engine answers, but for those of shadows: no client needs them.

        Raises:
            EngineError: one does not.
        """
        answering = {served.health: served for model in self._rollouts for served in model.answering}
        asked = choose_probes(answering)
        # Concurrently, because a check may wait a moment for its engine.
        await asyncio.gather(*(self._check(served, health in asked) for health, served in answering.items()))

    async def _load(self, wanted: VersionConfig) -> ServedModel:
        model = await asyncio.to_thread(
            load_model,
            open_storage(wanted.storage),
            wanted.name,
            wanted.version,
            wanted.threads,
            wanted.policy.full_batches,
            partial(self._open_version, wanted),
            exclude=wanted.shard_files,
        )
        return ServedModel(model, wanted.policy)

    @property
    def _rollouts(self) -> list[Rollout]:
        return [self._models[name] for name in sorted(self._models)]

    async def _check(self, served: ServedModel, may_probe: bool) -> None:
        try:
            await served.check(may_probe=may_probe)
        except EngineError:
            if served in self._served.values():  # else it was let go of meanwhile
                raise

    def _model(self, name: str) -> Rollout:
        model = self._models.get(name)
        if model is None:
            known = ", ".join(sorted(self._models)) or "none"
            raise NotServedError(f"model {short_repr(name)} is not deployed: deployed are {known}")
        return model

    def _rollout(self, name: str, model: DeployedModel) -> Rollout:
        def beside(share: CandidateConfig | None) -> TrafficShare | None:
            return TrafficShare(self._served[share.version], share.percent) if share else None

        production, cascade = self._served[model.production], None
        if model.cascade:
            before = [self._served[version] for version in model.cascade.before]
            cascade = ServedCascade([*before, production], model.cascade.rule)
        return Rollout(name, production, beside(model.canary), beside(model.shadow), cascade, self._chance)

    def _to_target(self, name: str, model: DeployedModel) -> float:
        target_s = model.scaling.latency_target_s
        if target_s is None:
            return 0.0
        latencies = [each.percentile_s(_TARGETED_SHARE) for each in self._models[name].latencies]
        return max(latency_s or 0.0 for latency_s in latencies) / target_s

    def _close(self, models: Served, besides: Served) -> None:
        """Let go of models in the background, but for those that go on."""
        for version, served in models.items():
            if version not in besides:
                task = asyncio.create_task(served.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
