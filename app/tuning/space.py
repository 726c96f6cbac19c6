"""Search spaces: which keys of the recipe are searched, and over what."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

from app.config import Recipe, with_values
from app.errors import RecipeError
from app.import_string import import_attribute
from app.suggestions import did_you_mean
from app.tuning.distributions import from_tune, is_domain
from app.tuning.storage import DATABASE_ERRORS

Value = Any
"""Of a key: None, a bool, a number or a text."""

_FOREIGN = ("tune", "compile", "serve", "alerts", "notify", "name", "task", "storage", "train.resume")
"""What a trial does not depend on."""
_RESERVED = ("train.workers", "train.device", "train.cpus_per_worker")
"""What Ray reserves for a trial: the same for all."""
_DEGREES = ("train.plan.tensor", "train.plan.pipeline")
"""What a trial needs workers for."""
_MOST_BRANCHES = 200


class Suggests(Protocol):
    """What a space asks for values: Optuna's ``Trial``, or something that looks at the space."""

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None, log: bool) -> float: ...
    def suggest_int(self, name: str, low: int, high: int, *, step: int, log: bool) -> int: ...
    def suggest_categorical(self, name: str, choices: Sequence[Value]) -> Value: ...


Suggest = Callable[[Suggests], Mapping[str, Value]]


@dataclass(frozen=True)
class Space:
    """A search space that has been looked at: every key in it is one of the recipe's."""

    name: str
    """Its import string."""
    suggest: Suggest
    """Draws the values of a trial, and returns those that the space derives from them. Raises RecipeError."""
    distributions: dict[str, BaseDistribution]
    """Of every key, in all branches."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """Each key's distribution as text: equal spaces have equal ones."""
        return {key: distribution_to_json(each) for key, each in sorted(self.distributions.items())}

    def contains(self, values: Mapping[str, Value]) -> bool:
        """Whether the space could have drawn each of ``values``."""
        return all(key in self.distributions and _contains(self.distributions[key], values[key]) for key in values)

    def own_values(self, recipe: Recipe) -> dict[str, Value]:
        """The recipe's own values of the keys, where the space could have drawn them."""
        tree = recipe.model_dump(mode="json")
        values = {key: _value(tree, key) for key in self.distributions}
        return {key: value for key, value in values.items() if _contains(self.distributions[key], value)}


def load_space(name: str, recipe: Recipe) -> Space:
    """The space that an import string names, checked against the recipe.

    Every branch that a choice leads to is walked once, and the ends of every range are tried on the recipe.

    Raises:
        RecipeError: no such space, a key that the recipe lacks, an empty or reversed range, or one that the recipe
            refuses.
    """
    suggest = _suggest_from(name, import_attribute(name))
    explorer = _Explorer(name, suggest)
    explorer.walk()
    if not explorer.distributions:
        raise RecipeError(f"tune.space {name!r} draws nothing: let it suggest a value for at least one key")
    _check_keys(name, explorer.keys, recipe)
    for key, distribution in explorer.distributions.items():
        _check_values(name, key, distribution, recipe)
    return Space(name, suggest, explorer.distributions)


def _suggest_from(name: str, given: object) -> Suggest:
    if isinstance(given, Mapping):
        return _suggest_from_domains(name, given)
    if callable(given):
        return _suggest_from_function(name, given)
    raise RecipeError(
        f"tune.space {name!r} is a {type(given).__name__}: expected a function space(trial), or a dictionary of "
        "Ray Tune's domains"
    )


def _suggest_from_function(name: str, function: Callable[[Suggests], object]) -> Suggest:
    """A user's function: whatever goes wrong in it becomes a sentence, and what goes wrong in the study stays."""

    def suggest(trial: Suggests) -> Mapping[str, Value]:
        try:
            derived = function(trial) or {}
        except (RecipeError, *DATABASE_ERRORS):
            raise
        except Exception as error:  # a user's function may fail in any way
            raise RecipeError(f"tune.space {name!r} fails: {type(error).__name__}: {error}") from error
        if not isinstance(derived, Mapping):
            raise RecipeError(
                f"tune.space {name!r} returns {derived!r}: expected nothing, or a dictionary of the values that follow "
                "from those drawn"
            )
        return derived

    return suggest


def _suggest_from_domains(name: str, domains: Mapping[str, Any]) -> Suggest:
    """A space of Ray Tune's: its domains are drawn, its constants are derived."""
    constants = {key: value for key, value in domains.items() if not is_domain(value)}
    try:
        drawn = {key: from_tune(value) for key, value in domains.items() if is_domain(value)}
    except ValueError as error:
        raise RecipeError(f"tune.space {name!r}: {error}") from error

    def suggest(trial: Suggests) -> Mapping[str, Value]:
        for key, distribution in drawn.items():
            _draw(trial, key, distribution)
        return constants

    return suggest


