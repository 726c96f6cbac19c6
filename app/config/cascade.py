"""The recipe's ``serve.cascade``: cheaper models that get requests before the recipe's own."""

from typing import Annotated

from pydantic import Field

from app.config.section import Section, VersionReference


class CascadeConfig(Section):
    """Each model answers the rows of which it is confident. The recipe's own model answers the rest."""

    before: Annotated[list[VersionReference], Field(min_length=1, max_length=3)] = Field(
        description="models that get requests first, cheapest first: NAME for its production version, or NAME/VERSION"
    )
    accuracy_floor: Annotated[float, Field(ge=0.8, le=0.999)] = Field(
        default=0.995, description="minimum accuracy of the cascade, as a share of this model's own"
    )
