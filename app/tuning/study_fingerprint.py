"""A study's fingerprint: its space, objectives and recipe. A search may only resume with the same ones."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optuna.study import Study, StudyDirection

from app.config import AutoPlan, PlanConfig, Recipe, TuneConfig, parse_stored_recipe
from app.errors import RecipeError, TuningError
from app.tuning.space import Space, Value

_SPACE, _VERSIONS, _RECIPE, _TRIALS = "space", "versions", "recipe", "trials"
_TRAINING_SECTIONS = ("task", "data", "model", "train")
"""The sections of a recipe on which a trial depends."""
_COMPARABLE = ("epochs", "max_steps", "workers", "scheduler", "grace_epochs", "reduction_factor")
"""The keys of ``tune`` that must be equal for trials to be comparable."""


def record_fingerprint(study: Study, space: Space, recipe: Recipe, config: TuneConfig) -> None:
    """Store the fingerprint in a new study, for ``require_same_fingerprint``."""
    study.set_user_attr(_SPACE, space.fingerprint)
    study.set_user_attr(_VERSIONS, dict(space.versions))
    study.set_user_attr(_RECIPE, _training_keys(recipe))
    study.set_user_attr(_TRIALS, _comparable_keys(config))


def with_recorded_versions(space: Space, study: Study) -> Space:
    """Return the space with the versions of published models that the study recorded when it began."""
    return replace(space, versions=study.user_attrs.get(_VERSIONS, {}))


def directions_of(config: TuneConfig) -> list[StudyDirection]:
    """Return Optuna's direction of each objective."""
    return [StudyDirection.MAXIMIZE if goal.mode == "max" else StudyDirection.MINIMIZE for goal in config.objectives]


def require_same_fingerprint(study: Study, space: Space, recipe: Recipe, config: TuneConfig) -> None:
    """Raise TuningError if the study's trials cannot be compared with those of this search."""
    then, now = study.user_attrs.get(_SPACE, {}), space.fingerprint
    for key in sorted({*then, *now}):
        if then.get(key) != now.get(key):
            raise TuningError(
                f"study {study.study_name!r} searched {key} over {_show_range(then.get(key))}, and tune.space "
                f"says {_show_range(now.get(key))}: put the space back, or leave tune.resume out to start a new study"
            ).of("study.differs")
    require_same_objectives(study, config)
    if _stored_training_keys(study, recipe) != _training_keys(recipe.as_given):
        raise TuningError(
            f"the recipe's {', '.join(_TRAINING_SECTIONS)} differ from those that study {study.study_name!r} was "
            "started with, so its values cannot be compared: change them back, or leave tune.resume out to start a new "
            "study"
        ).of("study.differs")
    given = _comparable_keys(config)
    # Older studies have no such keys, and are accepted.
    for key, expected in study.user_attrs.get(_TRIALS, given).items():
        if given[key] != expected:
            raise TuningError(
                f"tune.{key} is {_show_value(given[key])}, and study {study.study_name!r} was started with "
                f"{_show_value(expected)}: set it back, or leave tune.resume out to start a new study"
            ).of("study.differs")


def require_same_objectives(study: Study, config: TuneConfig) -> None:
    """Raise TuningError if the study has other objectives."""
    given = [(objective.metric, objective.mode) for objective in config.objectives]
    stored = [
        (metric, "max" if direction == StudyDirection.MAXIMIZE else "min")
        for metric, direction in zip(study.metric_names or [], study.directions, strict=False)
    ]
    if given != stored:
        raise TuningError(
            f"study {study.study_name!r} is about {_show_objectives(stored)}, and the recipe about "
            f"{_show_objectives(given)}: set tune.metric to the same, or leave tune.resume and tune.warm_start out"
        ).of("study.differs")


def _stored_training_keys(study: Study, recipe: Recipe) -> dict[str, Any] | None:
    """Return the training sections of the study's recipe; None if this version cannot read them.

    Keys that were added since then have their defaults, which train as before the key existed.
    """
    try:
        stored = parse_stored_recipe({"name": recipe.name, **study.user_attrs.get(_RECIPE, {})})
        # Older studies have published models without their versions.
        return _training_keys(stored.as_found_by(recipe).as_given)
    except RecipeError:
        return None


def _training_keys(recipe: Recipe) -> dict[str, Any]:
    """Return the sections on which every trial depends, as JSON values.

    A plan of ``auto`` counts as the default plan, because older studies recorded it so.
    """
    if isinstance(recipe.train.plan, AutoPlan):
        recipe = recipe.with_plan(PlanConfig())
    sections = {name: recipe.model_dump(mode="json")[name] for name in _TRAINING_SECTIONS}
    # Whether a run resumes does not change what it trains.
    sections["train"].pop("resume")
    return sections


def _comparable_keys(config: TuneConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _COMPARABLE}


def _show_value(value: Value) -> str:
    return "nothing" if value is None else str(value)


def _show_range(distribution: str | None) -> str:
    if distribution is None:
        return "nothing"
    tree = json.loads(distribution)
    attributes = tree["attributes"]
    if "choices" in attributes:
        return f"the choices {attributes['choices']}"
    scale = ", logarithmic" if attributes["log"] else ""
    return f"{attributes['low']} to {attributes['high']}{scale}"


def _show_objectives(objectives: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{metric} ({mode})" for metric, mode in objectives) or "nothing"
