"""Search spaces: the keys of the recipe that a search varies, and the distribution of each."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

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
from ray.tune.search.sample import Categorical, Domain, Float, Integer, LogUniform, Quantized, Uniform

from app.config import AutoPlan, PlanConfig, Recipe, recipe_keys, with_values
from app.config.recipe import PublishedModel, texts
from app.errors import RecipeError
from app.import_string import did_you_mean, import_attribute
from app.tuning import optuna_internals
from app.tuning.space_explorer import SpaceExplorer, SpaceFunction, Suggester, require_same_distribution
from app.tuning.storage import DATABASE_ERRORS

Value = Any
"""The value of a key: None, a bool, a number or a text. A derived value may also be a list or a dictionary of them."""

_UNRELATED = ("tune", "compile", "serve", "alerts", "notify", "name", "task", "storage", "train.resume", "tuned_from")
"""Keys and sections on which training does not depend."""
_FIXED = (
    "train.workers", "train.device", "train.cpus_per_worker",
    "train.resources", "train.accelerator_type", "train.labels",
)  # fmt: skip
"""Keys that set what Ray reserves for a trial, which is the same for all trials."""
_SPLIT = (
    "data.source", "data.columns", "data.seed", "data.validation_fraction", "data.validation_source",
    "data.group_column", "data.clean",
)  # fmt: skip
"""Keys and sections that choose the rows of the validation split."""
_OF_TRAIN_LOSS = (
    "train.label_smoothing", "train.class_weights", "train.temperature", "train.teacher", "train.augment",
    "train.curriculum", "data.sampling", "data.sources", "data.temperature", "data.clean.label_noise",
)  # fmt: skip
"""Keys and sections that define the training loss, or choose or change its samples."""
_TRAINING_ROWS = "data.clean.label_noise"
"""The key of ``data.clean`` that drops rows of the training split alone."""
_DEGREES = ("train.plan.tensor", "train.plan.pipeline")
"""Keys that change how many workers a trial needs."""
PLAN = "train.plan"
"""The key of a whole plan, whose choices are written as in a recipe: ``{zero_stage: 3}``."""
_PLAN_DEPENDS_ON = (
    "train.plan", "train.global_batch_size", "train.tokens_per_batch", "train.precision", "train.optimizer.name",
    "model.", "data.",
)  # fmt: skip
"""Beginnings of the keys that decide which plan fits and which is fastest."""

_PUBLISHED = tuple(f"train.{section}.model" for section in get_args(PublishedModel))
"""Keys that name a published model."""

_GRID = "grid_search"
"""The key of the dictionary that ``ray.tune.grid_search`` returns."""


@dataclass(frozen=True)
class Space:
    """A checked search space: each of its keys exists in the recipe."""

    name: str
    """Its import string."""
    recipe: Recipe
    """The recipe that it was checked against."""
    suggest: SpaceFunction
    """Draws and derives the values of a trial. Raises RecipeError."""
    distributions: dict[str, BaseDistribution]
    """The distribution of each drawn key, in all branches that were explored."""
    derived: dict[str, list[Value]]
    """The values that were derived for each key during the exploration."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """NAME/VERSION of each published model that the space gives by NAME."""

    @property
    def unversioned(self) -> set[str]:
        """Names of the published models that the space gives without a version."""
        drawn = {key: _extremes(distribution) for key, distribution in self.distributions.items()}
        return {text for key, text in texts(drawn | self.derived) if key in _PUBLISHED and "/" not in text}

    @property
    def fingerprint(self) -> dict[str, str]:
        """Each key's distribution as text. Equal spaces have equal fingerprints."""
        return {key: distribution_to_json(distribution) for key, distribution in sorted(self.distributions.items())}

    @property
    def is_finite(self) -> bool:
        """Whether no key is drawn from a continuous range."""
        floats = (item for item in self.distributions.values() if isinstance(item, FloatDistribution))
        return all(distribution.step for distribution in floats)

    @property
    def key_that_plans_depend_on(self) -> str | None:
        """A key of the space by which a parallel plan is chosen, or that is part of it; None if there is none."""
        return next((key for key in [*self.distributions, *self.derived] if key.startswith(_PLAN_DEPENDS_ON)), None)

    def with_plans(self, plans: Sequence[str]) -> "Space":
        """Return a space that also draws ``train.plan`` from ``plans``."""
        distribution = CategoricalDistribution(plans)

        def suggest(trial: Suggester) -> Mapping[str, Value]:
            _draw(trial, PLAN, distribution)
            return self.suggest(trial)

        return replace(self, suggest=suggest, distributions={PLAN: distribution} | self.distributions)

    def contains(self, values: Mapping[str, Value]) -> bool:
        """Return True if the space can draw all of ``values``."""
        return all(key in self.distributions and _contains(self.distributions[key], values[key]) for key in values)

    def may_give(self, key: str, value: Value) -> bool:
        """Return True if the space can draw ``value`` for ``key``, or derived it during the exploration."""
        return self.contains({key: value}) or value in self.derived.get(key, ())

    def draw(self, trial: Trial) -> dict[str, Value]:
        """Return the values of a trial, drawn and derived.

        Raises:
            RecipeError: the space fails, or an unexplored branch does what ``load_space`` refuses.
        """
        derived = self.suggest(trial)
        for key, distribution in trial.distributions.items():
            require_same_distribution(self.name, key, self.distributions.get(key, distribution), distribution)
        values = {**trial.params, **derived}
        _check_keys(self.name, values, self.recipe)
        return {key: _with_versions(key, value, self.versions) for key, value in values.items()}

    def own_values(self) -> dict[str, Value]:
        """Return the recipe's own values of the keys, without those that the space cannot draw, and the first plan."""
        tree = _tree(self.recipe)
        values = {key: _value(tree, key) for key in self.distributions if key != PLAN}
        if isinstance(plans := self.distributions.get(PLAN), CategoricalDistribution):
            values[PLAN] = plans.choices[0]
        return {key: value for key, value in values.items() if _contains(self.distributions[key], value)}

    def values_outside(self) -> dict[str, Value]:
        """Return the recipe's own values that the space cannot draw, in the branch of ``own_values``.

        Raises:
            RecipeError: the space fails.
        """
        own, tree = self.own_values(), _tree(self.recipe)
        # A draw with these values enqueued shows which keys their branch has.
        study = optuna.create_study(sampler=RandomSampler(seed=0))
        study.enqueue_trial(own)
        self.suggest(trial := study.ask())
        return {key: _value(tree, key) for key in trial.params if key in self.distributions and key not in own}


