"""Where a plan runs: the library, its version, the GPU and the system."""

import platform
import sys

import torch
from pydantic import BaseModel, ConfigDict

_SYSTEM = f"{sys.platform}-{platform.machine()}"


class Record(BaseModel):
    """A value that is written into a plan's manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(Record):
    """What a plan depends on of the place where it runs; a plan may be for several ``architectures``."""

    engine: str
    engine_version: str
    architectures: tuple[str, ...]
    system: str = _SYSTEM

    def __str__(self) -> str:
        architectures = " or ".join(self.architectures) or "no GPU"
        return f"{self.engine} {self.engine_version} on {architectures}, {self.system}"

    def runs(self, plan: "Machine") -> bool:
        """Whether this machine, which has one GPU or none, runs a plan that was built for ``plan``."""
        return (
            bool(self.architectures)
            and set(self.architectures) <= set(plan.architectures)
            and (self.engine, self.engine_version, self.system) == (plan.engine, plan.engine_version, plan.system)
        )


def architectures_present() -> tuple[str, ...]:
    """The compute capability of this machine's GPU, such as SM89; nothing where there is none."""
    if not torch.cuda.is_available():
        return ()
    major, minor = torch.cuda.get_device_capability()
    return (f"SM{major}{minor}",)
