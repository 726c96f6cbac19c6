"""The models that one process answers for."""

import asyncio
from importlib.metadata import version as version_of

from app.errors import EngineError, NotServedError, RequestError
from app.serving.config import EndpointConfig, ServedModelConfig
from app.serving.model import load_model
from app.serving.protocol.management import ModelIndex, ServerMetadata
from app.serving.protocol.wording import shown
from app.serving.served import ServedModel
from app.storage import open_storage

_METADATA = ServerMetadata(version=version_of("rayloom"))


class Endpoint:
    """Models by name. What is served changes at once, and whatever was asked before is answered by what was there."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self._config = EndpointConfig()
        self._closing: set[asyncio.Task[None]] = set()
        self._updating = asyncio.Lock()

    @property
    def config(self) -> EndpointConfig:
        """What is served."""
        return self._config

    async def update(self, config: EndpointConfig) -> None:
        """Load what is new, then let go of what is gone.

        Raises:
            RayloomError: a model cannot be loaded; then everything stays as it was.
        """
        async with self._updating:
            models: dict[str, ServedModel] = {}
            try:
                for name, wanted in config.models.items():
                    kept = wanted == self._config.models.get(name)
                    models[name] = self._models[name] if kept else await _load(name, wanted)
            except BaseException:
                self._close(models, besides=self._models)
                raise
            gone, self._models, self._config = self._models, models, config
            self._close(gone, besides=models)

    @property
    def metadata(self) -> ServerMetadata:
        """What this is."""
        return _METADATA

    def find(self, name: str, version: str | None = None) -> ServedModel:
        """The model of a request.

        Raises:
            NotServedError: it is not served here, or not in that version.
        """
        served = self._models.get(name)
        if served is None:
            known = ", ".join(sorted(self._models)) or "none"
            raise NotServedError(f"model {shown(name)} is not deployed: deployed are {known}")
        if version not in (None, served.model.version):
            raise NotServedError(
                f"model {shown(name)} has no version {shown(version)} here: version {served.model.version} is served"
            )
        return served

    def serves(self, name: str, version: str | None = None) -> bool:
        """Whether ``find`` finds it."""
        served = self._models.get(name)
        return served is not None and version in (None, served.model.version)

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
        raise RequestError(
            f"model {name!r} cannot be unloaded by a client: it is served until jobs.deploy changes that"
        )

    @property
    def models(self) -> list[ServedModel]:
        """All that is served, by name."""
        return [self._models[name] for name in sorted(self._models)]

    @property
    def index(self) -> list[ModelIndex]:
        """All that is served, as the repository extension lists it."""
        return [
            ModelIndex(name=each.model.manifest.name, version=each.model.version, state="READY") for each in self.models
        ]

    async def check(self) -> None:
        """Ask every engine for an answer.

        Raises:
            EngineError: one fails, or answers numbers that are not finite.
        """
        for served in self.models:
            try:
                await asyncio.to_thread(served.model.check)
            except EngineError:
                if served in self._models.values():  # else it was let go of meanwhile
                    raise

    def _close(self, models: dict[str, ServedModel], besides: dict[str, ServedModel]) -> None:
        """Let go of models in the background, but for those that go on."""
        kept = {id(each) for each in besides.values()}
        for served in models.values():
            if id(served) not in kept:
                task = asyncio.create_task(served.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


async def _load(name: str, wanted: ServedModelConfig) -> ServedModel:
    storage = open_storage(wanted.storage)
    most = wanted.policy.max_batch_size
    model = await asyncio.to_thread(load_model, storage, name, wanted.version, wanted.threads, most)
    return ServedModel(model, wanted.policy)
