"""The measurements of a language model's variants, in the result and the report of a compile run."""

from pydantic import BaseModel, computed_field

from app.compile.generation.timing import GenerationPoint
from app.compile.generation.variants import GenerationVariant
from app.compile.records import PublishedScore
from app.compile.variants import Skipped
from app.config import EngineName
from app.engines.architecture import Device
from app.repository.manifest import Generation, GreedyAgreement, Perplexity, ServingDefaults
from app.repository.score import Scored


class GenerationRecord(GenerationVariant, Scored):
    """A variant of a language model, compared with transformers and with its float32 form."""

    engine: EngineName = "openvino_genai"
    device: Device = "cpu"
    engine_version: str
    size_bytes: int
    weights: str
    """How its weights are kept."""
    greedy: GreedyAgreement
    perplexity: Perplexity | None = None
    """On the texts that variants are compared on; None without texts."""
    rise: str | None = None
    """The rise of its perplexity over float32's, with the upper end of its 95 % interval; None for float32."""
    max_difference: float
    scaled_difference: float
    cosine: float
    reasons: tuple[str, ...] = ()
    """A sentence for each failed gate."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether the variant passes every gate."""
        return not self.reasons

    def __str__(self) -> str:
        known = f"perplexity {self.perplexity.value:.3f}, " if self.perplexity else ""
        rise = f"rise {self.rise}, " if self.rise else ""
        refused = f" (refused: {'; '.join(self.reasons)})" if self.reasons else ""
        return (
            f"{self.engine} {self.title}: {known}{rise}greedy tokens equal in {self.greedy.equal_prompts} of "
            f"{self.greedy.prompts} prompts, {self.size_bytes / 1e6:.2f} MB ({self.weights}){refused}"
        )


class GenerationMetrics(BaseModel):
    """The measured and skipped variants of a language model, and the published one."""

    variants: list[GenerationRecord]
    skipped: list[Skipped]
    points: list[GenerationPoint]
    chosen: GenerationRecord
    point: GenerationPoint
    serving: ServingDefaults
    accuracy: PublishedScore | None
    """The perplexity that is published."""
    generation: Generation


class GenerationReport(BaseModel):
    """Everything that was measured of a language model, and the choice."""

    recipe: str
    machine: str
    threads: int
    documents: int
    variants: list[GenerationRecord]
    skipped: list[Skipped]
    points: list[GenerationPoint]
    chosen: GenerationRecord | None = None
    point: GenerationPoint | None = None
    serving: ServingDefaults | None = None
    accuracy: PublishedScore | None = None
    perplexity: Perplexity | None = None
    baseline_perplexity: Perplexity | None = None
    error: str | None = None
    """Why nothing was chosen."""
