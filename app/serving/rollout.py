"""The versions that answer under one name, and which of them a request gets."""

import random
from dataclasses import dataclass

from app.errors import NotServedError
from app.serving.answering import Answering
from app.serving.cascade.served import ServedCascade
from app.serving.latencies import RecentLatencies
from app.serving.model.served import ServedModel
from app.serving.protocol.management import ModelIndex, ModelMetadata, ModelStatistics
from app.serving.protocol.wording import shown
from app.serving.shadow import Shadow, Shadowed


@dataclass(frozen=True)
class Beside:
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
        canary: Beside | None,
        shadow: Beside | None,
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

    def route(self, version: str | None) -> Answering:
        """What answers a request: the version that it names, else production, its cascade or, by chance, the canary.

        Raises:
            NotServedError: that version is not served.
        """
        if version is not None:
            return self.find(version)
        canary = self._canary
        chosen: Answering = self._cascade or self._production
        if canary and self._draws(canary):
            chosen = canary.served
        if self._copies and self._shadow and self._draws(self._shadow):
            return Shadowed(chosen, self._copies)
        return chosen

    def answers_alone(self, version: str | None) -> bool:
        """Whether ``route`` gives one version itself: no cascade, and none that a shadow follows."""
        return version is not None or not (self._cascade or self._shadow)

    def find(self, version: str | None) -> ServedModel:
        """A version, else production. Raises NotServedError if it is not served."""
        if version is None:
            return self._production
        for served in self.versions:
            if served.model.version == version:
                return served
        known = ", ".join(served.model.version for served in self.versions)
        raise NotServedError(f"model {shown(self._name)} has no version {shown(version)} here: served are {known}")

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
        versions = [served.model.version for served in self.versions]
        return self.find(version).metadata.model_copy(update={"versions": versions})

    @property
    def index(self) -> list[ModelIndex]:
        """All versions as the repository extension lists them, production first."""
        roles = ["", *(f"{role}, {beside.percent:g} %" for role, beside in self._beside)]
        return [
            ModelIndex(name=self._name, version=served.model.version, state="READY", reason=role)
            for served, role in zip(self.versions, roles, strict=True)
        ]

    @property
    def _beside(self) -> list[tuple[str, Beside]]:
        named = (("canary", self._canary), ("shadow", self._shadow))
        return [(role, beside) for role, beside in named if beside]

    def _draws(self, beside: Beside) -> bool:
        return self._chance.random() * 100 < beside.percent