def _draw(trial: Suggests, key: str, distribution: BaseDistribution) -> Value:
    match distribution:
        case FloatDistribution():
            return trial.suggest_float(
                key, distribution.low, distribution.high, step=distribution.step, log=distribution.log
            )
        case IntDistribution():
            return trial.suggest_int(
                key, distribution.low, distribution.high, step=distribution.step, log=distribution.log
            )
        case CategoricalDistribution():
            return trial.suggest_categorical(key, distribution.choices)
    raise AssertionError(f"unknown distribution {distribution}")


class _Explorer:
    """Runs a space once for every branch: each choice in turn, the others as they come first."""

    def __init__(self, name: str, suggest: Suggest) -> None:
        self.distributions: dict[str, BaseDistribution] = {}
        self.keys: list[str] = []
        self._name, self._suggest = name, suggest
        self._forced: dict[str, Value] = {}
        self._ahead: list[dict[str, Value]] = [{}]

    def walk(self) -> None:
        """Fill ``distributions``, and ``keys`` with all that is drawn or derived."""
        for _ in range(_MOST_BRANCHES):
            if not self._ahead:
                return
            self._forced = self._ahead.pop()
            self._know(self._suggest(self))

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """The lower end."""
        self._add(name, low, high, lambda: FloatDistribution(low, high, log=log, step=step))
        return low

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """The lower end."""
        self._add(name, low, high, lambda: IntDistribution(low, high, log=log, step=step))
        return low

    def suggest_categorical(self, name: str, choices: Sequence[Value]) -> Value:
        """The choice of this branch; the others are walked later."""
        if not choices:
            raise RecipeError(f"tune.space {self._name!r}: {name} has no choices: give one at least")
        for choice in choices:
            if not isinstance(choice, None | bool | int | float | str):
                raise RecipeError(
                    f"tune.space {self._name!r}: {name} has the choice {choice!r}: a study keeps numbers, texts and "
                    "null; return what follows from them in a dictionary"
                )
        if name not in self.distributions:
            self._ahead += [{**self._forced, name: choice} for choice in choices[1:]]
        self.distributions[name] = CategoricalDistribution(choices)
        self._know([name])
        return self._forced.get(name, choices[0])

    def _add(self, name: str, low: float, high: float, make: Callable[[], BaseDistribution]) -> None:
        if low > high:
            raise RecipeError(f"tune.space {self._name!r}: {name} has the range {low} to {high}, which is reversed")
        try:
            self.distributions[name] = make()
        except ValueError as error:
            raise RecipeError(f"tune.space {self._name!r}: {name}, range {low} to {high}: {error}") from error
        self._know([name])

    def _know(self, keys: Iterable[str]) -> None:
        self.keys += [key for key in keys if key not in self.keys]


def _check_keys(name: str, keys: Iterable[str], recipe: Recipe) -> None:
    known = dict(_leaves(recipe.model_dump(mode="json")))
    for key in keys:
        if key in _RESERVED:
            where = "tune.workers" if key == "train.workers" else key
            raise RecipeError(f"tune.space {name!r} names {key}: set {where}, the same for all trials")
        if key in _DEGREES and not (recipe.tune and recipe.tune.workers):
            raise RecipeError(
                f"tune.space {name!r} names {key}, and trials have no more workers than the recipe's own plan needs: "
                "set tune.workers to what the largest plan needs, the same for all trials"
            )
        if key.startswith(tuple(f"{each}." for each in _FOREIGN)) or key in _FOREIGN:
            raise RecipeError(f"tune.space {name!r} names {key}, on which training does not depend: leave it out")
        if key not in known:
            raise RecipeError(
                f"tune.space {name!r} names {key}, and recipe {recipe.name} has no such key; {did_you_mean(key, known)}"
            )


def _check_values(name: str, key: str, distribution: BaseDistribution, recipe: Recipe) -> None:
    """Try what can be drawn, of a range its ends; what only fits together with other keys is not judged."""
    values = (
        distribution.choices
        if isinstance(distribution, CategoricalDistribution)
        else (distribution.low, distribution.high)  # type: ignore[attr-defined]
    )
    for value in values:
        try:
            with_values(recipe, {key: value})
        except RecipeError as error:
            if f": {key} is " in str(error):
                reason = str(error).partition(f": {key} is ")[2].partition("\n")[0]
                raise RecipeError(f"tune.space {name!r}: {key} may become {reason}") from None


def _leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Every dotted key of a tree that holds a value, or nothing yet."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if prefix and not (isinstance(tree, dict) and tree):
        yield prefix.removesuffix("."), tree
    for part, child in items:
        yield from _leaves(child, f"{prefix}{part}.")


def _value(tree: Any, key: str) -> Value:
    for part in key.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def _contains(distribution: BaseDistribution, value: Value) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    return isinstance(value, int | float) and distribution._contains(distribution.to_internal_repr(value))
