"""The recipe's ``serve.canary``, ``serve.shadow`` and ``serve.scaling``: versions beside production, and replicas."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from app.config.section import Section

Role = Literal["canary", "shadow"]
Percent = Annotated[float, Field(gt=0.0, le=100.0)]


class CanaryConfig(Section):
    """A version that answers some of the requests in place of the one in production."""

    percent: Percent = Field(description="of the requests that name no version")
    version: PositiveInt | None = Field(
        default=None, description="version to make the canary; default: the canary as it is"
    )


class ShadowConfig(Section):
    """A version that gets copies of requests, and whose answers nobody sees."""

    percent: Percent = Field(default=100.0, description="of the requests that name no version")
    version: PositiveInt | None = Field(
        default=None, description="version to make the shadow; default: the shadow as it is"
    )


class ScalingConfig(Section):
    """When there are more or fewer replicas, if serve.replicas are [least, most]."""

    latency_target_ms: PositiveFloat | None = Field(
        default=None, description="of 95 in 100 requests, in a replica; default: scale by requests in the replicas"
    )
    upscale_delay_s: Annotated[float, Field(ge=0.0)] = Field(
        default=5.0, description="seconds for which more must be wanted until they are started"
    )
    downscale_delay_s: Annotated[float, Field(ge=0.0)] = Field(
        default=300.0, description="seconds for which fewer must suffice until the others stop"
    )
