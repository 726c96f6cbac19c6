"""What Ray Tune says of trials, as the study keeps it."""

from pathlib import Path

import pytest
from optuna.trial import TrialState
from ray import cloudpickle
from sqlalchemy.engine import URL
from upath import UPath

from app.config import Objective
from app.errors import ActorBusyError, UnsharedStorageError
from app.tracking.tracked_run import TRIAL_FILE, TrialNote
from app.tuning.budget import SearchBudget
from app.tuning.study import Proposal, SearchStudy
from app.tuning.study_callback import StudyCallback
from app.tuning.table import Table
from app.tuning.trial_config import CLONED, LAST_REPORTED_EPOCH, EpochResult, FinalResult
from app.tuning.trial_notes import TrialNotes
from app.tuning.trials import ENDINGS, objective_values
from tests.studies import MAX_TRIALS, create, ray_trial, recipe_with, resume


def begin(url: URL, folder: Path, *overrides: str, epochs: int = 0) -> tuple[SearchStudy, StudyCallback]:
    """A study, new or not, and who writes it."""
    given = ("tune.scheduler=none", *overrides)
    config = recipe_with(*given).tune
    assert config is not None
    study = (resume if Path(str(url.database)).exists() else create)(url, *given)
    budget = SearchBudget(config.stop, config.objectives[0], epochs, seconds=0.0)
    return study, StudyCallback(
        study, config, UPath(folder), budget, Table(config.objectives, 3, 4), None, lambda: None
    )


def propose(study: SearchStudy) -> Proposal:
    proposal = study.ask(MAX_TRIALS)
    assert proposal is not None
    return proposal


def error_file(folder: Path, text: str) -> str:
    """As Ray Tune writes it."""
    file = folder / "error.txt"
    with file.open("a", encoding="utf-8") as failures:
        failures.write(f"Failure # 1 (occurred at 2026-11-22_20-00-00)\n{text}\n")
    return str(file)


def test_a_trial_whose_last_epoch_ends_the_search_is_complete(url: URL, tmp_path: Path) -> None:
    study, callback = begin(url, tmp_path, "tune.stop.epochs=2", epochs=1)
    last = FinalResult(epoch=1, value=0.5, cost=(-0.5, 0.0), final_values=[0.5], stopped_early=False).model_dump()
    trial = ray_trial(propose(study), last_result=last)
    callback.on_trial_start(trial=trial)
    callback.on_trial_result(trial=trial, result=last)
    callback.on_trial_complete(trial=trial)
    assert callback.broken is None
    (ended,) = study.ended
    assert (ended.state, ended.value, ended.intermediate_values) == (TrialState.COMPLETE, 0.5, {1: 0.5})


@pytest.mark.parametrize(
    ("own_epochs", "state", "values"), [(2, TrialState.COMPLETE, {"val_accuracy": 0.6}), (0, TrialState.PRUNED, {})]
)
def test_a_trial_that_continued_from_another_has_the_value_of_its_own_epochs(
    url: URL, tmp_path: Path, own_epochs: int, state: TrialState, values: dict[str, float]
) -> None:
    study, callback = begin(url, tmp_path, "tune.scheduler=pbt")
    notes = TrialNotes(UPath(tmp_path), study, [Objective("val_accuracy", "max")])
    trial = ray_trial(propose(study))
    trial.config |= {LAST_REPORTED_EPOCH: 3, CLONED: True}
    callback.on_trial_start(trial=trial)
    for epoch, value in [(4, 0.6), (5, 0.5)][:own_epochs]:
        callback.on_trial_result(
            trial=trial, result=EpochResult(epoch=epoch, value=value, cost=(-value, 0.0)).model_dump()
        )
    values_of_other = FinalResult(
        epoch=3 + own_epochs, value=0.5, cost=(-0.5, 0.0), final_values=[0.98], stopped_early=False
    )
    trial.last_result = values_of_other.model_dump()
    callback.on_trial_result(trial=trial, result=trial.last_result)
    callback.on_trial_complete(trial=trial)
    notes.on_trial_complete(trial=trial)
    assert callback.broken is None
    (ended,) = study.ended
    assert (ended.state, objective_values(ended)) == (state, list(values.values()))
    note = TrialNote.model_validate_json((tmp_path / "0000" / TRIAL_FILE).read_bytes())
    assert (note.state, note.objectives) == (ENDINGS[state], values)


