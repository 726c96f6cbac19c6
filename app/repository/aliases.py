"""Aliases: names that point to versions of a model."""

from typing import Literal, Self

from pydantic import BaseModel

ALIASES_FILE = "aliases.json"
Alias = Literal["production", "canary", "shadow"]


class Aliases(BaseModel):
    """The version of each alias, and the numbers of deleted versions."""

    production: int | None = None
    canary: int | None = None
    """The version that gets some of the requests, as a trial."""

    shadow: int | None = None
    """The version that gets copies of requests, as a trial."""

    previous: int | None = None
    """The version that was in production before, the target of a rollback."""

    deleted: tuple[int, ...] = ()
    """Numbers that are never used again."""

    def of(self, version: int) -> list[str]:
        """Return the aliases of a version."""
        versions = {
            "production": self.production,
            "canary": self.canary,
            "shadow": self.shadow,
            "previous": self.previous,
        }
        return [alias for alias, number in versions.items() if number == version]

    def promoted(self, version: int, alias: Alias) -> Self:
        """Return the aliases with ``alias`` moved to a version.

        Promoting a version to production clears its canary and shadow aliases, and records the previous version.
        """
        if alias != "production":
            return self.model_copy(update={alias: version})
        cleared = {role: None for role in ("canary", "shadow") if getattr(self, role) == version}
        # A version that is promoted again must not become its own predecessor.
        previous = self.previous if version == self.production else self.production
        return self.model_copy(update={"production": version, "previous": previous, **cleared})

    def without(self, version: int) -> Self:
        """Return the aliases with a version recorded as deleted."""
        return self.model_copy(update={"deleted": tuple(sorted({*self.deleted, version}))})
