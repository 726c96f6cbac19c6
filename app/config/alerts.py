"""The recipe's alerts: rules over what training reports."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from app.config.alert_rules import (
    CLOCK_TIME,
    CLOCK_TIMES,
    METRIC,
    PERCENT,
    TIME,
    TIMES,
    Better,
    Condition,
    Duration,
    HasFallen,
    MetricRule,
    NotFinite,
    NotImproved,
    Rule,
    SilenceRule,
    Threshold,
    direction_of,
)
from app.config.section import Section


def _check_time(time: str) -> str:
    Duration.of(time)
    return time


def _check_share(percent: str) -> str:
    HasFallen.by(percent)
    return percent


def _check_actions(actions: list[str]) -> list[str]:
    if "pause" in actions and "stop" in actions:
        raise ValueError("pause and stop exclude each other: keep one")
    return actions


Act = Literal["notify", "pause", "stop"]
Time = Annotated[str, Field(pattern=f"^{TIME}$"), AfterValidator(_check_time)]
ClockTime = Annotated[str, Field(pattern=f"^{CLOCK_TIME}$"), AfterValidator(_check_time)]
Share = Annotated[str, Field(pattern=f"^{PERCENT}$"), AfterValidator(_check_share)]
_CONDITIONS = ("no_improvement_for", "above", "below", "not_finite", "fallen_by")
"""The keys that say something of a metric; an alert has one of them."""


def _require_one_rule(schema: dict[str, Any]) -> None:
    """Add to the JSON schema of an alert that it has exactly one rule."""
    of_metric = [{"required": ["metric", condition]} for condition in _CONDITIONS]
    schema["oneOf"] = [*of_metric, {"required": ["nothing_reported_for"]}]


class AlertConfig(Section):
    """A rule over what training reports, and what to do when it becomes true."""

    model_config = ConfigDict(serialize_by_alias=True, json_schema_extra=_require_one_rule)

    metric: Annotated[str, Field(pattern=f"^{METRIC}$")] | None = Field(
        default=None,
        description="a number in metrics.jsonl. It needs one of the next five keys",
        examples=["val_loss"],
    )
    no_improvement_for: Time | None = Field(
        default=None, description="for so long, no value was better than the best before", examples=["3 epochs"]
    )
    above: FiniteFloat | None = Field(default=None, description="the value is above this bound")
    below: FiniteFloat | None = Field(default=None, description="the value is below this bound")
    not_finite: Literal[True] | None = Field(default=None, description="the value is infinite or not a number")
    fallen_by: Share | None = Field(
        default=None, description="the value is by this share, or more, below its usual one", examples=["50 %"]
    )
    hold: Time | None = Field(
        default=None, alias="for", description=f"how long the condition must hold: {TIMES}; default: once is enough"
    )
    better: Better | None = Field(
        default=None,
        description="with no_improvement_for: which values are better; default: as the end of the metric's name tells",
    )
    nothing_reported_for: ClockTime | None = Field(
        default=None,
        description=f"no record of any kind came for so long: {CLOCK_TIMES}; without metric",
        examples=["10 min"],
    )
    do: Annotated[list[Act], Field(min_length=1), AfterValidator(_check_actions)] = Field(
        description="notify: tell the receivers under notify; pause: write a checkpoint and release the resources, "
        "to be resumed; stop: end the run. Each writes a line to the log"
    )

    @model_validator(mode="after")
    def _has_one_rule(self) -> Self:
        conditions = [key for key in _CONDITIONS if getattr(self, key) is not None]
        of_metric = ["metric"] * (self.metric is not None) + conditions
        if self.nothing_reported_for and of_metric:
            raise ValueError(f"nothing_reported_for is a whole rule: leave out {', '.join(of_metric)}")
        if not (self.nothing_reported_for or of_metric):
            raise ValueError(
                f"it has no rule: add metric and one of {', '.join(_CONDITIONS)}; or add nothing_reported_for"
            )
        if len(conditions) > 1:
            raise ValueError(f"{' and '.join(conditions)} are two rules: keep one, and write another alert")
        if conditions and self.metric is None:
            raise ValueError(f"{conditions[0]} needs the metric that it is about: add metric")
        if self.metric and not conditions:
            raise ValueError(f"metric {self.metric} has no condition: add one of {', '.join(_CONDITIONS)}")
        self._check_details()
        _ = self.rule  # raises ValueError if it is not known which values are better
        return self

    def _check_details(self) -> None:
        """Refuse ``for`` and ``better`` where they mean nothing. Raises ValueError."""
        if self.hold and (self.no_improvement_for or self.nothing_reported_for):
            raise ValueError("for goes with above, below, not_finite and fallen_by: other rules have their own time")
        if self.better and not self.no_improvement_for:
            raise ValueError("better goes with no_improvement_for alone: leave it out")

    @property
    def sentence(self) -> str:
        """The rule in words."""
        if self.metric is None:
            return f"nothing reported for {self.nothing_reported_for}"
        time = self.no_improvement_for or self.hold
        told = f"{self.metric} {self._condition(self.metric)}" + (f" for {time}" if time else "")
        return told + (f" ({self.better} is better)" if self.better else "")

    @property
    def rule(self) -> Rule:
        """The rule as typed values."""
        if self.metric is None:
            return SilenceRule(Duration.of(str(self.nothing_reported_for)).amount)
        time = self.no_improvement_for or self.hold
        return MetricRule(self.metric, self._condition(self.metric), Duration.of(time) if time else None)

    def _condition(self, metric: str) -> Condition:
        if self.above is not None:
            return Threshold("above", self.above)
        if self.below is not None:
            return Threshold("below", self.below)
        if self.fallen_by:
            return HasFallen.by(self.fallen_by)
        if self.no_improvement_for:
            return NotImproved(self.better or direction_of(metric))
        return NotFinite()

    @property
    def strongest(self) -> Act:
        """What it does to the run: stop, pause or, if neither, notify."""
        return "stop" if "stop" in self.do else "pause" if "pause" in self.do else "notify"

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Show only the keys that were used."""
        return {key: value for key, value in dump(self).items() if value is not None}
