"""A look at a search space before anything is run: which keys it gives a value, and what it draws them from."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from app.errors import RecipeError

_MOST_DRAWS = 1000


class Suggests(Protocol):
    """What a space asks for values: Optuna's ``Trial``, or something that looks at the space."""

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None, log: bool) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, *, step: int, log: bool) -> int: ...
    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


Suggest = Callable[[Suggests], Mapping[str, Any]]
"""Draws the values of a trial, and returns those that the space derives from them."""


class Walk:
    """Draws once with every combination of choices and of the low end, the middle and the high end of ranges.

    Of more combinations than a thousand it takes so many at random, the same ones each time.
    """

    def __init__(self, name: str, suggest: Suggest) -> None:
        """Raises RecipeError: the space cannot be drawn from, or draws a key from two distributions."""
        self.distributions: dict[str, BaseDistribution] = {}
        """Of every key that is drawn."""
        self.derived: dict[str, list[Any]] = {}
        """The values of every key that is derived."""
        self._name = name
        self._random = random.Random(0)
        self._walked: set[tuple[int, ...]] = set()
        """The decisions, as indices, after which every way to go on was taken."""
        draws = 0
        while () not in self._walked and draws < _MOST_DRAWS:
            self._path: list[tuple[int, int]] = []
            self._drawn: dict[str, Any] = {}
            for key, value in suggest(self).items():
                self._note(key, value)
            self._leave()
            draws += 1

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """One of three values of the range."""
        distribution = self._range(name, low, high, lambda: FloatDistribution(low, high, log=log, step=step))
        return float(self._decide(name, distribution))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """One of three values of the range."""
        distribution = self._range(name, low, high, lambda: IntDistribution(low, high, log=log, step=step))
        return int(self._decide(name, distribution))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of the choices."""
        if not choices:
            raise RecipeError(f"tune.space {self._name!r}: {name} has no choices: give one at least")
        for choice in choices:
            if not isinstance(choice, None | bool | int | float | str):
                raise RecipeError(
                    f"tune.space {self._name!r}: {name} has the choice {choice!r}: a study keeps numbers, texts and "
                    "null; return what follows from them in a dictionary"
                )
        return self._decide(name, CategoricalDistribution(choices))

    def _range(self, name: str, low: float, high: float, make: Callable[[], BaseDistribution]) -> BaseDistribution:
        if low > high:
            raise RecipeError(f"tune.space {self._name!r}: {name} has the range {low} to {high}, which is reversed")
        try:
            return make()
        except ValueError as error:
            raise RecipeError(f"tune.space {self._name!r}: {name}, range {low} to {high}: {error}") from error

    def _decide(self, name: str, distribution: BaseDistribution) -> Any:
        """A value after which not every way to go on was taken; a key that is drawn again keeps its value."""
        require_one(self._name, name, self.distributions.setdefault(name, distribution), distribution)
        if name not in self._drawn:
            values, before = _values(distribution), self._decisions
            ways = range(len(values))
            left = [each for each in ways if (*before, each) not in self._walked]
            index = self._random.choice(left or ways)  # none is left only if the space draws otherwise every time
            self._path.append((index, len(values)))
            self._drawn[name] = values[index]
        return self._drawn[name]

    @property
    def _decisions(self) -> tuple[int, ...]:
        return tuple(index for index, _ in self._path)

    def _leave(self) -> None:
        """The path was taken; and where it was the last one of several, so was all before them."""
        self._walked.add(self._decisions)
        while self._path:
            _, ways = self._path.pop()
            before = self._decisions
            if any((*before, each) not in self._walked for each in range(ways)):
                return
            self._walked.add(before)

    def _note(self, key: str, value: Any) -> None:
        values = self.derived.setdefault(key, [])
        if value not in values:
            values.append(value)


def require_one(space: str, key: str, known: BaseDistribution, given: BaseDistribution) -> None:
    """Raises RecipeError if a key is drawn from something else than before: who proposes values knows one range."""
    if known != given:
        raise RecipeError(
            f"tune.space {space!r} draws {key} from {known}, and elsewhere from {given}: draw it from the same "
            "everywhere, such as a range that holds both"
        )


def _values(distribution: BaseDistribution) -> list[Any]:
    """Every choice; of a range the low end, the middle and the high end."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    if step:
        middle = low + round((high - low) / step / 2) * step
    else:
        middle = math.sqrt(low * high) if distribution.log else (low + high) / 2
    return list(dict.fromkeys((low, middle, high)))
