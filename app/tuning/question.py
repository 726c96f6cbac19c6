"""What a study asks: over which space, for which objectives, of which recipe. A search goes on with the same only."""

import json
from collections.abc import Sequence
from typing import Any

from optuna.study import Study, StudyDirection

from app.config import Recipe, TuneConfig, parse_stored_recipe
from app.errors import RecipeError, TuningError
from app.tuning.space import Space, Value

_SPACE, _RECIPE, _TRIALS = "space", "recipe", "trials"
_BASE = ("task", "data", "model", "train")
"""The sections of a recipe on which a trial depends."""
_PINNED = ("epochs", "workers", "scheduler", "grace_epochs", "reduction_factor")
"""The keys of ``tune`` that make trials of one study comparable."""


def note_question(study: Study, space: Space, recipe: Recipe, config: TuneConfig) -> None:
    """Keep in a new study what it asks, for ``require_same``."""
    study.set_user_attr(_SPACE, space.fingerprint)
    study.set_user_attr(_RECIPE, _base(recipe))
    study.set_user_attr(_TRIALS, _pinned(config))


def directions_of(config: TuneConfig) -> list[StudyDirection]:
    """Which way each objective is better, as Optuna says it."""
    return [StudyDirection.MAXIMIZE if each.mode == "max" else StudyDirection.MINIMIZE for each in config.objectives]


def require_same(study: Study, space: Space, recipe: Recipe, config: TuneConfig) -> None:
    """Raises TuningError if the study holds trials of another question."""
    then, now = study.user_attrs.get(_SPACE, {}), space.fingerprint
    for key in sorted({*then, *now}):
        if then.get(key) != now.get(key):
            raise TuningError(
                f"study {study.study_name!r} searched {key} over {_show(then.get(key))}, and tune.space says "
                f"{_show(now.get(key))}: put the space back, or leave tune.resume out to start a new study"
            )
    require_objectives(study, config)
    if _base_then(study, recipe.name) != _base(recipe):
        raise TuningError(
            f"the recipe's {', '.join(_BASE)} are not what study {study.study_name!r} was started with, and its values "
            "mean something else: change them back, or leave tune.resume out to start a new study"
        )
    given = _pinned(config)
    for key, expected in study.user_attrs.get(_TRIALS, given).items():
        if given[key] != expected:
            raise TuningError(
                f"tune.{key} is {_shown(given[key])}, and study {study.study_name!r} was started with "
                f"{_shown(expected)}: set it back, or leave tune.resume out to start a new study"
            )


def require_objectives(study: Study, config: TuneConfig) -> None:
    """Raises TuningError if the study is about something else."""
    wanted = [(each.metric, each.mode) for each in config.objectives]
    known = [
        (metric, "max" if direction == StudyDirection.MAXIMIZE else "min")
        for metric, direction in zip(study.metric_names or [], study.directions, strict=False)
    ]
    if wanted != known:
        raise TuningError(
            f"study {study.study_name!r} is about {_show_objectives(known)}, and the recipe about "
            f"{_show_objectives(wanted)}: set tune.metric to the same, or leave tune.resume and tune.warm_start out"
        )


def _base_then(study: Study, name: str) -> dict[str, Any] | None:
    """Return what the trials of a study start from; None if it is not a recipe of this version.

    A key that was added since has its default, which trains as without the key.
    """
    try:
        return _base(parse_stored_recipe({"name": name, **study.user_attrs.get(_RECIPE, {})}))
    except RecipeError:
        return None


def _base(recipe: Recipe) -> dict[str, Any]:
    """What every trial of the search starts from, as plain values."""
    base = {name: recipe.model_dump(mode="json")[name] for name in _BASE}
    base["train"].pop("resume")
    return base


def _pinned(config: TuneConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _PINNED}


def _shown(value: Value) -> str:
    return "nothing" if value is None else str(value)


def _show(distribution: str | None) -> str:
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
