"""The prepared data of a search, for its trials and for the training that follows."""

from pathlib import Path

import pytest
from upath import UPath

from app.config import load_recipe
from app.runs import Run
from app.training.run import open_run, prepare_run
from app.tuning.trial_data import find_data, prepare_data
from tests.helpers import ROOT


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
    data = prepare_run(run, prepared=location)
    with run.until_result:
        open_run(run, data)
    saved = {file.name: file.read_bytes() for file in (run.folder / "data").iterdir()}
    assert saved == {file.name: file.read_bytes() for file in location.iterdir()}
    assert "test.parquet" in saved, "what is published is measured on it"
    assert f"data builtin:digits: as prepared in {location}" in capsys.readouterr().out
