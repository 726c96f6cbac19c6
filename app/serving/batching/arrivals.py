"""How soon the next request comes while a slot of the engine is free, learnt from those before."""

_RECENT = 8
"""A gap that is so many gaps old weighs a third of the newest."""


class Arrivals:
    """The requests of one shape as they come in.

    Whoever was answered tends to ask again soon: after a call, as many requests are expected as it answered. The gap is
    the mean time from when a slot is free, or since then a request has come, until the next of the expected ones. It is
    measured whether the slot waits for it or not, so that it tells what waiting would have brought.
    """

    def __init__(self, longest_s: float) -> None:
        """Make it without knowledge.

        Args:
            longest_s: what a longer gap counts as, so that a pause is soon forgotten, and the first guess.
        """
        self.expected = 0
        self.gap_s = longest_s
        self.since_s: float | None = None
        """Since when the next expected request is awaited."""
        self._longest_s = longest_s

    def answered(self, requests: int) -> None:
        """A call answered so many requests."""
        self.expected = requests

    def slot_free(self, now_s: float) -> None:
        """The engine could run what waits: with the next expected request, or without it."""
        if self.expected and self.since_s is None:
            self.since_s = now_s

    def arrived(self, now_s: float) -> None:
        """A request came."""
        if self.expected:
            self.expected -= 1
        if self.since_s is not None:
            self.gap_s += (min(now_s - self.since_s, self._longest_s) - self.gap_s) / _RECENT
            self.since_s = None
