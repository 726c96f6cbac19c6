"""The limits of a served language model: its queue, its answers, and their priorities."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationPolicy:
    """The limits of a served language model in each replica.

    Raises:
        ValueError: a number is out of range. The message names it.
    """

    max_streams: int = 64
    """The maximum number of answers that are generated at a time. Others wait."""
    queue_tokens: int = 65_536
    """The maximum number of prompt and promised tokens that wait. Further requests are refused."""
    queue_limit: int = 256
    """The maximum number of waiting answers, however short they are. Further ones are refused."""
    max_tokens: int | None = None
    """The limit of an answer whose request sets none. None: up to the model's length."""
    priority_levels: int = 1
    """Level 1 is the most urgent. Less urgent requests start only after all more urgent ones."""
    default_priority: int = 1
    """The level of a request without a priority."""
    default_timeout_s: float | None = None
    """Limit on the time from arrival to the end of the answer. A request may ask for less, not for more."""

    def __post_init__(self) -> None:
        for name in ("max_streams", "queue_tokens", "queue_limit", "priority_levels"):
            if (given := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {given}: expected 1 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: expected 1 or more, or None")
        if not 1 <= self.default_priority <= self.priority_levels:
            raise ValueError(
                f"default_priority is {self.default_priority}: expected 1 to priority_levels, {self.priority_levels}"
            )
        if self.default_timeout_s is not None and not self.default_timeout_s > 0:
            raise ValueError(f"default_timeout_s is {self.default_timeout_s}: expected more than 0, or None")
