"""Searches that a test runs on a cluster."""

from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from tests.helpers import result_of
from tests.jobs import shown_by_job

DIGITS = "recipes/digits.yaml"


def search(cluster: dict[str, str], *overrides: str, succeeds: bool = True) -> tuple[dict[str, Any], str]:
    """Return the result of a search over the digits, and what it printed."""
    shown = shown_by_job(cluster, "tune", DIGITS, *overrides, succeeds=succeeds)
    return result_of(shown), shown


def trials_of(cluster: dict[str, str], run_id: str) -> list[FrozenTrial]:
    """The trials in a search's study."""
    file = Path(cluster["RAYLOOM_STORAGE"]) / "studies" / f"{run_id}.db"
    return trials_in(file, run_id)


def trials_in(file: Path, run_id: str) -> list[FrozenTrial]:
    """Return the trials in a study's file."""
    return optuna.load_study(study_name=run_id, storage=f"sqlite:///{file}").get_trials(deepcopy=False)
