"""What the result and the report of a compile run hold of each variant, and of plans."""

from typing import Literal

from pydantic import BaseModel, computed_field

from app.compile.parity import Parity
from app.compile.variants import BUILT_AHEAD, Variant
from app.config import ComputePrecision
from app.repository.manifest import Quantization


class PublishedAccuracy(BaseModel):
    """Accuracy of the published variant, on the test split if there is one, else on the validation split."""

    split: Literal["test", "validation"]
    rows: int
    accuracy: float

    def __str__(self) -> str:
        return f"{self.accuracy:.4f} on the {self.rows:,} rows of the {self.split} split"


class BuiltPlan(BaseModel):
    """A plan that was built ahead of time for other machines. It cannot run here, so it was not evaluated."""

    precision: ComputePrecision
    targets: list[str]

    def __str__(self) -> str:
        return f"{BUILT_AHEAD} {self.precision}: a plan was built for {', '.join(self.targets)}"


class VariantRecord(Variant, Parity):
    """A variant, compared with PyTorch and timed on this machine."""

    engine_version: str
    size_bytes: int
    reasons: tuple[str, ...]
    """The gates that do not hold."""

    quantization: Quantization | None
    latency_ms: dict[int, float]
    """Of a call, by batch size: the median with all cores for one batch."""

    throughput: dict[int, float]
    """Rows a second, likewise."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether every gate holds."""
        return not self.reasons

    @property
    def variant(self) -> Variant:
        """What it is the record of."""
        return Variant.model_validate(self.model_dump(include=set(Variant.model_fields)))

    @property
    def publishable(self) -> bool:
        """Whether it may become a version."""
        return self.passed and not self.baseline

    def __str__(self) -> str:
        latency = ", ".join(f"{value:.2f} ms at batch {batch}" for batch, value in self.latency_ms.items())
        baseline = " (to compare with)" if self.baseline else ""
        refused = f" (refused: {'; '.join(self.reasons)})" if self.reasons else ""
        return (
            f"{self.variant}: accuracy {self.accuracy:.4f}, largest difference {self.max_difference:.1e}, "
            f"{latency}{baseline}{refused}"
        )
