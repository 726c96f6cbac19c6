"""Targets of runs, searches and models, with the figure that was reached."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from statistics import fmean
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError
from upath import UPath

from app.artifacts import METRICS_FILE
from app.config import load_stored_recipe
from app.errors import StorageError
from app.import_string import suggestion
from app.reports.catalog import find_run
from app.runs import CONFIG_FILE, RESULT_FILE, Result, newest_first, runs_folder
from app.storage import list_names
from app.telemetry.record import parse_line, parse_reading

_SUMMARY = "profile/summary.json"
_RECENT = "15m"
"""Of a model's requests."""


@dataclass(frozen=True)
class Target:
    """A bound on a figure."""

    name: str
    bound: float
    unit: str
    """``%`` shows shares, which lie from 0 to 1, as percent."""
    is_minimum: bool = False

    def shown(self, value: float) -> str:
        """Return a figure as a person reads it."""
        return f"{100 * value:.1f} %" if self.unit == "%" else f"{value:.3g} {self.unit}"

    def __str__(self) -> str:
        return f"{'>' if self.is_minimum else '<'} {self.shown(self.bound)}"


DEVICE = Target("device use", 0.8, "%", is_minimum=True)
COMMUNICATION = Target("communication", 0.1, "%")
FRAGMENTATION = Target("memory fragmentation", 0.05, "%")
DATA_STALL = Target("data stall", 0.02, "%")
SEARCH_TIME = Target("device time of the search", 5.0, "trainings")
FIRST_ANSWER = Target("first answer", 0.1, "s")


_JOBS = ("train", "tune")
"""Jobs whose runs have targets."""


@dataclass(frozen=True)
class Finding:
    """A target, and what was reached of it."""

    subject: str
    target: Target
    value: float | None
    """None: it was not measured."""
    source: str
    """Where the figure is from, or what would measure it."""

    @property
    def passes(self) -> bool | None:
        """Whether the target is reached; None if it was not measured."""
        if self.value is None:
            return None
        return self.value > self.target.bound if self.target.is_minimum else self.value <= self.target.bound

    def __str__(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "-"}[self.passes]
        reached = "not measured" if self.value is None else self.target.shown(self.value)
        return f"{verdict:5}{self.subject:34} {self.target.name:26} {reached:>14}  {self.target!s:12} {self.source}"


class _Profile(BaseModel):
    """The shares of a run's steps that are looked at, of what ``app.telemetry.step_time.StepTime`` has."""

    compute: float
    communication: float
    optimizer: float


Ask = Callable[[str], float | None]
"""Returns what Prometheus answers to an expression with one value; None if it has none."""


def findings(storage: UPath, subject: str | None, ask: Ask | None) -> list[Finding]:
    """Check a run or a model, or without a subject the newest run and search of the storage and all of its models.

    Args:
        ask: None if there is no Prometheus.

    Raises:
        StorageError: the storage has neither a run nor a model of that name.
    """
    models = sorted(list_names(storage / "models"))
    if subject is None:
        newest = [folder for job in _JOBS for folder in newest_first(runs_folder(storage, job))[:1]]
        checked = [finding for model in models for finding in _of_model(model, ask)]
        return [*(finding for run in newest for finding in _of_run(run)), *checked]
    if subject in models:
        return list(_of_model(subject, ask))
    try:
        run = find_run(storage, subject)
    except StorageError as error:
        raise StorageError(f"{error}; there is no model {subject!r}{suggestion(subject, models)}").of(
            error.rule, error.key
        ) from error
    if run.job not in _JOBS:
        raise StorageError(f"run {run.run_id} is a {run.job} run: only runs of {' and '.join(_JOBS)} have targets").of(
            "run.no_targets"
        )
    return list(_of_run(run.path))


