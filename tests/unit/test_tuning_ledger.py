"""What Ray Tune says of trials, as the study keeps it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.trial import TrialState
from sqlalchemy import make_url
from upath import UPath

from app.config import load_recipe
from app.tuning.budget import Budget
from app.tuning.ledger import Ledger
from app.tuning.results import HEARD, NUMBER, VALUES
from app.tuning.space import load_space
from app.tuning.study import SearchStudy
from app.tuning.table import Table
from tests.helpers import ROOT


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
