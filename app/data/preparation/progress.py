"""What a preparation says while it works."""

from collections.abc import Callable, Collection, Mapping

from app.pages.words import duration

_INTERVAL_S = 10.0


class UnitProgress:
    """Prints how many units are done, and the time that is left, at most every ten seconds. A quick unit is silent."""

    def __init__(self, what: str, sizes: Mapping[int, int], done: Collection[int], clock: Callable[[], float]) -> None:
        """``sizes`` maps the numbers of units to bytes. ``done`` has the numbers that an earlier attempt finished."""
        self._what, self._sizes, self._clock = what, sizes, clock
        self._done = set(done)
        self._done_before = sum(sizes[number] for number in self._done)
        self._started = self._last = clock()
        if self._done:
            print(f"{what}: goes on after {len(self._done)} of {len(sizes)} parts", flush=True)

    def add(self, number: int) -> None:
        """Count a unit that is done."""
        self._done.add(number)
        now = self._clock()
        is_last = len(self._done) == len(self._sizes) and len(self._sizes) > 1
        if now - self._last < _INTERVAL_S and not is_last:
            return
        self._last = now
        total = sum(self._sizes.values())
        done = sum(self._sizes[number] for number in self._done)
        rate = (done - self._done_before) / max(now - self._started, 1e-9)
        left = f", about {duration((total - done) / rate)} left" if rate and done < total else ""
        print(
            f"{self._what}: {len(self._done)} of {len(self._sizes)} parts, {done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            f"{left}",
            flush=True,
        )
