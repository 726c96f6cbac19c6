"""Asynchronous successive halving by promotion (Li et al. 2020, arXiv:1810.05934, algorithm 2).

Every trial trains to the first rung and waits there; the best of each rung go on to the next, from their checkpoints.
Ray Tune's ``ASHAScheduler`` decides at once instead: early trials, with nobody to compare with, train to their end.
"""

from collections.abc import Iterable, Mapping

from app.config import Mode


class Promotion:
    """Who waits at which rung, and who goes on. Trials are known by their number in the study."""

    def __init__(self, epochs: int, grace: int, factor: int, mode: Mode) -> None:
        """Rungs at ``grace`` x ``factor`` ^ k epochs, below ``epochs``; one in ``factor`` trials goes on from each."""
        self._rungs: list[int] = []
        rung = min(grace, epochs)
        while rung < epochs:
            self._rungs.append(rung)
            rung *= factor
        self._factor, self._sign = factor, 1.0 if mode == "min" else -1.0
        self._losses: list[dict[int, float]] = [{} for _ in self._rungs]
        self._promoted: list[set[int]] = [set() for _ in self._rungs]

    def goes_on(self, number: int, epoch: int, value: float) -> bool:
        """Whether a trial trains on after an epoch; at a rung it does if it is among the best there already."""
        if epoch not in self._rungs:
            return True
        rung = self._rungs.index(epoch)
        self._losses[rung][number] = self._sign * value
        if number in self._best(rung, at_least=0):
            self._promoted[rung].add(number)
        return number in self._promoted[rung]

    def promote(self, at_least: int = 0) -> int | None:
        """A waiting trial that goes on now, from the highest rung that has one.

        ``at_least`` 1: the best of each rung goes on even if there are too few trials for one to be promoted.
        """
        for rung in reversed(range(len(self._rungs))):
            for number in self._best(rung, at_least):
                if number not in self._promoted[rung]:
                    self._promoted[rung].add(number)
                    return number
        return None

    def drop(self, number: int) -> None:
        """The trial failed: it takes nobody's place."""
        for losses, promoted in zip(self._losses, self._promoted, strict=True):
            losses.pop(number, None)
            promoted.discard(number)

    def recall(self, number: int, by_epoch: Mapping[int, float], waits: bool) -> None:
        """A trial of the search that this one goes on with."""
        for rung, epoch in enumerate(self._rungs):
            if epoch in by_epoch:
                self._losses[rung][number] = self._sign * by_epoch[epoch]
                if not waits or max(by_epoch) > epoch:
                    self._promoted[rung].add(number)

    def _best(self, rung: int, at_least: int) -> Iterable[int]:
        losses = self._losses[rung]
        most = max(len(losses) // self._factor, at_least)
        return sorted(losses, key=lambda number: (losses[number], number))[:most]
