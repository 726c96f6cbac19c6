"""Searches that a test runs on a cluster."""

from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from tests.helpers import result_of, run

DIGITS = "recipes/digits.yaml"


def search(cluster: dict[str, str], *overrides: str, succeeds: bool = True) -> tuple[dict[str, Any], str]:
    """The result of a search over the digits, and what it printed."""
    done = run("rayloom", "submit", "tune", DIGITS, *overrides, environment=cluster, timeout=500)
    shown = done.stdout.partition("Status message:")[0]  # Ray prints the log of a failed job once more
    assert (done.returncode == 0) is succeeds, done.stdout + done.stderr
    return result_of(shown), shown


def trials_of(cluster: dict[str, str], run_id: str) -> list[FrozenTrial]:
    """The trials in a search's study."""
    file = Path(cluster["RAYLOOM_STORAGE"]) / "studies" / f"{run_id}.db"
    return trials_in(file, run_id)


def trials_in(file: Path, run_id: str) -> list[FrozenTrial]:
    """Return the trials in a study's file."""
    return optuna.load_study(study_name=run_id, storage=f"sqlite:///{file}").get_trials(deepcopy=False)