def load_space(name: str, recipe: Recipe) -> Space:
    """Load a search space by its import string, and check it against the recipe.

    First, ``SpaceExplorer`` finds the keys. Then all choices and the ends of every range are tried on the recipe.

    Raises:
        RecipeError: there is no such space, the recipe lacks a key or refuses a value, a key is drawn from two
            distributions, or a range is empty or reversed.
    """
    suggest = _suggest_from(name, import_attribute(name))
    explorer = SpaceExplorer(name, suggest)
    if not explorer.distributions:
        raise RecipeError(f"tune.space {name!r} draws nothing: let it suggest a value for at least one key").of(
            "space.draws_nothing", "tune.space"
        )
    drawn = {key: _extremes(distribution) for key, distribution in explorer.distributions.items()}
    _check_keys(name, [*drawn, *explorer.derived], recipe)
    for key, values in [*drawn.items(), *explorer.derived.items()]:
        _check_values(name, key, values, recipe)
    space = Space(name, recipe, suggest, explorer.distributions, explorer.derived)
    if recipe.tune and recipe.tune.sampler == "grid" and not space.is_finite:
        raise RecipeError(
            f"tune.space {name!r} draws from a range without steps, so sampler grid cannot try every value: give each "
            "suggest_float a step, or set tune.sampler to another"
        ).of("space.no_steps", "tune.space")
    return space


def _suggest_from(name: str, given: object) -> SpaceFunction:
    if isinstance(given, Mapping):
        return _suggest_from_domains(name, given)
    if callable(given):
        return _suggest_from_function(name, given)
    raise RecipeError(
        f"tune.space {name!r} is a {type(given).__name__}: expected a function space(trial), or a dictionary of "
        "Ray Tune's domains"
    ).of("space.type", "tune.space")


