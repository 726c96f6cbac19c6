"""A job that is started by hand, with no cluster around it."""

from pathlib import Path

from app.config import dump_recipe, load_recipe
from app.runs import Outcome, Run
from app.tuning.outcome import StoppedMetrics
from tests.helpers import ROOT, run


def test_a_job_without_a_cluster_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {"RAYLOOM_STORAGE": str(tmp_path / "storage"), "RAYLOOM_HOME": str(tmp_path / "home")}
    done = run("python", "-m", "jobs.train", "recipes/digits.yaml", environment=environment)
    assert done.returncode == 1
    assert "rayloom up" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "storage").exists()


def test_a_lifecycle_whose_training_goes_on_does_not_search_again(tmp_path: Path) -> None:
    environment = {"RAYLOOM_STORAGE": str(tmp_path / "storage"), "RAYLOOM_HOME": str(tmp_path / "home")}
    recipe = load_recipe(ROOT / "recipes/digits.yaml", [f"storage={tmp_path / 'storage'}"])
    search, training = Run.start("tune", recipe), Run.start("train", recipe)
    search.open()
    (search.folder / "best.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    search.end(Outcome(StoppedMetrics(trials=1, epochs_trained=1), {"best_recipe": str(search.folder / "best.yaml")}))
    training.open()
    command = ["python", "-m", "jobs.lifecycle", "recipes/digits.yaml", "train.resume=latest"]
    done = run(*command, environment=environment)
    assert "rayloom up" in done.stderr
    assert f"run {training.run_id} goes on" in done.stdout
    assert [each.name for each in (tmp_path / "storage/runs/tune").iterdir()] == [search.run_id]
