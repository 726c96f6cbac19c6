"""The names that point to versions of a model."""

from typing import Literal, Self

from pydantic import BaseModel

ALIASES_FILE = "aliases.json"
Alias = Literal["production", "canary"]


class Aliases(BaseModel):
    """Which version each alias names, and the numbers that are gone for good."""

    production: int | None = None
    canary: int | None = None
    previous: int | None = None
    """What was in production before: where a rollback goes."""

    deleted: tuple[int, ...] = ()
    """Numbers that no version gets again."""

    def of(self, version: int) -> list[str]:
        """The aliases of a version."""
        named = {"production": self.production, "canary": self.canary, "previous": self.previous}
        return [alias for alias, number in named.items() if number == version]

    def promoted(self, version: int, alias: Alias) -> Self:
        """With an alias on another version; production remembers what it was."""
        if alias == "canary":
            return self.model_copy(update={"canary": version})
        if version == self.production:
            return self
        return self.model_copy(update={"production": version, "previous": self.production})

    def without(self, version: int) -> Self:
        """With a number given up."""
        return self.model_copy(update={"deleted": tuple(sorted({*self.deleted, version}))})
