"""What an alert asks of the training loop, and what it tells the receivers."""

import uuid
from datetime import UTC, datetime
from enum import IntEnum

from pydantic import BaseModel, ConfigDict, Field

from app.config.alerts import Act


class Action(IntEnum):
    """What the training loop must do; the stronger is the larger, so ``max`` joins two."""

    CONTINUE = 0
    PAUSE = 1
    STOP = 2


class Notification(BaseModel):
    """An alert that came true. As JSON, a value that is not finite is the text NaN, Infinity or -Infinity."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    id: str = Field(default_factory=lambda: uuid.uuid4().hex, description="the same in each try to deliver it")
    time: datetime = Field(default_factory=lambda: datetime.now(UTC), description="UTC, ISO 8601")
    run_id: str
    recipe: str
    rule: str = Field(description="the alert's rule as a sentence")
    action: Act = Field(description="what is done about it")
    metric: str | None = Field(description="null: nothing was reported")
    value: float | None = Field(description="the value with which the rule came true")
    step: int | None = Field(description="optimizer steps so far; null: none was reported")
    epoch: int | None = Field(description="the epoch, from 1; null: none was reported")

    @property
    def line(self) -> str:
        """The alert as one line for a person."""
        facts = [
            f"{self.metric} {self.value:g}" if self.value is not None else None,
            f"epoch {self.epoch}" if self.epoch is not None else None,
            f"step {self.step:,}" if self.step is not None else None,
        ]
        told = ", ".join(fact for fact in facts if fact)
        done = {"notify": "training goes on", "pause": "training pauses", "stop": "training stops"}[self.action]
        return f"alert: {self.rule} ({told}): {done}" if told else f"alert: {self.rule}: {done}"

    @property
    def title(self) -> str:
        """The alert as the subject of a message."""
        return f"[rayloom] {self.recipe}: {self.rule}"

    @property
    def text(self) -> str:
        """The alert as a message for a person."""
        return (
            f"{self.line}\n\nrun     {self.run_id}\nrecipe  {self.recipe}\n"
            f"time    {self.time.isoformat(timespec='seconds')}\n"
        )
