"""The notification that an alert sends to the receivers."""

import uuid
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field

from app.config.alerts import Act


class Notification(BaseModel):
    """An alert that has fired. In JSON, a value that is not finite is the text NaN, Infinity or -Infinity."""

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
        """One line for a person."""
        facts = [
            f"{self.metric} {self.value:g}" if self.value is not None else None,
            f"epoch {self.epoch}" if self.epoch is not None else None,
            f"step {self.step:,}" if self.step is not None else None,
        ]
        details = ", ".join(fact for fact in facts if fact)
        done = {"notify": "training goes on", "pause": "training pauses", "stop": "training stops"}[self.action]
        return f"alert: {self.rule} ({details}): {done}" if details else f"alert: {self.rule}: {done}"

    @property
    def title(self) -> str:
        """Subject of a message."""
        return f"[rayloom] {self.recipe}: {self.rule}"

    @property
    def text(self) -> str:
        """Body of a message for a person."""
        return (
            f"{self.line}\n\nrun     {self.run_id}\nrecipe  {self.recipe}\n"
            f"time    {self.time.isoformat(timespec='seconds')}\n"
        )
