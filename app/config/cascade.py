"""The recipe's ``serve.cascade``: several versions that answer under one name."""

from typing import Annotated

from pydantic import Field, field_validator

from app.config.section import NAME, Section

VersionReference = Annotated[str, Field(pattern=rf"^{NAME}/([1-9][0-9]*|production|canary)$")]


class CascadeConfig(Section):
    """Each version answers the rows that it is sure of, and passes the others on to the next."""

    stages: Annotated[list[VersionReference], Field(min_length=2, max_length=4)] = Field(
        description="versions from the cheapest to the best, each NAME/NUMBER, NAME/production or NAME/canary"
    )
    accuracy_floor: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.995, description="least accuracy of the cascade, as a share of its last stage's"
    )

    @field_validator("stages")
    @classmethod
    def _nothing_twice(cls, given: list[str]) -> list[str]:
        if len(set(given)) < len(given):
            raise ValueError(f"{given} has something twice")
        return given