def _suggest_from_function(name: str, function: Callable[[Suggester], object]) -> SpaceFunction:
    """Wrap a user's function. Turn its errors into RecipeError, and let those of the database pass."""

    def suggest(trial: Suggester) -> Mapping[str, Value]:
        try:
            derived = function(trial) or {}
        except (RecipeError, *DATABASE_ERRORS):
            raise
        except Exception as error:  # a user's function may fail in any way
            raise RecipeError(f"tune.space {name!r} fails: {type(error).__name__}: {error}").of(
                "space.fails", "tune.space"
            ) from error
        if not isinstance(derived, Mapping):
            raise RecipeError(
                f"tune.space {name!r} returns {derived!r}: expected None, or a dictionary of values derived from the "
                "drawn ones"
            ).of("space.not_a_dictionary", "tune.space")
        return {key: _plain(name, key, value) for key, value in derived.items()}

    return suggest


def _suggest_from_domains(name: str, domains: Mapping[str, Any]) -> SpaceFunction:
    """Wrap a dictionary of Ray Tune's domains. Its constants count as derived values."""
    constants = {key: _plain(name, key, value) for key, value in domains.items() if not _is_domain(value)}
    try:
        drawn = {key: _from_ray(value) for key, value in domains.items() if _is_domain(value)}
    except ValueError as error:
        raise RecipeError(f"tune.space {name!r}: {error}").of("space.range", "tune.space") from error

    def suggest(trial: Suggester) -> Mapping[str, Value]:
        for key, distribution in drawn.items():
            _draw(trial, key, distribution)
        return constants

    return suggest


def _is_domain(value: object) -> bool:
    """Return True if Ray Tune draws from ``value``."""
    return isinstance(value, Domain) or (isinstance(value, dict) and value.keys() == {_GRID})


