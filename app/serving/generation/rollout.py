"""The versions of a language model under one name, and the choice between them for each request."""

import random
from collections.abc import Sequence
from typing import Protocol

from app.repository.manifest import Manifest
from app.serving.batching.statistics import RecentLatencies
from app.serving.generation.limits import GenerationLimits
from app.serving.generation.management import model_metadata, model_statistics
from app.serving.generation.request import Answers, GenerationRequest
from app.serving.generation.served import ServedGenerator
from app.serving.generation.shadow import GenerationShadow, Source
from app.serving.generation.template import Message, Tool
from app.serving.generation.tokenizer import GenerationTokenizer
from app.serving.protocol.management import ModelMetadata, ModelStatistics
from app.serving.rollout import TrafficShare, VersionChoice


class GenerationTarget(Protocol):
    """The target of one request: a version, or a version with a shadow."""

    version: str
    """The version that answers, which the client is told."""
    manifest: Manifest
    limits: GenerationLimits
    tokenizer: GenerationTokenizer

    async def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, as ``ServedGenerator.encode`` does."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> tuple[int, ...]:
        """Return the tokens of messages, as ``ServedGenerator.chat`` does."""

    async def generate(self, request: GenerationRequest) -> Answers:
        """Admit a request, and return its answers, as ``ServedGenerator.generate`` does."""


class MirroredGenerator:
    """The target of one request. A shadow's answers are compared with its complete answers."""

    def __init__(self, target: ServedGenerator, shadow: GenerationShadow) -> None:
        self._target, self._shadow = target, shadow
        self._sources: dict[tuple[int, ...], Source] = {}
        self.version, self.manifest = target.version, target.manifest
        self.limits, self.tokenizer = target.limits, target.tokenizer

    async def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt."""
        tokens = await self._target.encode(text)
        self._sources[tokens] = lambda served: served.encode(text)
        return tokens

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> tuple[int, ...]:
        """Return the tokens of messages."""
        tokens = await self._target.chat(messages, tools)
        self._sources[tokens] = lambda served: served.chat(messages, tools)
        return tokens

    async def generate(self, request: GenerationRequest) -> Answers:
        """Admit a request. Once its answers are complete, the shadow gets a copy."""
        answers = await self._target.generate(request)
        return self._shadow.follow(request, answers, self._target, self._sources.get(request.prompt))


class GeneratorRollout(VersionChoice[ServedGenerator]):
    """The versions of a language model."""

    def __init__(
        self,
        name: str,
        production: ServedGenerator,
        canary: TrafficShare[ServedGenerator] | None,
        shadow: TrafficShare[ServedGenerator] | None,
        chance: random.Random,
    ) -> None:
        super().__init__(name, production, canary, shadow, chance)
        self._copies = GenerationShadow(shadow.served) if shadow else None

    def route(self, version: str | None) -> GenerationTarget:
        """Choose the target of a request: the named version, else production or, at random, the canary.

        Raises:
            NotServedError: the named version is not served.
        """
        if version is not None:
            return self.find(version)
        # The shadow is drawn independently of the canary, so it sees requests to both versions.
        target = self._canary.served if self._canary and self._draws(self._canary) else self._production
        if self._copies and self._shadow and self._draws(self._shadow):
            return MirroredGenerator(target, self._copies)
        return target

    @property
    def shadow(self) -> GenerationShadow | None:
        """The version that gets copies of requests, if there is one."""
        return self._copies

    @property
    def latencies(self) -> list[RecentLatencies]:
        """The times to the first token, of all versions that answer clients."""
        return [served.statistics.latencies for served in self.answering]

    @property
    def statistics(self) -> list[ModelStatistics]:
        """The statistics of all versions."""
        return [model_statistics(served) for served in self.versions]

    def statistics_of(self, version: str) -> ModelStatistics:
        """Return the statistics of one version. Raises NotServedError if it is not served."""
        return model_statistics(self.find(version))

    def metadata(self, version: str | None) -> ModelMetadata:
        """Return a version's inputs and outputs, and all versions. Raises NotServedError if it is not served."""
        return model_metadata(self.find(version), [served.version for served in self.versions])
