"""The names that point to versions of a model."""

from typing import Literal, Self

from pydantic import BaseModel

ALIASES_FILE = "aliases.json"
Alias = Literal["production", "canary", "shadow"]


class Aliases(BaseModel):
    """Which version each alias names, and the numbers that are gone for good."""

    production: int | None = None
    canary: int | None = None
    """What is tried on some of the requests."""

    shadow: int | None = None
    """What is tried on copies of requests."""

    previous: int | None = None
    """What was in production before: where a rollback goes."""

    deleted: tuple[int, ...] = ()
    """Numbers that no version gets again."""

    def of(self, version: int) -> list[str]:
        """The aliases of a version."""
        named = {
            "production": self.production,
            "canary": self.canary,
            "shadow": self.shadow,
            "previous": self.previous,
        }
        return [alias for alias, number in named.items() if number == version]

    def promoted(self, version: int, alias: Alias) -> Self:
        """With an alias on another version; production remembers what it was, and its version is tried no more."""
        if alias != "production":
            return self.model_copy(update={alias: version})
        tried = {each: None for each in ("canary", "shadow") if getattr(self, each) == version}
        previous = self.previous if version == self.production else self.production
        return self.model_copy(update={"production": version, "previous": previous, **tried})

    def without(self, version: int) -> Self:
        """With a number given up."""
        return self.model_copy(update={"deleted": tuple(sorted({*self.deleted, version}))})
