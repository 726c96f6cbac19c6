"""The prepared data of a search, for its trials and for the training that follows."""

from pathlib import Path

import pytest
from upath import UPath

from app.config import load_recipe
from app.planner.cluster import local_cluster
from app.runs import Run
from app.tasks import find_served_task
from app.training.run import open_run, prepare_run
from app.tuning.space import load_space
from app.tuning.trial_data import find_data, prepare_data, prepare_trials
from tests.helpers import ROOT
from tests.wording import refused


def test_training_takes_what_the_search_has_prepared_for_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(ROOT / "recipes/digits.yaml", [f"storage={tmp_path}", "data.test_fraction=0.1"])
    other = load_recipe(ROOT / "recipes/digits.yaml", [f"storage={tmp_path}", "data.validation_fraction=0.3"])
    folder = UPath(tmp_path / "data")
    assert find_data(recipe, folder) is None
    location = prepare_data(recipe, folder)
    assert find_data(recipe, folder) == location
    assert find_data(other, folder) is None
    monkeypatch.setattr("app.training.run.prepare", lambda recipe: pytest.fail("it was prepared again"))
    run = Run.start("train", recipe)
    plan, data = prepare_run(run, prepared=location)
    with run.until_result:
        open_run(run, plan, data)
    saved = {file.name: file.read_bytes() for file in (run.folder / "data").iterdir()}
    assert saved == {file.name: file.read_bytes() for file in location.iterdir()}
    test = find_served_task(recipe.task).load_test(recipe, run.folder / "data")
    assert test, "what is published is measured on it"
    assert f"data builtin:digits: as prepared in {location}" in capsys.readouterr().out


OWN = "task=app.tasks.classification:ImageClassification"
"""It is asked by the job. A built-in task is asked when the recipe is loaded."""


def test_a_metric_that_the_task_has_not_is_refused_with_prepared_data_too(tmp_path: Path) -> None:
    keys = [f"storage={tmp_path}", "train.early_stopping={metric: val_typo, mode: max}"]
    keys.append(
        "task=app.tasks.classification:ImageClassification"
    )  # a built-in one is asked when the recipe is loaded
    recipe = load_recipe(ROOT / "recipes/digits.yaml", keys)
    location = prepare_data(load_recipe(ROOT / "recipes/digits.yaml", keys[:1]), UPath(tmp_path / "data"))
    with refused("metric.unknown", "train.early_stopping.metric"):
        prepare_run(Run.start("train", recipe), prepared=location)


def test_a_search_for_a_metric_that_the_task_has_not_is_refused(tmp_path: Path) -> None:
    search = "tune={space: 'tune_spaces.image:space', metric: val_typo, mode: max}"
    recipe = load_recipe(ROOT / "recipes/digits.yaml", [f"storage={tmp_path}", search, "data.source=/nowhere", OWN])
    assert recipe.tune
    with refused("metric.unknown", "tune.metric"):
        prepare_trials(Run.start("tune", recipe), recipe.tune, load_space(recipe.tune.space, recipe), local_cluster)
