"""What Ray Tune says of trials, as the study keeps it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.trial import TrialState
from sqlalchemy import make_url
from sqlalchemy.engine import URL
from upath import UPath

from app.config import load_recipe
from app.tuning.budget import Budget
from app.tuning.ledger import Ledger
from app.tuning.results import HEARD, NUMBER, VALUES, FinalResult
from app.tuning.space import load_space
from app.tuning.study import SearchStudy
from app.tuning.table import Table
from tests.helpers import ROOT
from tests.studies import MOST, create, recipe_with


def test_a_trial_whose_last_epoch_ends_the_search_is_complete(url: URL, tmp_path: Path) -> None:
    recipe = recipe_with("tune.stop.epochs=2")
    assert recipe.tune is not None
    study, budget = create(url), Budget(recipe.tune.stop, recipe.tune.objectives[0], epochs=1, seconds=0.0)
    ledger = Ledger(study, "none", UPath(tmp_path), budget, Table(recipe.tune.objectives, 2), None)
    proposal = study.ask(MOST)
    assert proposal is not None
    last = FinalResult(epoch=1, value=0.5, cost=-0.5, final_values=[0.5], stopped_early=False).model_dump()
    trial = SimpleNamespace(config={NUMBER: proposal.number, VALUES: proposal.values, HEARD: 0}, last_result=last)
    ledger.on_trial_start(trial=trial)
    ledger.on_trial_result(trial=trial, result=last)
    assert budget.stop_all()
    ledger.on_trial_complete(trial=trial)
    assert ledger.broken is None
    (ended,) = study.ended
    assert (ended.state, ended.value, ended.intermediate_values) == (TrialState.COMPLETE, 0.5, {1: 0.5})


def test_a_trial_whose_process_never_began_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(ROOT / "recipes/digits.yaml")
    assert recipe.tune is not None
    space, objectives = load_space(recipe.tune.space, recipe), recipe.tune.objectives
    study = SearchStudy.create("one", make_url(f"sqlite:///{tmp_path / 'study.db'}"), space, recipe, recipe.tune)
    budget = Budget(recipe.tune.stop, objectives[0], epochs=0, seconds=0.0)
    ledger = Ledger(study, "none", UPath(tmp_path), budget, Table(objectives, 3), None)
    proposal = study.ask(1)
    assert proposal is not None
    error = tmp_path / "error.txt"
    error.write_text("Failure # 1\nno room for the process", encoding="utf-8")
    config = {NUMBER: proposal.number, VALUES: proposal.values, HEARD: 0}
    trial = SimpleNamespace(config=config, pickled_error_file=None, error_file=str(error))
    ledger.on_trial_recover(trial=trial)
    ledger.on_trial_error(trial=trial)
    assert ledger.broken is None
    (ended,) = study.ended
    assert (ended.state, ended.user_attrs["failures"]) == (TrialState.FAIL, ["no room for the process"])
    assert "retried" in capsys.readouterr().out
