"""What ends a search before its last trial: time and epochs, also those that were spent before a stop."""

import json
from pathlib import Path

from sqlalchemy.engine import URL
from upath import UPath

from app.tuning.budget import SearchBudget
from app.tuning.schedulers import create_promotion
from app.tuning.study import SearchStudy
from app.tuning.study_callback import StudyCallback
from app.tuning.table import Table
from app.tuning.trial_config import EpochResult
from tests.studies import MAX_TRIALS, ask, create, ray_trial, recipe_with, resume

PATIENT = "tune.stop.patience=2"


def budget_with(*overrides: str, epochs: int = 0, seconds: float = 0.0) -> SearchBudget:
    tune = recipe_with(*overrides).tune
    assert tune is not None
    return SearchBudget(tune.stop, tune.objectives[0], epochs, seconds)


def test_time_counts_on_from_what_was_spent_before() -> None:
    assert not budget_with("tune.stop.time_s=60", seconds=30.0).stop_all()
    over = budget_with("tune.stop.time_s=60", seconds=60.1)
    assert over.stop_all()
    assert over.reason == "tune.stop.time_s 60 is over"


def test_epochs_count_on_from_what_was_trained_before() -> None:
    budget = budget_with("tune.stop.epochs=5", epochs=3)
    budget.record_epoch()
    assert not budget.stop_all()
    budget.record_epoch()
    assert budget.stop_all()
    assert budget.reason == "tune.stop.epochs 5 are trained"


def test_patience_counts_trials_in_the_order_in_which_they_ended_also_over_a_restart(url: URL) -> None:
    study = create(url)
    late, *others = [ask(study) for _ in range(5)]
    for number, value in zip(others[:2], (0.5, 0.4), strict=True):
        study.complete(number, [value], stopped_early=False)
        budget_with(PATIENT).check_patience(study)
    study, budget = resume(url), budget_with(PATIENT)
    for number, value in ((late, 0.9), (others[2], 0.3), (others[3], 0.9)):
        study.complete(number, [value], stopped_early=False)
        assert budget.reason is None
        budget.check_patience(study)
    assert budget.reason == "tune.stop.patience: nothing better in the last 2 trials that ended or were paused"


def test_no_note_grows_with_the_number_of_trials(url: URL) -> None:
    """MySQL stores at most 65,535 bytes per attribute."""
    study = create(url)
    for _ in range(2):
        study.complete(ask(study), [0.25], stopped_early=False)
    before = sizes_of_notes(study)
    for _ in range(6):
        study.complete(ask(study), [0.25], stopped_early=False)
    assert sizes_of_notes(study) == before
    assert resume(url).rung_results == [0.25] * 8


def sizes_of_notes(study: SearchStudy) -> tuple[dict[str, int], dict[str, int]]:
    """Return the length in characters of each attribute of the study and of its last trial."""
    notes = (study.study.user_attrs, study.trials[-1].user_attrs)
    of_study, of_trial = ({key: len(json.dumps(value)) for key, value in noted.items()} for noted in notes)
    return of_study, {**of_trial, "values": 0}  # drawn values vary in length


def test_patience_counts_trials_that_wait_at_a_rung(url: URL, tmp_path: Path) -> None:
    recipe = recipe_with(PATIENT)
    assert recipe.tune is not None
    study, budget = create(url), budget_with(PATIENT)
    promotion = create_promotion(recipe.tune, 4, known=[])
    callback = StudyCallback(
        study, recipe.tune, UPath(tmp_path), budget, Table(recipe.tune.objectives, 4, 4), promotion, lambda: None
    )
    for value, is_over in ((0.5, False), (0.6, False), (0.4, False), (0.6, True)):
        proposal = study.ask(MAX_TRIALS)
        assert proposal is not None
        result = EpochResult(epoch=1, value=value, cost=(-value, 0.0)).model_dump()
        trial = ray_trial(proposal, last_result=result)
        callback.on_trial_start(trial=trial)
        callback.on_trial_result(trial=trial, result=result)
        callback.on_trial_complete(trial=trial)
        assert callback.broken is None
        assert budget.stop_all() is is_over
    assert study.ended == []


def test_a_search_that_goes_on_knows_what_was_spent_when_its_last_epoch_was_heard_of(url: URL, tmp_path: Path) -> None:
    recipe, study, budget = recipe_with("tune.scheduler=none"), create(url), budget_with(seconds=100.0)
    assert recipe.tune is not None
    proposal = study.ask(MAX_TRIALS)
    assert proposal is not None
    callback = StudyCallback(study, recipe.tune, UPath(tmp_path), budget, Table([], 3, 4), None, lambda: None)
    trial = ray_trial(proposal)
    callback.on_trial_start(trial=trial)
    callback.on_trial_result(trial=trial, result=EpochResult(epoch=1, value=0.5, cost=(-0.5, 0.0)).model_dump())
    assert callback.broken is None
    after = resume(url)
    assert after.epochs_trained == 1
    assert 100.0 <= after.seconds <= budget.seconds
