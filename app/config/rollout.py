"""The recipe's ``serve.canary``, ``serve.shadow`` and ``serve.scaling``: versions beside production, and replicas."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from app.config.section import Section

Role = Literal["canary", "shadow"]
Percent = Annotated[float, Field(gt=0.0, le=100.0)]


class CanaryConfig(Section):
    """A version that answers some of the requests instead of production."""

    percent: Percent = Field(description="share of the requests that name no version")
    version: PositiveInt | None = Field(
        default=None, description="version to make the canary; default: the canary as it is"
    )


class ShadowConfig(Section):
    """A version that gets copies of requests. Its answers are discarded."""

    percent: Percent = Field(default=100.0, description="share of the requests that name no version")
    version: PositiveInt | None = Field(
        default=None, description="version to make the shadow; default: the shadow as it is"
    )


class ScalingConfig(Section):
    """When replicas are added or removed, if serve.replicas are [min, max]."""

    latency_target_ms: PositiveFloat | None = Field(
        default=None,
        description="target of the 95th percentile latency in a replica, of a language model that of the first token; "
        "default: scale by the number of requests",
    )
    upscale_delay_s: Annotated[float, Field(ge=0.0)] = Field(
        default=5.0, description="seconds for which more replicas must be needed before they are started"
    )
    downscale_delay_s: Annotated[float, Field(ge=0.0)] = Field(
        default=300.0, description="seconds for which fewer replicas must suffice before others stop"
    )
