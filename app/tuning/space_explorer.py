"""Explore a search space before anything runs: find its keys, their distributions and their derived values."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from app.errors import RecipeError

_MAX_DRAWS = 1000


class Suggester(Protocol):
    """The argument of a space's function: Optuna's ``Trial``, or the explorer."""

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None, log: bool) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, *, step: int, log: bool) -> int: ...
    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


SpaceFunction = Callable[[Suggester], Mapping[str, Any]]
"""Draws the values of a trial, and returns the values derived from them."""


class SpaceExplorer:
    """Draws once with every combination of choices and of the low end, the middle and the high end of ranges.

    The draws form a tree, because the keys of a branch are only known once it is taken. Each call of the space's
    function follows one path through it. Of more than 1,000 combinations, as many are drawn at random, with a fixed
    seed.
    """

    def __init__(self, name: str, suggest: SpaceFunction) -> None:
        """Raise RecipeError if the space cannot be drawn from, or draws a key from two distributions."""
        self.distributions: dict[str, BaseDistribution] = {}
        """The distribution of each drawn key."""
        self.derived: dict[str, list[Any]] = {}
        """The values of each derived key."""
        self._name = name
        self._random = random.Random(0)
        self._explored: set[tuple[int, ...]] = set()
        """Prefixes of decisions (indices of values) below which every path was taken."""
        draws = 0
        while () not in self._explored and draws < _MAX_DRAWS:
            # For each decision, its index and the number of values.
            self._path: list[tuple[int, int]] = []
            self._drawn: dict[str, Any] = {}
            for key, value in suggest(self).items():
                self._record_derived(key, value)
            self._mark_explored()
            draws += 1

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return one of three values of the range."""
        distribution = self._range(name, low, high, lambda: FloatDistribution(low, high, log=log, step=step))
        return float(self._decide(name, distribution))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return one of three values of the range."""
        distribution = self._range(name, low, high, lambda: IntDistribution(low, high, log=log, step=step))
        return int(self._decide(name, distribution))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of the choices."""
        if not choices:
            raise RecipeError(f"tune.space {self._name!r}: {name} has no choices: give one at least").of(
                "space.no_choices", "tune.space"
            )
        for choice in choices:
            if not isinstance(choice, None | bool | int | float | str):
                raise RecipeError(
                    f"tune.space {self._name!r}: {name} has the choice {choice!r}: a study stores numbers, texts "
                    "and null; return other values as derived ones, in a dictionary"
                ).of("space.choice_type", "tune.space")
        return self._decide(name, CategoricalDistribution(choices))

    def _range(self, name: str, low: float, high: float, make: Callable[[], BaseDistribution]) -> BaseDistribution:
        if low > high:
            raise RecipeError(f"tune.space {self._name!r}: {name} has the range {low} to {high}, which is reversed").of(
                "space.range", "tune.space"
            )
        try:
            return make()
        except ValueError as error:
            raise RecipeError(f"tune.space {self._name!r}: {name}, range {low} to {high}: {error}").of(
                "space.range", "tune.space"
            ) from error

    def _decide(self, name: str, distribution: BaseDistribution) -> Any:
        """Return a value below which not every path was taken. A key that is drawn twice keeps its value."""
        require_same_distribution(self._name, name, self.distributions.setdefault(name, distribution), distribution)
        if name not in self._drawn:
            values, prefix = _representatives(distribution), self._decisions
            indices = range(len(values))
            unexplored = [index for index in indices if (*prefix, index) not in self._explored]
            # All of them are explored only if the space is not deterministic.
            index = self._random.choice(unexplored or indices)
            self._path.append((index, len(values)))
            self._drawn[name] = values[index]
        return self._drawn[name]

    @property
    def _decisions(self) -> tuple[int, ...]:
        return tuple(index for index, _ in self._path)

    def _mark_explored(self) -> None:
        """Mark the path as explored, and each of its prefixes all of whose continuations are."""
        self._explored.add(self._decisions)
        while self._path:
            _, num_values = self._path.pop()
            prefix = self._decisions
            if any((*prefix, index) not in self._explored for index in range(num_values)):
                return
            self._explored.add(prefix)

    def _record_derived(self, key: str, value: Any) -> None:
        values = self.derived.setdefault(key, [])
        if value not in values:
            values.append(value)


def require_same_distribution(space: str, key: str, known: BaseDistribution, given: BaseDistribution) -> None:
    """Raise RecipeError if a key has another distribution than before. Samplers know one distribution per key."""
    if known != given:
        raise RecipeError(
            f"tune.space {space!r} draws {key} from {known}, and elsewhere from {given}: draw it from the same "
            "everywhere, such as a range that holds both"
        ).of("space.differs", "tune.space")


def _representatives(distribution: BaseDistribution) -> list[Any]:
    """Return all choices, or the low end, the middle and the high end of a range."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    if step:
        middle = low + round((high - low) / step / 2) * step
    else:
        middle = math.sqrt(low * high) if distribution.log else (low + high) / 2
    return list(dict.fromkeys((low, middle, high)))
