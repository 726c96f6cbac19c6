"""How far the planner's step times were from published ones."""

from dataclasses import dataclass

from app.config.plan import PlanConfig
from app.planner.cluster import Device
from app.planner.enumeration import without_options


@dataclass(frozen=True)
class Validation:
    """Errors on the published runs of one kind of hardware that no constant was fitted on.

    ``python -m benchmarks.planning`` computes them, and a test compares.
    """

    runs: int
    median: float
    p90: float
    """Nine of ten runs lie within this share of the prediction."""


_KINDS = {"a100": Validation(162, 0.043, 0.102), "h100": Validation(56, 0.049, 0.161)}


def validation_of(device: Device, plan: PlanConfig | None = None) -> Validation | None:
    """Return the errors for the kind of ``device``; None where no published run shows any.

    No published row offloads or uses ZeRO++.
    """
    if plan and plan != without_options(plan):
        return None
    return next((found for kind, found in _KINDS.items() if device.name.startswith(kind)), None)
