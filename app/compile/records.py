"""The records of variants and TensorRT plans, in the result and the report of a compile run."""

from typing import Literal

from pydantic import BaseModel, computed_field

from app.compile.parity import Parity
from app.compile.variants import BUILT_AHEAD, Variant
from app.config import ComputePrecision
from app.repository.manifest import Quantization, Split
from app.repository.score import Scored
from app.telemetry.judgement import Judgement


class PublishedScore(Scored):
    """Score of the published variant, on the test split if there is one, else on the rows it was compared on."""

    split: Split
    rows: int
    what: Literal["rows", "documents"] = "rows"
    judgement: Judgement | None = None
    """None: the score has no baseline."""

    def __str__(self) -> str:
        known = f"{self.score.metric}: {self.score.value:.4f}".replace("_", " ") if self.score else "score: not known"
        return f"{known} on the {self.rows:,} {self.what} of the {self.split} split"


class BuiltPlan(BaseModel):
    """A TensorRT plan that was built for other machines. It cannot run here, so it was not evaluated."""

    precision: ComputePrecision
    targets: list[str]

    def __str__(self) -> str:
        return f"{BUILT_AHEAD} {self.precision}: a plan was built for {', '.join(self.targets)}"


class VariantRecord(Variant, Parity):
    """A variant, compared with PyTorch and timed on this machine."""

    engine_version: str
    size_bytes: int
    reasons: tuple[str, ...]
    """A sentence for each failed gate."""

    quantization: Quantization | None
    latency_ms: dict[int, float]
    """Median time of a call by batch size, with all cores for one batch."""

    throughput: dict[int, float]
    """Rows per second by batch size, with all cores for one batch."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether the variant passes every gate."""
        return not self.reasons

    @property
    def variant(self) -> Variant:
        """The variant itself, without its measurements."""
        return Variant.model_validate(self.model_dump(include=set(Variant.model_fields)))

    @property
    def publishable(self) -> bool:
        """Whether the variant may be published."""
        return self.passed and not self.baseline

    def __str__(self) -> str:
        latency = ", ".join(f"{value:.2f} ms at batch {batch}" for batch, value in self.latency_ms.items())
        known = f"{self.score}, " if self.score else ""
        baseline = " (baseline)" if self.baseline else ""
        refused = f" (refused: {'; '.join(self.reasons)})" if self.reasons else ""
        return f"{self.variant}: {known}largest difference {self.max_difference:.1e}, {latency}{baseline}{refused}"