def prometheus(url: str) -> Ask:
    """Return a function that asks the Prometheus at a URL. It returns None where that has no answer."""

    def ask(expression: str) -> float | None:
        try:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=10.0).raise_for_status()
        except httpx.HTTPError:
            return None
        found = answer.json()["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    return ask


def _of_run(folder: UPath) -> Iterator[Finding]:
    yield from _of_search(folder) if folder.parent.name == "tune" else _of_training(folder)


def _of_training(folder: UPath) -> Iterator[Finding]:
    profile = _profile(folder)
    steps = list(_steps(folder))
    stalls = [step["data_stall"] for step in steps]
    fragmented = [step["memory"]["fragmentation"] for step in steps if "fragmentation" in step["memory"]]
    measured = "from the profile" if profile else "set train.profile={}"
    used = profile.compute + profile.optimizer if profile else None
    yield Finding(folder.name, DEVICE, used, measured)
    yield Finding(folder.name, COMMUNICATION, profile.communication if profile else None, measured)
    yield Finding(folder.name, FRAGMENTATION, max(fragmented, default=None), "of GPUs alone")
    stall = fmean(stalls) if stalls else None
    reason = _why_data_stalls(folder, steps) if stall is not None and stall > DATA_STALL.bound else ""
    yield Finding(folder.name, DATA_STALL, stall, f"mean of {len(stalls)} steps{reason}")


def _why_data_stalls(folder: UPath, steps: Iterable[Mapping[str, Any]]) -> str:
    """Return what bounds the reading of the steps, and what to do."""
    readings = [reading for step in steps if (reading := parse_reading(step.get("reading")))]
    if not readings:
        return ""
    is_auto = load_stored_recipe(str(folder / CONFIG_FILE)).train.loader.num_workers == "auto"
    return f", {reduce(operator.add, readings)}{'' if is_auto else ': set train.loader.num_workers=auto'}"


def _of_search(folder: UPath) -> Iterator[Finding]:
    """Yield how many full trainings the search cost. Both are counted in epochs, which take as long in a trial."""
    try:
        trained = Result.model_validate_json((folder / RESULT_FILE).read_bytes()).metrics.get("epochs_trained")
    except (OSError, ValidationError):
        trained = None
    epochs = load_stored_recipe(str(folder / CONFIG_FILE)).train.epochs
    source = f"{trained} epochs, of {epochs} a training" if trained is not None else "once the search has ended"
    yield Finding(folder.name, SEARCH_TIME, trained / epochs if trained is not None else None, source)


def _of_model(name: str, ask: Ask | None) -> Iterator[Finding]:
    if ask is None:
        yield Finding(name, FIRST_ANSWER, None, "needs 'rayloom up --monitoring'")
        return

    first_s = ask(f'max(ray_rayloom_first_answer_seconds{{model="{name}"}} > 0)')
    yield Finding(name, FIRST_ANSWER, first_s, "after the last cold start")
    target_s = ask(f'max(ray_rayloom_latency_target_seconds{{model="{name}"}} > 0)')
    # The target of a language model limits the time to the first token.
    p99_s = ask(" or ".join(_p99(name, metric) for metric in ("request", "generation_first_token")))
    if target_s is None:
        yield Finding(name, Target("p99", float("inf"), "s"), None, "set serve.scaling.latency_target_ms")
    else:
        yield Finding(name, Target("p99", target_s, "s"), p99_s, f"of the last {_RECENT}")


def _p99(name: str, metric: str) -> str:
    """Return a PromQL expression for the 99th percentile of a model's latency."""
    buckets = f'sum by (le) (rate(ray_rayloom_{metric}_seconds_bucket{{model="{name}"}}[{_RECENT}]))'
    # Without requests the quantile is NaN, which the comparison drops.
    return f"histogram_quantile(0.99, {buckets}) >= 0"


def _profile(folder: UPath) -> _Profile | None:
    file = folder / _SUMMARY
    return _Profile.model_validate_json(file.read_bytes()) if file.exists() else None


def _steps(folder: UPath) -> Iterator[dict[str, Any]]:
    file = folder / METRICS_FILE
    for line in file.read_bytes().splitlines() if file.exists() else ():
        entry = parse_line(line)  # the last line may be incomplete
        if entry and "data_stall" in entry:
            yield entry
