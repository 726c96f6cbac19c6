"""The judgement of a model: its score, baselines, and a verdict in one sentence."""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

from app.config.metrics import Mode
from app.pages.content import Mood

Finding = Literal["leak", "chance", "linear", "overfit", "noise"]

_MAX_LOST = 1 / 3
"""Share of the gain on training rows that a sound model may lose on other rows."""


class Baseline(BaseModel):
    """The score of a constant answer or a simpler model, on the same rows."""

    name: str
    """Such as ``the majority class`` or ``the linear baseline``."""
    value: float
    margin: float = 0.0
    """How much better it may be on the whole split. 0: it was measured on all rows."""

    def __str__(self) -> str:
        return f"{self.name} {shortened(self.value)}"


class Judgement(BaseModel):
    """The score of a model on one split, and the evidence for it."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    metric: str
    mode: Mode
    split: str
    rows: int
    value: float
    low: float
    """The 95 % interval of the score, for other rows of the same kind. NaN: it is unknown."""
    high: float
    trivial: Baseline | None = None
    """The best constant answer. None: the task has none."""
    linear: Baseline | None = None
    """None: it was not fitted."""
    trained: float | None = None
    """The score on training rows."""
    leaks: list[str] = []
    """Reasons not to trust the score, a clause each."""
    compares_ratios: bool = False
    """Whether two scores are compared by their ratio, such as perplexities, and not by their difference."""
    noise: float = 0.0
    """Share of the rows whose label is likely wrong, if that explains most errors."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def findings(self) -> list[Finding]:
        """The problems of the model or its data, the worst first. Empty: none was found."""
        if self.leaks:
            return ["leak"]
        if not self.has_interval:
            return []
        if not self.is_above(self.trivial):
            return ["chance"]
        found: dict[Finding, bool] = {
            "linear": not self.is_above(self.linear),
            "overfit": self._is_overfitted,
            "noise": self.noise > 0.0,
        }
        return [name for name, holds in found.items() if holds]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """One sentence: the score, what is wrong, and what to do."""
        baselines = [str(baseline) for baseline in (self.trivial, self.linear) if baseline]
        if clauses := "; ".join(map(self._clause, self.findings)):
            beside = ", ".join(baseline for baseline in baselines if baseline not in clauses)
            return f"{self}{f' ({beside})' if beside else ''}, {clauses}"
        if not self.has_interval:
            return f"{self}, on too few rows to compare it with {' and '.join(baselines) or 'a baseline'}"
        return f"{self}, better than {' and '.join(baselines)}" if baselines else f"{self}, and no baseline is known"

    @property
    def basis(self) -> str:
        """The rows and the interval of the score, in words."""
        if not self.has_interval:
            return f"On {self.rows:,} {self.split} rows, too few for an interval."
        interval = f"{self.low:.4g} to {self.high:.4g}"
        return f"On {self.rows:,} {self.split} rows. The 95 % interval for other such rows is {interval}."

    @property
    def mood(self) -> Mood:
        """The colour of the verdict on a page."""
        return "bad" if self.is_void else "busy" if self.findings or not self.has_interval else "good"

    @property
    def has_interval(self) -> bool:
        """Whether there were enough rows for an interval."""
        return not math.isnan(self.high - self.low)

    @property
    def is_void(self) -> bool:
        """Whether the score shows no learning, or cannot be trusted."""
        return bool({"leak", "chance"} & set(self.findings))

    def __str__(self) -> str:
        if not self.has_interval:
            return f"{self.metric.replace('_', ' ')} {shortened(self.value)}"
        margin = max(self.high - self.value, self.value - self.low)
        return f"{self.metric.replace('_', ' ')} {shortened(self.value)} ± {shortened(margin)}"

    @property
    def is_above_baselines(self) -> bool:
        """Whether the whole interval is better than every baseline, and no leak was found."""
        has_none = {"leak", "chance", "linear"}.isdisjoint(self.findings)
        return self.trivial is not None and self.has_interval and has_none

    @property
    def shortfall(self) -> str:
        """Why the score is not known to beat every baseline. Empty: it is."""
        if self.is_above_baselines:
            return ""
        lacks_constant = self.trivial is None and self.linear and self.has_interval and not self.findings
        return f"{self.verdict}{', but no constant baseline is known, which this gate needs' if lacks_constant else ''}"

    def is_above(self, baseline: Baseline | None) -> bool:
        """Return whether the whole interval is better than a baseline, or there is none."""
        if baseline is None:
            return True
        if self.mode == "max":
            return self.low > baseline.value + baseline.margin
        return self.high < baseline.value - baseline.margin

    @property
    def _is_perfect(self) -> bool:
        """Whether every row is right. The best of all scores that rise is 1, and of all that fall 0."""
        return self.value == (1.0 if self.mode == "max" else 0.0)

    @property
    def _is_overfitted(self) -> bool:
        if self.trained is None or self.trivial is None or self.low <= self.trained <= self.high:
            return False
        sign = 1.0 if self.mode == "max" else -1.0
        trained, trivial, value = map(self._scaled, (self.trained, self.trivial.value, self.value))
        gained, lost = sign * (trained - trivial), sign * (trained - value)
        return gained > 0.0 and lost > _MAX_LOST * gained

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.compares_ratios and 0.0 < value < math.inf else value

    def _clause(self, finding: Finding) -> str:
        match finding:
            case "leak":
                return f"not to be trusted, because {' and '.join(self.leaks)} (leak): remove that, and train again"
            case "chance":
                return f"not significantly better than {self.trivial}: check the data, use more of it or another model"
            case "linear":
                remedy = (
                    "no model can do better on these rows" if self._is_perfect else "use more data or another model"
                )
                return f"not significantly better than {self.linear}: {remedy}"
            case "overfit":
                return (
                    f"overfitted, because it reaches {shortened(self.trained or 0.0)} on training rows: use more data, "
                    "a smaller model, or more regularization"
                )
            case "noise":
                return (
                    f"held down by noise in the labels, of which about {self.noise:.0%} look wrong: read the worst "
                    "samples, and correct their labels"
                )


def shortened(value: float) -> str:
    """Return a score with three decimals, or three digits if it is large."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
