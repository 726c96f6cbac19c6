"""Search spaces: which keys of the recipe are searched, and over what."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.samplers import RandomSampler
from optuna.trial import Trial

from app.config import Recipe, with_values
from app.errors import RecipeError
from app.import_string import import_attribute
from app.suggestions import did_you_mean
from app.tuning.distributions import from_tune, is_domain
from app.tuning.storage import DATABASE_ERRORS
from app.tuning.walk import Suggest, Suggests, Walk, require_one

Value = Any
"""Of a key: None, a bool, a number or a text; one that a space derives may be a list or a dictionary of them."""

_FOREIGN = ("tune", "compile", "serve", "alerts", "notify", "name", "task", "storage", "train.resume", "tuned_from")
"""What a trial does not depend on."""
_RESERVED = ("train.workers", "train.device", "train.cpus_per_worker")
"""What Ray reserves for a trial: the same for all."""
_DEGREES = ("train.plan.tensor", "train.plan.pipeline")
"""What a trial needs workers for."""


@dataclass(frozen=True)
class Space:
    """A search space that has been looked at: every key in it is one of the recipe's."""

    name: str
    """Its import string."""
    recipe: Recipe
    """That it was checked against."""
    suggest: Suggest
    """Raises RecipeError."""
    distributions: dict[str, BaseDistribution]
    """Of every key, in all branches that were walked."""
    derived: dict[str, list[Value]]
    """The values that were derived for each key while the space was walked."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """Each key's distribution as text: equal spaces have equal ones."""
        return {key: distribution_to_json(each) for key, each in sorted(self.distributions.items())}

    @property
    def is_finite(self) -> bool:
        """Whether no key is drawn from a continuous range."""
        return not any(isinstance(each, FloatDistribution) and not each.step for each in self.distributions.values())

    def contains(self, values: Mapping[str, Value]) -> bool:
        """Whether the space could have drawn each of ``values``."""
        return all(key in self.distributions and _contains(self.distributions[key], values[key]) for key in values)

    def may_give(self, key: str, value: Value) -> bool:
        """Return True if the space can draw ``value`` for ``key``, or derived it while it was walked."""
        return self.contains({key: value}) or value in self.derived.get(key, ())

    def draw(self, trial: Trial) -> dict[str, Value]:
        """The values of a trial: those that it draws, and those that the space derives from them.

        Raises:
            RecipeError: the space fails, or gives in a branch that was not walked what ``load_space`` refuses.
        """
        derived = self.suggest(trial)
        for key, distribution in trial.distributions.items():
            require_one(self.name, key, self.distributions.get(key, distribution), distribution)
        values = {**trial.params, **derived}
        _check_keys(self.name, values, self.recipe)
        return values

    def own_values(self) -> dict[str, Value]:
        """The recipe's own values of the keys, where the space could have drawn them."""
        tree = self.recipe.model_dump(mode="json")
        values = {key: _value(tree, key) for key in self.distributions}
        return {key: value for key, value in values.items() if _contains(self.distributions[key], value)}

    def values_outside(self) -> dict[str, Value]:
        """The recipe's own values of keys that a trial with ``own_values`` draws all the same. Raises RecipeError."""
        own, tree = self.own_values(), self.recipe.model_dump(mode="json")
        study = optuna.create_study(sampler=RandomSampler(seed=0))
        study.enqueue_trial(own)
        self.suggest(trial := study.ask())
        return {key: _value(tree, key) for key in trial.params if key in self.distributions and key not in own}


def load_space(name: str, recipe: Recipe) -> Space:
    """The space that an import string names, checked against the recipe.

    It is walked first, as ``Walk`` says, and all choices and the ends of every range are tried on the recipe.

    Raises:
        RecipeError: no such space, a key that the recipe lacks or that is drawn from two distributions, an empty or
            reversed range, or one that the recipe refuses.
    """
    suggest = _suggest_from(name, import_attribute(name))
    walk = Walk(name, suggest)
    if not walk.distributions:
        raise RecipeError(f"tune.space {name!r} draws nothing: let it suggest a value for at least one key")
    drawn = {key: _outermost(each) for key, each in walk.distributions.items()}
    _check_keys(name, [*drawn, *walk.derived], recipe)
    for key, values in [*drawn.items(), *walk.derived.items()]:
        _check_values(name, key, values, recipe)
    space = Space(name, recipe, suggest, walk.distributions, walk.derived)
    if recipe.tune and recipe.tune.sampler == "grid" and not space.is_finite:
        raise RecipeError(
            f"tune.space {name!r} draws from a range without steps, of which sampler grid cannot try every value: give "
            "each suggest_float a step, or set tune.sampler to another"
        )
    return space


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
        return {key: _plain(name, key, value) for key, value in derived.items()}

    return suggest


def _suggest_from_domains(name: str, domains: Mapping[str, Any]) -> Suggest:
    """A space of Ray Tune's: its domains are drawn, its constants are derived."""
    constants = {key: _plain(name, key, value) for key, value in domains.items() if not is_domain(value)}
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


def _plain(name: str, key: str, value: Any) -> Value:
    """A derived value as it comes back from the study, which keeps JSON; a number of numpy's becomes Python's."""
    try:
        return json.loads(json.dumps(value, default=lambda each: each.item()))
    except (TypeError, ValueError, AttributeError):
        raise RecipeError(
            f"tune.space {name!r} returns {key}={value!r}, a {type(value).__name__}: expected what YAML holds, such as "
            "a number, a text or a list of them"
        ) from None


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


def _outermost(distribution: BaseDistribution) -> Sequence[Value]:
    """What can be drawn, of a range its ends."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    return distribution.low, distribution.high  # type: ignore[attr-defined]


def _check_values(name: str, key: str, values: Iterable[Value], recipe: Recipe) -> None:
    """Try them on the recipe; what only fits together with other keys is not judged."""
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
