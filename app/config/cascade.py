"""The recipe's ``serve.cascade``: cheaper models that are asked before the recipe's own."""

from typing import Annotated

from pydantic import Field

from app.config.section import NAME, Section

VersionReference = Annotated[str, Field(pattern=rf"^{NAME}(/[1-9][0-9]*)?$")]


class CascadeConfig(Section):
    """Each model answers the rows that it is sure of. The recipe's own model answers the rest."""

    before: Annotated[list[VersionReference], Field(min_length=1, max_length=3)] = Field(
        description="what is asked first, the cheapest at the front: NAME, its version in production, or NAME/VERSION"
    )
    accuracy_floor: Annotated[float, Field(ge=0.8, le=0.999)] = Field(
        default=0.995, description="least accuracy of the cascade, as a share of this model's own"
    )
