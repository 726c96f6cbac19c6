"""Models that are loaded at their first request, and unloaded when others need their memory."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from app.errors import OverloadError
from app.serving.config import VersionConfig
from app.serving.model.served import ServedModel


@dataclass(frozen=True)
class _Loaded:
    config: VersionConfig
    served: ServedModel
    loaded_ms: int

    @property
    def order(self) -> tuple[bool, int]:
        """Its place among those to unload: idle ones first, by their last answer to a client or their loading."""
        return not self.served.is_idle, max(self.loaded_ms, self.served.last_inference_ms)


class OnDemandModels:
    """The loaded ones of the models that are loaded on demand, up to a total size of their files."""

    def __init__(self, load: Callable[[VersionConfig], Awaitable[ServedModel]], forget: Callable[[str], None]) -> None:
        """Load nothing yet.

        Args:
            load: opens a version.
            forget: called with the name of a model that is about to be closed. It gets no more requests after that.
        """
        self._load = load
        self._forget = forget
        self._configs: Mapping[str, VersionConfig] = {}
        self._budget_bytes = 0
        self._loaded: dict[str, _Loaded] = {}
        self._loading = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._awaited: Counter[str] = Counter()
        """The number of requests that wait for each model to be loaded."""

    @property
    def cold(self) -> list[VersionConfig]:
        """The versions that the next request loads, by name."""
        return [config for name, config in sorted(self._configs.items()) if name not in self._loaded]

    @property
    def loaded(self) -> dict[str, ServedModel]:
        """The loaded versions by name."""
        return {name: loaded.served for name, loaded in self._loaded.items()}

    def switch(self, configs: Mapping[str, VersionConfig], budget_bytes: int) -> list[ServedModel]:
        """Serve these versions from now on. Return those that are to be closed: replaced, or beyond the budget."""
        self._configs, self._budget_bytes = configs, budget_bytes
        closed = [name for name, loaded in self._loaded.items() if configs.get(name) != loaded.config]
        replaced = [self._loaded.pop(name).served for name in closed]
        while self._size_bytes > budget_bytes:
            replaced.append(self._loaded.pop(self._oldest).served)
        return replaced

    async def get(self, name: str) -> ServedModel | None:
        """Return a version, loaded if it was not; None if the name has none.

        Others are unloaded for it, the one that answered longest ago first. One is loaded at a time, so the models
        never exceed their budget.

        Raises:
            OverloadError: as many requests wait for it as may wait once it is loaded.
            RayloomError: the version cannot be loaded.
        """
        while (config := self._configs.get(name)) is not None:
            if (loaded := self._loaded.get(name)) is not None:
                return loaded.served
            if self._awaited[name] >= config.policy.queue_limit:
                raise OverloadError(f"{self._awaited[name]} requests wait for {config.title} to be loaded: try again")
            if name not in self._loads:
                self._loads[name] = asyncio.create_task(self._load_alone(name, config))
            self._awaited[name] += 1
            try:
                # A client that goes away must not stop a load that others wait for, or leave half of one.
                await asyncio.shield(self._loads[name])
            finally:
                self._awaited[name] -= 1
        return None

    async def _load_alone(self, name: str, config: VersionConfig) -> None:
        try:
            async with self._loading:
                await self._make_room(config.size_bytes)
                served = await self._load(config)
                if self._configs.get(name) == config:
                    self._loaded[name] = _Loaded(config, served, round(time.time() * 1e3))
                else:  # a deployment has replaced it meanwhile
                    await served.close()
        finally:
            del self._loads[name]

    @property
    def _size_bytes(self) -> int:
        return sum(loaded.config.size_bytes for loaded in self._loaded.values())

    @property
    def _oldest(self) -> str:
        """The model to unload next."""
        return min(self._loaded, key=lambda name: self._loaded[name].order)

    async def _make_room(self, needed: int) -> None:
        # Those that waited for the last load have not run since. They must have it before it is unloaded: otherwise two
        # models could unload each other forever.
        while any(self._awaited[name] for name in self._loaded):
            await asyncio.sleep(0)
        while self._loaded and needed + self._size_bytes > self._budget_bytes:
            # Idle ones first. A busy one gets no more requests, and is closed after its last answer.
            oldest = self._oldest
            self._forget(oldest)
            # Closed before the next one is loaded, because only then its memory is free.
            await self._loaded.pop(oldest).served.close()
