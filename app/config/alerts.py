"""The recipe's alerts: rules over what training reports, in keys or as a sentence."""

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

from app.config.alert_rules import DURATION, FORMS, METRIC, PERCENT, TIMES, Better, Rule, known_direction, parse_rule
from app.config.section import Section


def _check_sentence(sentence: str) -> str:
    parse_rule(sentence)
    return " ".join(sentence.split())


def _check_actions(actions: list[str]) -> list[str]:
    if "pause" in actions and "stop" in actions:
        raise ValueError("pause and stop exclude each other: keep one")
    return actions


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


Act = Literal["notify", "pause", "stop"]
Time = Annotated[str, Field(pattern=f"^{DURATION}$")]
_CONDITIONS = ("no_improvement_for", "above", "below", "not_finite", "fallen_by")
"""The keys that say something of a metric; an alert has one of them."""
_RULES = ("when", "metric", *_CONDITIONS, "nothing_reported_for")


def _require_one_rule(schema: dict[str, Any]) -> None:
    """Add to the JSON schema of an alert that it has exactly one rule."""
    of_metric = [{"required": ["metric", condition]} for condition in _CONDITIONS]
    schema["oneOf"] = [*of_metric, {"required": ["nothing_reported_for"]}, {"required": ["when"]}]


class AlertConfig(Section):
    """A rule over what training reports, in keys or as a sentence, and what to do when it becomes true."""

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
    fallen_by: Annotated[str, Field(pattern=f"^{PERCENT}$")] | None = Field(
        default=None, description="the value is by this share, or more, below its usual one", examples=["50 %"]
    )
    hold: Time | None = Field(
        default=None, alias="for", description=f"how long the condition must hold: {TIMES}; default: once is enough"
    )
    better: Better | None = Field(
        default=None,
        description="with no_improvement_for: which values are better; default: as the end of the metric's name tells",
    )
    nothing_reported_for: Time | None = Field(
        default=None, description="no record of any kind came for so long; without metric", examples=["10 min"]
    )
    when: Annotated[str, AfterValidator(_check_sentence)] | None = Field(
        default=None,
        description=f"the rule as a sentence, in place of the keys above. One of: {'; '.join(FORMS)}. D is {TIMES}",
        examples=["val_loss has not improved for 3 epochs", "loss is not finite", "nothing reported for 10 min"],
    )
    do: Annotated[list[Act], Field(min_length=1), AfterValidator(_check_actions)] = Field(
        description="notify: tell the receivers under notify; pause: write a checkpoint and release the resources, "
        "to be resumed; stop: end the run. Each writes a line to the log"
    )

    @model_validator(mode="after")
    def _has_one_rule(self) -> Self:
        given = [key for key in _RULES if getattr(self, key) is not None]
        conditions = [key for key in given if key in _CONDITIONS]
        if not given:
            raise ValueError(
                f"it has no rule: add metric and one of {', '.join(_CONDITIONS)}; or add nothing_reported_for"
            )
        if len(given) > 1 and (alone := {"when", "nothing_reported_for"} & {*given}):
            key = alone.pop() if len(alone) == 1 else "when"
            raise ValueError(f"{key} is a whole rule: leave out {', '.join(other for other in given if other != key)}")
        if len(conditions) > 1:
            raise ValueError(f"{' and '.join(conditions)} are two rules: keep one, and write another alert")
        if conditions and self.metric is None:
            raise ValueError(f"{conditions[0]} needs the metric that it is about: add metric")
        if self.metric and not conditions:
            raise ValueError(f"metric {self.metric} has no condition: add one of {', '.join(_CONDITIONS)}")
        self._check_details()
        _ = self.rule  # raises ValueError if a number makes no sense
        return self

    def _check_details(self) -> None:
        """Refuse ``for`` and ``better`` where they mean nothing. Raises ValueError."""
        if self.hold and (self.when or self.no_improvement_for or self.nothing_reported_for):
            raise ValueError("for goes with above, below, not_finite and fallen_by: other rules have their own time")
        if self.better and not self.no_improvement_for:
            raise ValueError("better goes with no_improvement_for alone: leave it out")
        if self.no_improvement_for and self.metric and not (self.better or known_direction(self.metric)):
            raise ValueError(
                f"whether {self.metric} should rise or fall is not known: add better, which is higher or lower"
            )

    @property
    def sentence(self) -> str:
        """The rule in words."""
        if self.when is not None:
            return self.when
        if self.nothing_reported_for:
            return f"nothing reported for {self.nothing_reported_for}"
        told = f"{self.metric} {self._condition}" + (f" for {self.hold}" if self.hold else "")
        return told + (f" ({self.better} is better)" if self.better else "")

    @property
    def _condition(self) -> str:
        if self.no_improvement_for:
            return f"has not improved for {self.no_improvement_for}"
        if self.above is not None:
            return f"above {_number(self.above)}"
        if self.below is not None:
            return f"below {_number(self.below)}"
        return "is not finite" if self.not_finite else f"has fallen by {self.fallen_by}"

    @property
    def rule(self) -> Rule:
        """The rule as typed values."""
        return parse_rule(self.sentence)

    @property
    def strongest(self) -> Act:
        """What it does to the run: stop, pause or, if neither, notify."""
        return "stop" if "stop" in self.do else "pause" if "pause" in self.do else "notify"

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Show only the keys that were used."""
        return {key: value for key, value in dump(self).items() if value is not None}
