"""Searches whose trials and drivers die: the other trials go on, and none that has ended is run again."""

import re
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial, TrialState

from tests.helpers import run, wait_until
from tests.launch import Cluster, Launch, Launched
from tests.search import DIGITS, search, trials_of
from tests.tables import Faults

MODEL = "model.factory=tests.faults.troubled:TroubledCnn"
LONG = [
    "name=killed", MODEL, "model.args={width: 16, pause_s: 0.15}", "train.epochs=3", "train.early_stopping=null",
    "tune.trials=8", "tune.space=tests.faults.troubled:rates", "tune.scheduler=none",
]  # fmt: skip
"""A search that is long enough to be killed on the way."""


def test_trials_fail_alone_are_retried_and_say_why(cluster: dict[str, str], tmp_path: Path, faults: Faults) -> None:
    with (
        faults("U1", "a trial is killed, exits, raises", "retried once, then FAIL; 0 other trials lost") as died,
        faults("U5", "a trial's loss is NaN; a trial hangs for 30 s", "FAIL with the cause, after one retry") as silent,
    ):
        result, _ = search(
            cluster,
            *("name=troubled", MODEL, f"model.args={{trouble: none, batch: 30, once: {tmp_path / 'once'}}}"),
            *("train.epochs=3", "train.hang_timeout_s=30", "train.early_stopping=null"),
            *("tune.space=tests.faults.troubled:troubles", "tune.sampler=grid", "tune.scheduler=none"),
        )
        by_trouble = {each.params["model.args.trouble"]: each for each in trials_of(cluster, result["run_id"])[:6]}
        assert len(by_trouble) == 6
        for trouble in ("none", "killed once"):
            assert by_trouble[trouble].state == TrialState.COMPLETE
            assert len(by_trouble[trouble].intermediate_values) == 3
        assert len(by_trouble["killed once"].user_attrs["failures"]) == 1
        for trouble, cause, fault in (
            ("exits", "process ended", died),
            ("raises", "RuntimeError: this model cannot go on", died),
            ("hangs", "no progress for 30 s", silent),
            ("not a number", "not finite", silent),
        ):
            trial = by_trouble[trouble]
            fault.saw(f"{trouble}: {trial.state.name}, {trial.user_attrs['cause'][:50]}")
            assert trial.state == TrialState.FAIL
            assert cause in trial.user_attrs["cause"]
            assert len(trial.user_attrs["failures"]) == 1
            assert list(trial.intermediate_values) == [1, 2]  # tried again from the checkpoint of the first
        assert result["metrics"]["trials_failed"] == 4


@pytest.fixture
def storage(cluster: dict[str, str]) -> Path:
    return Path(cluster["RAYLOOM_STORAGE"])


def ended(cluster: dict[str, str], storage: Path) -> list[FrozenTrial]:
    """The trials of the one search that have ended."""
    found = list(storage.glob("runs/tune/*-killed-*/config.yaml"))
    return [each for each in trials_of(cluster, found[0].parent.name) if each.state.is_finished()] if found else []


def wait_for_more(before: int, client: Launched, cluster: dict[str, str], storage: Path) -> None:
    """Until two more trials have ended."""
    wait_until(lambda: len(ended(cluster, storage)) >= before + 2 or client.process.poll() is not None, timeout_s=300)


def kill(client: Launched, ray: Cluster) -> None:
    """SIGKILL of the search's own process."""
    (driver,) = [each for each in ray.processes("jobs.tune", "name=killed") if "python" in each.name()]
    driver.kill()


def stop(client: Launched, ray: Cluster) -> None:
    """``ray job stop``."""
    (submission_id,) = re.findall(r"Job '(\S+)' submitted", client.output)
    stopped = run("ray", "job", "stop", submission_id, environment=ray.environment)
    assert stopped.returncode == 0, stopped.stderr


def test_a_search_that_is_stopped_and_killed_repeats_no_trial(
    cluster: dict[str, str], storage: Path, launch: Launch, faults: Faults
) -> None:
    known: list[FrozenTrial] = []
    for what, harm in (("ray job stop", stop), ("SIGKILL of the driver", kill)):
        with faults("U3", f"{what} after a few trials", "goes on; 0 trials repeated") as fault:
            before = len(ended(cluster, storage))
            client = launch("rayloom", "submit", "tune", DIGITS, *LONG, "tune.resume=true", **cluster)
            wait_for_more(before, client, cluster, storage)
            harm(client, Cluster(cluster))
            client.ends()
            (folder,) = storage.glob("runs/tune/*-killed-*")
            now = trials_of(cluster, folder.name)
            assert any(each.state == TrialState.RUNNING for each in now)
            fault.saw(f"{sum(each.state.is_finished() for each in now)} of 8 trials had ended, none was run again")
            assert_none_was_repeated(known, now)
            known = now
    result, shown = search(cluster, *LONG, "tune.resume=true")
    after = trials_of(cluster, folder.name)
    assert result["run_id"] == folder.name, shown
    assert_none_was_repeated(known, after)
    assert len(after) == 8
    assert all(each.state == TrialState.COMPLETE and len(each.intermediate_values) == 3 for each in after)
    assert len({str(each.params) for each in after}) == 8


def assert_none_was_repeated(before: list[FrozenTrial], after: list[FrozenTrial]) -> None:
    """A trial that had ended is as it was; one that ran has the same values."""
    for each in before:
        if each.state.is_finished():
            assert after[each.number].datetime_complete == each.datetime_complete
        assert after[each.number].params == each.params
