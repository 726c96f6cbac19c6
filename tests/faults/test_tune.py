"""Searches whose trials and drivers die: the other trials go on, and none that has ended is run again."""

import json
import re
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import make_url
from upath import UPath

from app.tuning.trials import epochs_of, is_paused
from tests.helpers import latest, run, wait_until
from tests.launch import Cluster, Launch, Launched
from tests.postgres import PostgresServer
from tests.search import DIGITS, search, trials_in, trials_of
from tests.studies import locked
from tests.tables import Faults

MODEL = "model.factory=tests.faults.troubled:TroubledCnn"
LONG = [
    "name=killed", MODEL, "model.args={width: 16, pause_s: 0.15}", "train.epochs=3", "train.early_stopping=null",
    "tune.trials=8", "tune.space=tests.faults.troubled:rates", "tune.reduction_factor=2",
]  # fmt: skip
"""A search that is long enough to be killed on the way; its trials wait after each epoch."""
WHOLE = ["tune.scheduler=none", "tune.trials=4"]
"""With it: a shorter one, whose trials all train to their end."""
GOES_ON = "going on from step"
TRAINS = ("ray::", ".train")
"""In the title of a trial's process, whatever Ray Tune calls the class."""

ONE_RETRY = "retried once, then FAIL; 0 other trials lost"
HANG_TIMEOUT_S = 30


def test_trials_fail_alone_are_retried_and_say_why(cluster: dict[str, str], tmp_path: Path, faults: Faults) -> None:
    with (
        faults("U1", "a trial is killed, exits, raises, asks for too much memory", ONE_RETRY) as died,
        faults("U5", "a trial's loss is NaN; a trial hangs", "FAIL with the cause, after one retry; 40 s") as silent,
    ):
        result, _ = search(
            cluster,
            *("name=troubled", MODEL, f"model.args={{trouble: none, batch: 30, once: {tmp_path / 'once'}}}"),
            *("train.epochs=3", f"train.hang_timeout_s={HANG_TIMEOUT_S}", "train.early_stopping=null"),
            "train.checkpoint.background=false",  # the trouble may begin before one is written in the background
            *("tune.space=tests.faults.troubled:troubles", "tune.sampler=grid", "tune.scheduler=none"),
        )
        by_trouble = {trial.params["model.args.trouble"]: trial for trial in trials_of(cluster, result["run_id"])[:7]}
        assert len(by_trouble) == 7
        for trouble in ("none", "killed once"):
            assert by_trouble[trouble].state == TrialState.COMPLETE
            assert len(by_trouble[trouble].intermediate_values) == 3
        assert len(by_trouble["killed once"].user_attrs["failures"]) == 1
        for trouble, cause, fault in (
            ("exits", "process ended", died),
            ("raises", "RuntimeError: this model cannot go on", died),
            ("out of memory", "you tried to allocate", died),
            ("hangs", f"no progress for {HANG_TIMEOUT_S} s", silent),
            ("not a number", "not finite", silent),
        ):
            trial = by_trouble[trouble]
            fault.saw(f"{trouble}: {trial.state.name}, {trial.user_attrs['cause'][:50]}")
            assert trial.state == TrialState.FAIL
            assert cause in trial.user_attrs["cause"]
            assert len(trial.user_attrs["failures"]) == 1
            assert list(trial.intermediate_values) == [1, 2]  # tried again from the checkpoint of the first
        hung_at = datetime.fromtimestamp((tmp_path / "hangs").stat().st_mtime)
        noticed = (by_trouble["hangs"].datetime_complete or datetime.max) - hung_at
        silent.saw(f"a hang of the second attempt is filed after {noticed.total_seconds():.0f} s")
        assert timedelta(seconds=HANG_TIMEOUT_S) < noticed < timedelta(seconds=HANG_TIMEOUT_S + 10)
        assert result["metrics"]["trials_failed"] == 5


@pytest.fixture
def storage(cluster: dict[str, str]) -> Path:
    return Path(cluster["RAYLOOM_STORAGE"])


def rest(cluster: dict[str, str], storage: Path) -> list[FrozenTrial]:
    """The trials of the one search that have ended, or wait at a rung."""
    found = list(storage.glob("runs/tune/*-killed-*/config.yaml"))
    trials = trials_of(cluster, found[0].parent.name) if found else []
    return at_rest(trials)


