"""Asynchronous successive halving by promotion (Li et al. 2020, arXiv:1810.05934, algorithm 2).

Every trial trains to the first rung and is paused there. The best ones of each rung are promoted to the next, and
resume from their checkpoints. Ray Tune's ``ASHAScheduler`` decides at once instead: its first trials have no others to
be compared with, and train to their end.
"""

from collections.abc import Iterable, Mapping

from app.config import Mode


class Promotion:
    """Decides which paused trials are promoted. Trials are identified by their number in the study."""

    def __init__(self, epochs: int, grace: int, factor: int, mode: Mode) -> None:
        """Set rungs at ``grace`` x ``factor`` ^ k epochs, below ``epochs``. Each promotes one in ``factor`` trials."""
        self._rungs: list[int] = []
        rung = min(grace, epochs)
        while rung < epochs:
            self._rungs.append(rung)
            rung *= factor
        self._factor, self._sign = factor, 1.0 if mode == "min" else -1.0
        self._losses: list[dict[int, float]] = [{} for _ in self._rungs]
        self._promoted: list[set[int]] = [set() for _ in self._rungs]

    def goes_on(self, number: int, epoch: int, value: float) -> bool:
        """Return whether a trial continues after an epoch. At a rung, it does if it is among the best there already."""
        if epoch not in self._rungs:
            return True
        rung = self._rungs.index(epoch)
        self._losses[rung][number] = self._sign * value
        # It would be promoted at once. So it trains on, instead of pausing and resuming.
        if number in self._best(rung, at_least=0):
            self._promoted[rung].add(number)
        return number in self._promoted[rung]

    def promote(self, at_least: int = 0) -> int | None:
        """Promote a paused trial, from the highest rung that has one, and return its number. None if there is none.

        With ``at_least`` 1, the best trial of each rung is promoted even if the rung has fewer than ``factor`` trials.
        """
        for rung in reversed(range(len(self._rungs))):
            for number in self._best(rung, at_least):
                if number not in self._promoted[rung]:
                    self._promoted[rung].add(number)
                    return number
        return None

    def drop(self, number: int) -> None:
        """Remove a failed trial, which must not take the place of another."""
        for losses, promoted in zip(self._losses, self._promoted, strict=True):
            losses.pop(number, None)
            promoted.discard(number)

    def recall(self, number: int, by_epoch: Mapping[int, float], is_paused: bool) -> None:
        """Add a trial of the resumed search, with its values by epoch. ``is_paused``: it is paused at its last rung."""
        for rung, epoch in enumerate(self._rungs):
            if epoch in by_epoch:
                self._losses[rung][number] = self._sign * by_epoch[epoch]
                # A trial that has trained beyond a rung was promoted from it.
                if not is_paused or max(by_epoch) > epoch:
                    self._promoted[rung].add(number)

    def _best(self, rung: int, at_least: int) -> Iterable[int]:
        losses = self._losses[rung]
        num_best = max(len(losses) // self._factor, at_least)
        return sorted(losses, key=lambda number: (losses[number], number))[:num_best]
