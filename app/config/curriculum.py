"""The recipe's ``train.curriculum``: easy samples before hard ones."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from app.config.section import Section, VersionReference
from app.errors import RecipeError


class CurriculumConfig(Section):
    """Easy samples before hard ones (Bengio et al. 2009), by competence (Platanios et al. 2019, arXiv:1903.09848)."""

    by: Literal["length", "column", "loss"] = Field(
        default="length", description="what makes a sample hard: characters or tokens, a column, or a model's loss"
    )
    column: str | None = Field(
        default=None, description="for by: column, with texts in a table: column of numbers; larger is harder"
    )
    model: VersionReference | None = Field(
        default=None,
        description="for by: loss, with samples of one label: published classifier, NAME for its production version or "
        "NAME/VERSION; a larger loss is harder",
    )
    start: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.2, description="share of the samples, the easiest ones, that the first batches are drawn from"
    )
    epochs: Annotated[float, Field(gt=0.0)] = Field(
        default=1.0, description="epochs until batches are drawn from all samples; may be a fraction"
    )
    schedule: Literal["linear", "sqrt"] = Field(
        default="sqrt", description="how the share grows; sqrt: fast at first, because later samples are harder"
    )

    def competence(self, epochs_done: float) -> float:
        """Return the share of the samples that are drawn from after so many epochs."""
        progress, power = min(1.0, epochs_done / self.epochs), 1 if self.schedule == "linear" else 2
        share: float = (self.start**power + (1.0 - self.start**power) * progress) ** (1.0 / power)
        return min(1.0, share)

    @model_validator(mode="after")
    def _difficulty_has_its_key(self) -> Self:
        for kind, key, value in (("column", "column", self.column), ("loss", "model", self.model)):
            if self.by == kind and value is None:
                raise RecipeError(f"by is {kind}: set {key}, too").of("recipe.missing")
            if self.by != kind and value is not None:
                raise RecipeError(
                    f"{key} is {value!r}, which by {self.by} does not read: leave it out or set by to {kind}"
                ).of("keys.contradict")
        return self
