"""The settings of batching."""

import math
from dataclasses import dataclass

from app.tensors import Tensors


@dataclass(frozen=True)
class RowsByLength:
    """The maximum rows of a call, by their length."""

    input: str
    axis: int
    """The size of ``input`` along this axis is the length."""
    sizes: tuple[tuple[int, int], ...]
    """Pairs of a length and its maximum rows, shortest length first."""

    def max_rows(self, length: int) -> int:
        """Return the maximum rows of a call.

        A length that is not listed counts as the next longer one. Beyond the longest, it counts as the longest.
        """
        return next((rows for longest, rows in self.sizes if length <= longest), self.sizes[-1][1])


@dataclass(frozen=True)
class BatchingPolicy:
    """The policy for combining waiting requests into calls, with the settings of Triton's dynamic batcher.

    Raises:
        ValueError: a number is out of its range; it is named.
    """

    max_batch_size: int
    """The maximum rows of a call."""
    preferred_batch_sizes: tuple[int, ...] = ()
    """Numbers of rows at which a call does not wait for more. Rows beyond the largest are left for the next call."""
    max_queue_delay_s: float = 0.0
    """The maximum time that a free engine holds a request back for others to share its call."""
    priority_levels: int = 1
    """Level 1 is the most urgent. Less urgent requests run only with or after all more urgent ones."""
    default_priority: int = 1
    """The level of a request without a priority."""
    queue_limit: int = 256
    """The maximum number of waiting requests. Further ones are refused."""
    default_timeout_s: float | None = None
    """Limit on the time from arrival to answer. A request may ask for less, not for more. None: no limit."""
    by_length: RowsByLength | None = None
    """The maximum rows of a call at each length. None: ``max_batch_size`` at every length."""

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "priority_levels", "queue_limit"):
            if (given := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {given}: expected 1 or more")
        if not all(1 <= size <= self.max_batch_size for size in self.preferred_batch_sizes):
            raise ValueError(
                f"preferred_batch_sizes are {list(self.preferred_batch_sizes)}: expected 1 to max_batch_size, "
                f"{self.max_batch_size}"
            )
        if self.by_length and not all(1 <= rows <= self.max_batch_size for _, rows in self.by_length.sizes):
            raise ValueError(
                f"rows in by_length are {dict(self.by_length.sizes)}: expected 1 to max_batch_size, "
                f"{self.max_batch_size}"
            )
        if not 1 <= self.default_priority <= self.priority_levels:
            raise ValueError(
                f"default_priority is {self.default_priority}: expected 1 to priority_levels, {self.priority_levels}"
            )
        if not 0 <= self.max_queue_delay_s < math.inf:
            raise ValueError(f"max_queue_delay_s is {self.max_queue_delay_s}: expected 0 or more")
        if self.default_timeout_s is not None and not self.default_timeout_s > 0:
            raise ValueError(f"default_timeout_s is {self.default_timeout_s}: expected more than 0, or None")

    def max_rows(self, tensors: Tensors) -> int:
        """Return the maximum rows of a call for requests with the shape of these tensors."""
        if self.by_length is None:
            return self.max_batch_size
        return self.by_length.max_rows(tensors[self.by_length.input].shape[self.by_length.axis])

    @property
    def full_batches(self) -> tuple[tuple[int | None, int], ...]:
        """Pairs of a length and the rows of a full call; None stands for the longest length."""
        if self.by_length is None:
            return ((None, self.max_batch_size),)
        *shorter, (_, rows) = self.by_length.sizes
        return (*shorter, (None, rows))

    def level(self, priority: int) -> int:
        """Return the level of a request: the default for 0 and for unknown levels, as in Triton."""
        return priority if 1 <= priority <= self.priority_levels else self.default_priority

    def deadline_s(self, arrived_s: float, timeout_s: float | None) -> float:
        """Return the deadline of a request: the earlier of its own and the server's; inf without either."""
        timeouts = [timeout for timeout in (timeout_s, self.default_timeout_s) if timeout is not None]
        return arrived_s + min(timeouts, default=math.inf)