def _from_ray(domain: Any) -> BaseDistribution:
    """Return Optuna's counterpart of a domain of Ray Tune. A grid becomes a categorical distribution.

    Raises:
        ValueError: Optuna has no such distribution, or the range is empty.
    """
    if isinstance(domain, dict):
        return CategoricalDistribution(domain[_GRID])
    sampler, step = domain.get_sampler(), None
    if isinstance(sampler, Quantized):
        sampler, step = sampler.get_sampler(), sampler.q
    log = isinstance(sampler, LogUniform)
    if log and step and (step != 1 or isinstance(domain, Float)):
        raise ValueError(f"{domain} is logarithmic and quantized, which Optuna cannot draw: leave the steps out")
    if isinstance(domain, Categorical):
        return CategoricalDistribution(domain.categories)
    if isinstance(sampler, Uniform | LogUniform):
        if isinstance(domain, Float):
            return FloatDistribution(domain.lower, domain.upper, log=log, step=None if log else step)
        if isinstance(domain, Integer):
            if step in (None, 1):  # then Ray Tune excludes the upper end
                return IntDistribution(domain.lower, domain.upper - 1, log=log)
            # Otherwise it draws the multiples of the step between the ends.
            return IntDistribution(-(-domain.lower // step) * step, domain.upper // step * step, step=step)
    raise ValueError(f"{domain} cannot be drawn by Optuna: use uniform, loguniform, randint, lograndint or choice")


def _draw(trial: Suggester, key: str, distribution: BaseDistribution) -> Value:
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
    """Return a derived value as the study will return it: as JSON holds it, with NumPy scalars as Python's."""
    try:
        return json.loads(json.dumps(value, default=lambda scalar: scalar.item()))
    except (TypeError, ValueError, AttributeError):
        raise RecipeError(
            f"tune.space {name!r} returns {key}={value!r}, a {type(value).__name__}: expected what YAML holds, such as "
            "a number, a text or a list of them"
        ).of("space.value", "tune.space") from None


def _with_versions(key: str, value: Value, versions: Mapping[str, str]) -> Value:
    """Replace the names of published models in a value by those with a version in ``versions``."""
    if isinstance(value, dict):
        return {name: _with_versions(f"{key}.{name}", child, versions) for name, child in value.items()}
    return versions.get(value, value) if key in _PUBLISHED else value


def _is_within(key: str, sections: Iterable[str]) -> bool:
    """Return whether a key is one of ``sections``, which may also be keys, or below one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _why_incomparable(key: str, recipe: Recipe) -> str | None:
    """Return how a key changes what a metric means; None if it does not."""
    if _is_within(key, _SPLIT) and key != _TRAINING_ROWS:
        return "which chooses the rows of the validation split"
    if _is_within(key, ["data.tokenizer"]) and recipe.task in ("language-modeling", "chat"):
        return "and metrics of language models are means over its tokens"
    metrics = {goal.metric for goal in recipe.tune.objectives} if recipe.tune else set()
    if key == "train.temperature" and "val_loss" in metrics:
        return "by which val_loss is divided"
    if _is_within(key, _OF_TRAIN_LOSS) and "train_loss" in metrics:
        return "which changes what train_loss measures"
    return None


def _check_keys(name: str, keys: Iterable[str], recipe: Recipe) -> None:
    tree = _tree(recipe)
    left_out = {key: None for key in recipe_keys() if _is_in_none(tree, key)}
    known = dict(_leaves(tree)) | left_out | {PLAN: None}
    for key in keys:
        if why := _why_incomparable(key, recipe):
            raise RecipeError(
                f"tune.space {name!r} names {key}, {why}, so trials could not be compared: leave it out"
            ).of("space.key_not_searched", "tune.space")
        if _is_within(key, _FIXED):
            where = "tune.workers" if key == "train.workers" else key
            raise RecipeError(f"tune.space {name!r} names {key}: set {where}, the same for all trials").of(
                "space.key_not_searched", "tune.space"
            )
        if key in _DEGREES and not (recipe.tune and recipe.tune.workers):
            raise RecipeError(
                f"tune.space {name!r} names {key}, and trials have no more workers than the recipe's own plan needs: "
                "set tune.workers to what the largest plan needs, the same for all trials"
            ).of("space.key_not_searched", "tune.space")
        if _is_within(key, _UNRELATED):
            raise RecipeError(f"tune.space {name!r} names {key}, on which training does not depend: leave it out").of(
                "space.key_not_searched", "tune.space"
            )
        if key not in known:
            raise RecipeError(
                f"tune.space {name!r} names {key}, and recipe {recipe.name} has no such key; {did_you_mean(key, known)}"
            ).of("space.key_unknown", "tune.space")


def _extremes(distribution: BaseDistribution) -> Sequence[Value]:
    """Return all choices, or the two ends of a range."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    return distribution.low, distribution.high  # type: ignore[attr-defined]


def _check_values(name: str, key: str, values: Iterable[Value], recipe: Recipe) -> None:
    """Try each value on the recipe. An error about another key is ignored: the combination may be valid later."""
    for value in values:
        try:
            with_values(recipe, {key: value})
        except RecipeError as error:
            # ``load_recipe`` words its errors like this, so the text tells which key one is about.
            if f": {key} is " in str(error):
                reason = str(error).partition(f": {key} is ")[2].partition("\n")[0]
                raise RecipeError(f"tune.space {name!r}: {key} may become {reason}").of(
                    "space.value", "tune.space"
                ) from None


def _tree(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe with all its keys. A plan of ``auto`` has the keys of the default plan."""
    is_auto = isinstance(recipe.train.plan, AutoPlan)
    return (recipe.with_plan(PlanConfig()) if is_auto else recipe).model_dump(mode="json")


def _leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Yield every dotted key of a tree with its value. An empty dictionary counts as a value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if prefix and not (isinstance(tree, dict) and tree):
        yield prefix.removesuffix("."), tree
    for part, child in items:
        yield from _leaves(child, f"{prefix}{part}.")


def _value(tree: Any, key: str) -> Value:
    """Return the value of a dotted key; None in a section that is left out."""
    for part in key.split("."):
        if tree is None:
            return None
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def _is_in_none(tree: Any, key: str) -> bool:
    """Return True for a key of a section that the recipe leaves out, such as ``train.augment.image.crop``."""
    *sections, _ = key.split(".")
    for section in sections:
        if not isinstance(tree, dict):
            break
        tree = tree.get(section)
    return tree is None


def _contains(distribution: BaseDistribution, value: Value) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    return isinstance(value, int | float) and optuna_internals.contains(distribution, value)
