"""What every page reads of a run's folder."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal

import yaml
from pydantic import ValidationError
from upath import UPath

from app.best_effort import best_effort
from app.config import parse_stored_recipe, parse_yaml, yaml_problem
from app.errors import RecipeError, StorageError
from app.heartbeat import HEARTBEAT_FILE
from app.pages.content import Link, Mood, State
from app.pages.page import REPORT_FILE, Page
from app.pages.words import energy, hours, number, percent
from app.repository.score import Scored
from app.runs import CONFIG_FILE, RESULT_FILE, Result
from app.shared_files import read
from app.telemetry.usage import Usage, read_usage

Status = Literal["succeeded", "paused", "stopped", "failed", "running", "interrupted"]

_MOODS: dict[Status, Mood] = {
    "succeeded": "good",
    "paused": "busy",
    "stopped": "busy",
    "failed": "bad",
    "running": "busy",
    "interrupted": "bad",
}
_SILENT_S = 20.0
"""Age of the heartbeat from which a run counts as interrupted. It is written every two seconds."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run that has ended or is under way."""

    path: UPath

    @property
    def job(self) -> str:
        """The job, such as train."""
        return self.path.parent.name

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.path.name

    @property
    def storage(self) -> UPath:
        """The root of storage: runs lie in ``runs/JOB/RUN_ID``."""
        return self.path.parent.parent.parent

    @cached_property
    def result(self) -> Result | None:
        """How the run ended; None while it is under way, or if it was killed."""
        try:
            return Result.model_validate_json(read(self.path / RESULT_FILE) or b"")
        except (ValidationError, PermissionError, IsADirectoryError):
            return None

    @cached_property
    def recipe_text(self) -> str:
        """The resolved recipe, as YAML. Damaged bytes are replaced."""
        return (read(self.path / CONFIG_FILE) or b"").decode(errors="replace")

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, not validated: it may be of an earlier version. Raises StorageError if damaged."""
        try:
            loaded = parse_yaml(self.recipe_text)
        except yaml.YAMLError as error:
            raise StorageError(
                f"{str(self.path / CONFIG_FILE)!r} is not YAML any more ({yaml_problem(error)}): delete the "
                "run, or restore the file"
            ).of("yaml.invalid") from error
        return loaded if isinstance(loaded, dict) else {}

    @cached_property
    def differences(self) -> dict[str, Any]:
        """The keys of the recipe that differ from their defaults; empty if an earlier version wrote it."""
        try:
            return parse_stored_recipe(self.recipe).as_given.differences
        except (RecipeError, StorageError):
            return {}

    @cached_property
    def usage(self) -> list[Usage]:
        """What each attempt took."""
        return read_usage(self.path)

    @cached_property
    def status(self) -> Status:
        """How the run stands. Without a result it is running while its heartbeat is fresh."""
        if self.result:
            # A job ends alike in both cases, and its figures say which it is.
            return "paused" if self.result.metrics.get("paused") is True else self.result.status
        return "running" if self._is_alive() else "interrupted"

    @property
    def state(self) -> State:
        """The status, as a page shows it."""
        return state_of(self.status)

    def _is_alive(self) -> bool:
        """Return whether the heartbeat is fresh, by the clocks of this machine and of storage."""
        file = self.path / HEARTBEAT_FILE
        try:
            written: datetime = file.fs.modified(file.path)
        except OSError:
            return False
        return (datetime.now(UTC) - written).total_seconds() < _SILENT_S


def state_of(status: Status) -> State:
    """Return a status, as a page shows it."""
    return State(status, _MOODS[status])


def write_page(make: Callable[[UPath], Page], run_folder: UPath) -> None:
    """Write ``report.html`` of a run that has ended. An error is a warning: the run has its result already."""
    if (run_folder / CONFIG_FILE).exists():
        best_effort(
            lambda: make(run_folder).write(run_folder / REPORT_FILE), f"{REPORT_FILE} cannot be written", "the job"
        )


def link_to_run(job: str, run_id: str, text: str | None = None) -> Link:
    """Return a link from the page of one run to that of another."""
    return Link(text or run_id, f"../../{job}/{run_id}/{REPORT_FILE}")


def headline(result: Result) -> str:
    """Return the one or two main figures of a result, or the error."""
    if result.error:
        return result.error
    try:
        return _first_figures(result)
    except (AttributeError, LookupError, TypeError, ValueError):  # written by another release, or changed by hand
        return f"the figures in {RESULT_FILE} cannot be read"


def _first_figures(result: Result) -> str:
    metrics = result.metrics
    if result.job == "compile" and "chosen" in metrics:
        chosen = metrics["chosen"]
        score = Scored.model_validate(chosen).score
        return f"{chosen['engine']} {chosen['precision']}{f', {score}' if score else ''}"
    if result.job == "lifecycle":
        metrics = metrics.get("train", {})
    words = {
        "best_value": "best value",
        "val_loss": "val_loss",
        "val_accuracy": "val_accuracy",
        "val_perplexity": "val_perplexity",
        "ready_s": "seconds until ready",
        "replicas": "replicas",
    }
    words |= {name: name for name in metrics if name.startswith("val_")}
    known = {title: metrics[name] for name, title in words.items() if metrics.get(name) is not None}
    return ", ".join(f"{title} {number(value)}" for title, value in known.items())


def cost_of(usage: list[Usage]) -> dict[str, object]:
    """Describe device-hours and energy, summed over attempts, and the means of the first worker's GPU."""
    if not usage:
        return {"device-hours": "not measured", "energy": "not measured"}
    device = "GPU" if usage[0].device == "gpu" else "CPU core"
    cost: dict[str, object] = {
        f"{device}-hours": hours(sum(attempt.device_hours for attempt in usage)),
        "energy": _energy(usage),
    }
    if device == "GPU":
        power = _mean_rate(usage, lambda attempt: attempt.energy_j.get("gpu"))
        busy = _mean_rate(usage, lambda attempt: attempt.gpu_busy_s)
        cost["GPU power"] = "not measured" if power is None else f"{power:,.0f} W on average, {_FIRST_GPU}"
        cost["GPU utilisation"] = "not measured" if busy is None else f"{percent(busy)} of the time, {_FIRST_GPU}"
    return cost


def _mean_rate(usage: list[Usage], amount_of: Callable[[Usage], float | None]) -> float | None:
    """Return the mean amount per second, over the attempts that measured it."""
    measured = [(amount, attempt.seconds) for attempt in usage if (amount := amount_of(attempt)) is not None]
    seconds = sum(seconds for _, seconds in measured)
    return sum(amount for amount, _ in measured) / seconds if seconds else None


def _energy(usage: list[Usage]) -> str:
    """Describe the energy: measured on the first worker's machine, estimated for the other GPUs."""
    sources = sorted({source for attempt in usage for source in attempt.energy_j})
    parts = []
    for source in sources:
        joules = [attempt.energy_j.get(source, 0.0) * (attempt.workers if source == "gpu" else 1) for attempt in usage]
        parts.append(f"{energy(sum(joules))} {_SOURCES[source]}")
    return ", ".join(parts) or "not measured"


_SOURCES = {
    "cpu": "by the first worker's processors (RAPL, with all that ran there)",
    "gpu": "by all GPUs, estimated from the first worker's (NVML)",
}
_FIRST_GPU = "the first worker's GPU (NVML)"