def test_a_trial_whose_process_never_began_fails_alone(
    url: URL, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, callback = begin(url, tmp_path)
    trial = ray_trial(propose(study), error_file=error_file(tmp_path, "no room for the process"))
    callback.on_trial_recover(trial=trial)
    callback.on_trial_error(trial=trial)
    assert callback.broken is None
    (ended,) = study.ended
    assert (ended.state, ended.user_attrs["failures"]) == (TrialState.FAIL, ["no room for the process"])
    assert "retried" in capsys.readouterr().out


def test_a_node_that_does_not_see_the_search_ends_it(url: URL, tmp_path: Path) -> None:
    study, callback = begin(url, tmp_path)
    pickled = tmp_path / "error.pkl"
    pickled.write_bytes(cloudpickle.dumps(UnsharedStorageError("the nodes do not share storage")))
    callback.on_trial_recover(trial=ray_trial(propose(study), pickled_error_file=str(pickled)))
    assert isinstance(callback.broken, UnsharedStorageError)
    assert not study.ended


def test_a_trial_that_ran_out_of_memory_says_so_whatever_it_failed_of_before(url: URL, tmp_path: Path) -> None:
    study, callback = begin(url, tmp_path)
    proposal, pickled = propose(study), tmp_path / "error.pkl"
    pickled.write_bytes(cloudpickle.dumps(RuntimeError("this model cannot go on")))
    trial = ray_trial(proposal, error_file=error_file(tmp_path, "…"), pickled_error_file=str(pickled))
    callback.on_trial_recover(trial=trial)
    error_file(tmp_path, "Task was killed due to the node running low on memory.\nTop 10 memory users:\nRefer to …")
    callback.on_trial_error(trial=trial)
    (ended,) = study.ended
    assert ended.user_attrs["failures"] == ["RuntimeError: this model cannot go on"]
    assert ended.user_attrs["cause"] == "Task was killed due to the node running low on memory."


def test_a_trial_is_retried_as_often_as_the_recipe_says_over_promotions_and_restarts(url: URL, tmp_path: Path) -> None:
    study, callback = begin(url, tmp_path, "tune.retries=2")
    proposal = propose(study)
    first = ray_trial(proposal, error_file=error_file(tmp_path, "no room"))
    callback.on_trial_start(trial=first)
    assert first.max_failures == 2
    first.num_failures = 1
    callback.on_trial_recover(trial=first)
    callback.on_trial_start(trial=first)
    assert first.max_failures == 2, "of which one has been"
    promoted, resumed = ray_trial(proposal), ray_trial(proposal)
    callback.on_trial_start(trial=promoted)
    assert promoted.max_failures == 1
    again, after = begin(url, tmp_path, "tune.retries=2")
    assert propose(again) == proposal
    after.on_trial_start(trial=resumed)
    assert resumed.max_failures == 1
    assert (callback.broken, after.broken) == (None, None)


def test_a_trial_that_met_a_busy_actor_is_proposed_again_and_has_not_failed(
    url: URL, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study, callback = begin(url, tmp_path)
    proposal, pickled = propose(study), tmp_path / "error.pkl"
    pickled.write_bytes(cloudpickle.dumps(ActorBusyError("trials/0000 is still being written")))
    callback.on_trial_error(trial=ray_trial(proposal, pickled_error_file=str(pickled)))
    assert callback.broken is None
    assert not study.ended
    assert propose(study) == proposal
    assert "trials/0000 is still being written" in caplog.text


def test_the_table_shows_a_trial_that_lingers_after_its_last_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    table = Table([], epochs=3, trials=4)
    for number in (1, 2):
        table.started(number, {"width": 8})
    table.epoch(1, EpochResult(epoch=3, value=0.5, cost=(0.5, 0.0)))
    now_s = 60.0
    table.epoch(2, EpochResult(epoch=1, value=0.75, cost=(0.75, 0.0)))
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [["1", "running", "3/3"], ["2", "running", "1/3"]]