def at_rest(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that have ended or are waiting at a rung."""
    return [trial for trial in trials if trial.state.is_finished() or is_paused(trial)]


def wait_for_more(before: int, client: Launched, cluster: dict[str, str], storage: Path) -> None:
    """Until two more trials rest."""
    wait_until(lambda: len(rest(cluster, storage)) >= before + 2 or client.process.poll() is not None, timeout_s=300)


def kill(client: Launched, ray: Cluster) -> None:
    """SIGKILL of the search's own process."""
    (driver,) = [process for process in ray.processes("jobs.tune", "name=killed") if "python" in process.name()]
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
            before = len(rest(cluster, storage))
            client = launch("rayloom", "submit", "tune", DIGITS, *LONG, "tune.resume=true", **cluster)
            wait_for_more(before, client, cluster, storage)
            harm(client, Cluster(cluster))
            client.ends()
            (folder,) = storage.glob("runs/tune/*-killed-*")
            now = trials_of(cluster, folder.name)
            assert any(item.state == TrialState.RUNNING for item in now)
            fault.saw(f"{len(rest(cluster, storage))} of 8 trials had ended or waited, none was run again")
            assert_none_was_repeated(known, now)
            known = now
    with faults("U1", "SIGKILL of the process of a trial that was promoted", "retried from its checkpoint") as fault:
        client = launch("rayloom", "submit", "tune", DIGITS, *LONG, "tune.resume=true", **cluster)
        log = folder / "trials" / f"{promoted(client, cluster, folder):04d}/log.txt"
        attempts = log.read_text(encoding="utf-8").count(GOES_ON)
        actors = Cluster(cluster).processes(*TRAINS)
        (actor,) = [
            actor_process for actor_process in actors if str(log) in [file.path for file in actor_process.open_files()]
        ]
        actor.kill()
        result = client.result()
        after = trials_of(cluster, folder.name)
        retried = [item for item in after if item.user_attrs.get("failures")]
        fault.saw(f"{len(retried)} retried, {sum(item.state == TrialState.FAIL for item in after)} failed")
        assert [item.number for item in retried] == [int(log.parent.name)]
        assert log.read_text(encoding="utf-8").count(GOES_ON) > attempts
    assert result["run_id"] == folder.name, client.output
    assert_none_was_repeated(known, after)
    assert len(after) == 8
    assert {item.state for item in after} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert all(sorted(item.intermediate_values) == list(range(1, 1 + max(item.intermediate_values))) for item in after)
    assert all(max(item.intermediate_values) == 3 for item in after if item.state == TrialState.COMPLETE)
    assert result["metrics"]["epochs_trained"] == sum(len(item.intermediate_values) for item in after)
    assert len({str(item.params) for item in after}) == 8
    for item in known:
        text = (folder / f"trials/{item.number:04d}/log.txt").read_text(encoding="utf-8")
        assert not is_paused(item) or text.count("epoch 1/3  loss") == 1, "its checkpoint was not taken up"


def promoted(client: Launched, cluster: dict[str, str], folder: Path) -> int:
    """Wait until a trial trains on from its checkpoint; its number."""
    logs = {path: path.read_text(encoding="utf-8").count(GOES_ON) for path in folder.glob("trials/*/log.txt")}
    goes_on: list[int] = []

    def look() -> bool:
        running = [trial.number for trial in trials_of(cluster, folder.name) if trial.state == TrialState.RUNNING]
        for log, before in logs.items():
            if int(log.parent.name) in running and log.read_text(encoding="utf-8").count(GOES_ON) > before:
                goes_on.append(int(log.parent.name))
        return bool(goes_on) or client.process.poll() is not None

    wait_until(look, timeout_s=120)
    return goes_on[0]


def test_a_search_waits_for_its_locked_study(
    cluster: dict[str, str], storage: Path, launch: Launch, faults: Faults
) -> None:
    with faults("U2", "a search's study is locked for 15 s", "waited for; no trial fails or is left") as fault:
        client = launch("rayloom", "submit", "tune", DIGITS, *latest([*LONG, *WHOLE, "name=locked"]), **cluster)
        client.says(" complete ")
        (file,) = storage.glob("studies/*-locked-*.db")
        epochs = epochs_in(storage, "locked")
        with locked(make_url(f"sqlite:///{file}"), 15) as lock:
            wait_until(lambda: epochs_in(storage, "locked") > epochs)  # which cannot be written into the study
            lock.wait()
        assert_all_complete(trials_of(cluster, client.result()["run_id"]), 4)
        fault.saw("4 trials complete, with every epoch")


def test_a_search_waits_for_its_database_server(
    cluster: dict[str, str], storage: Path, launch: Launch, postgres: PostgresServer, faults: Faults
) -> None:
    url = postgres.url.set(password="not-to-be-shown").render_as_string(hide_password=False)
    with faults("U2", "a search's PostgreSQL server restarts", "waited for; no trial fails or is left") as fault:
        environment = ["--runtime-env-json", json.dumps({"env_vars": {"STUDIES": url}})]
        overrides = latest([*LONG, *WHOLE, "name=served"])
        command = ["python", "-m", "jobs.tune", DIGITS, *overrides, "tune.storage=env:STUDIES"]
        client = launch("ray", "job", "submit", *environment, "--working-dir", ".", "--", *command, **cluster)
        client.says(" complete ")
        wait_until(postgres.is_at_rest)  # what it is told just then is lost with it, and ends the search
        postgres.stop()
        epochs = epochs_in(storage, "served")
        wait_until(lambda: epochs_in(storage, "served") > epochs)
        postgres.start()
        run_id = client.result()["run_id"]
        study = optuna.load_study(study_name=run_id, storage=url)
        assert_all_complete(study.get_trials(deepcopy=False), 4)
        assert "not-to-be-shown" not in client.output
        fault.saw("4 trials complete, with every epoch")


def test_a_search_on_s3_goes_on_when_its_machine_is_lost(
    cluster: dict[str, str],
    launch: Launch,
    s3: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    root = UPath("s3://searches", use_listings_cache=False)
    root.mkdir()
    environment = ["--runtime-env-json", json.dumps({"env_vars": {**s3, "TMPDIR": str(tmp_path)}})]
    overrides = [*LONG, "storage=s3://searches/storage", "tune.resume=true"]
    command = ["ray", "job", "submit", *environment, "--working-dir", ".", "--", "python", "-m", "jobs.tune", DIGITS]

    def copied() -> list[FrozenTrial]:
        for remote in (root / "storage").glob("studies/*.db"):
            (tmp_path / "copy.db").write_bytes(remote.read_bytes())
            return trials_in(tmp_path / "copy.db", remote.stem)
        return []

    with faults("U3", "SIGKILL of a search on S3, its disk removed", "goes on; 0 trials repeated") as fault:
        client = launch(*command, *overrides, **cluster)
        wait_until(lambda: len(at_rest(copied())) >= 2 or client.process.poll() is not None, timeout_s=300)
        kill(client, Cluster(cluster))
        client.ends()
        known = copied()
        for scratch in tmp_path.glob("rayloom-study-*"):
            shutil.rmtree(scratch)
        client = launch(*command, *overrides, **cluster)
        result = client.result()
        assert f"the study is restored from {result['artifacts']['study']}, written at" in client.output
        after = copied()
        fault.saw(f"{len(at_rest(known))} of 8 trials had ended or waited, none was run again")
        assert_none_was_repeated(known, after)
        assert len(after) == 8
        assert {trial.state for trial in after} == {TrialState.COMPLETE, TrialState.PRUNED}
        assert not list(tmp_path.glob("rayloom-study-*"))
        assert list((root / "storage").glob("runs/tune/*/best.yaml"))


def epochs_in(storage: Path, name: str) -> int:
    """That the trials of a search have trained, whether the study knows of them or not."""
    logs = storage.glob(f"runs/tune/*-{name}-*/trials/*/metrics.jsonl")
    return sum(log.read_text(encoding="utf-8").count('"val_loss"') for log in logs)


def assert_all_complete(trials: list[FrozenTrial], number: int) -> None:
    """None failed on the way, and none was begun twice."""
    assert len(trials) == number
    for trial in trials:
        assert (trial.state, list(trial.intermediate_values)) == (TrialState.COMPLETE, [1, 2, 3])
        assert not trial.user_attrs.get("failures")


def assert_none_was_repeated(before: list[FrozenTrial], after: list[FrozenTrial]) -> None:
    """A trial that had ended is as it was; one that ran has the same values."""
    for item in before:
        if item.state.is_finished():
            assert after[item.number].datetime_complete == item.datetime_complete
        assert after[item.number].params == item.params


@pytest.mark.slow
def test_a_trial_of_two_workers_outlives_one_of_them_and_its_own_process(
    cluster: dict[str, str], storage: Path, launch: Launch, ray: Cluster, faults: Faults
) -> None:
    client = launch(
        *("rayloom", "submit", "tune", DIGITS, "name=pair", MODEL, "model.args={width: 16, pause_s: 0.2}"),
        *("train.epochs=4", "train.early_stopping=null", "tune.trials=1", "tune.workers=2", "tune.scheduler=none"),
        "tune.space=tests.faults.troubled:rates",
        **cluster,
    )

    def has_trained(epochs: int) -> bool:
        found = list(storage.glob("runs/tune/*-pair-*/trials"))
        trials = trials_of(cluster, found[0].parent.name) if found else []
        return bool(trials and epochs_of(trials[0]) >= epochs) or client.process.poll() is not None

    with faults("U1", "SIGKILL of a worker of a trial that has two", "replaced; no failure of the trial"):
        wait_until(lambda: has_trained(1), timeout_s=120)
        ray.processes("RayTrainWorker")[-1].kill()
    with faults("U1", "SIGKILL of the process that leads two workers", "retried, once they are gone") as fault:
        wait_until(lambda: has_trained(2), timeout_s=120)
        (leader,) = ray.processes(*TRAINS)
        leader.kill()
        result = client.result()
        (trial,) = trials_of(cluster, result["run_id"])
        fault.saw(f"{trial.state.name}, {trial.user_attrs['failures'][0][:50]}")
        assert "process ended" in trial.user_attrs["failures"][0]
        assert len(trial.user_attrs["failures"]) == 1
        assert (trial.state, sorted(trial.intermediate_values)) == (TrialState.COMPLETE, [1, 2, 3, 4])
        assert "run 0000 was being trained; waiting" in client.output
    wait_until(ray.is_idle)
