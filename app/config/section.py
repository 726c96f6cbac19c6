"""The base of every part of the recipe."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

IMPORT_STRING = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
NAME = r"[a-z0-9][a-z0-9_-]{0,62}"
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A part of the recipe. Unknown keys and wrong types are refused; values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
