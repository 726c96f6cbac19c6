"""A task's metric of a compiled model, as results, reports and manifests keep it."""

from pydantic import BaseModel, ConfigDict, computed_field

from app.config.metrics import Mode

ACCURACY = "accuracy"


class Score(BaseModel):
    """The value of a metric."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    metric: str = ACCURACY
    value: float
    mode: Mode = "max"
    """Whether more or less of it is better."""

    @property
    def quality(self) -> float:
        """The value, negated if less of it is better."""
        return self.value if self.mode == "max" else -self.value

    def __str__(self) -> str:
        return f"{self.metric.replace('_', ' ')} {self.value:.4f}"


class Scored(BaseModel):
    """Something that may have a score. That of a classification can also be read as its ``accuracy``."""

    score: Score | None = None
    """The metric that the task's gate keeps. None: there is none, or the rows have no labels."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def accuracy(self) -> float | None:
        """The score, if it is an accuracy."""
        return self.score.value if self.score and self.score.metric == ACCURACY else None
