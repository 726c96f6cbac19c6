"""The pretrained weights that a run started from: recorded, and the same on every node and for every trial."""

import hashlib
import shutil
from pathlib import Path

import pytest

from app.artifacts import CHECKPOINTS
from app.config import Recipe, load_recipe, load_stored_recipe
from app.planner.cluster import local_cluster
from app.pretrained import open_pretrained
from app.runs import Run
from app.training.publication import finish_run
from app.training.run import open_run, prepare_run
from app.training.session import train
from app.training.worker import start_worker
from app.tuning.outcome import ParetoTrial, best_yaml
from app.tuning.space import load_space
from app.tuning.trial_config import trial_recipe
from app.tuning.trial_data import prepare_trials
from jobs.tune import start_or_resume
from tests.pretrained import recipe_of, write_encoder
from tests.wording import refused

COMMIT, NEWER = "a" * 40, "b" * 40


def sha256_in(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_worker_that_reads_other_weights_than_the_run_recorded_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert")
    run = Run.start("train", recipe_of(tmp_path, folder))
    plan, data = prepare_run(run)
    open_run(run, plan, data)
    recorded = sha256_in(folder)
    assert load_stored_recipe(str(run.folder / "config.yaml")).model.weights_sha256 == recorded
    write_encoder(folder, labels=2)  # as a node may have it whose copy is of another day
    with refused("pretrained.changed", "model.pretrained") as error:
        train(plan, data, start_worker(run.recipe.train), run.folder)
    assert f"their sha256 is {sha256_in(folder)}, model.weights_sha256 is {recorded}" in str(error.value)
    assert not (run.folder / CHECKPOINTS).exists()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache on this disk, without a network. It holds ``some/bert`` at two commits; main is the first."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub/models--some--bert"
    write_encoder(repository / "snapshots" / COMMIT)
    write_encoder(repository / "snapshots" / NEWER, labels=2)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    return repository


def test_a_name_of_the_hub_stands_for_the_commit_of_the_runs_beginning(hub: Path, tmp_path: Path) -> None:
    run = Run.start("train", recipe_of(tmp_path, Path("some/bert"), "train.max_steps=1", "train.early_stopping=null"))
    plan, data = prepare_run(run)
    assert (plan.recipe.model.pretrained, plan.recipe.model.commit) == ("some/bert", COMMIT)
    (hub / "refs/main").write_text(NEWER)
    open_run(run, plan, data)
    outcome = finish_run(run, data, train(plan, data, start_worker(run.recipe.train), run.folder))
    kept = load_stored_recipe(f"{outcome.artifacts['weights']}/recipe.yaml")
    first = sha256_in(hub / "snapshots" / COMMIT)
    assert kept.model.origin == f"some/bert@{COMMIT} sha256:{first}"
    later = Run.start("train", recipe_of(tmp_path, Path("some/bert")))
    renewed = prepare_run(later)[0].recipe
    assert renewed.model.commit == NEWER
    assert renewed.as_given.model == run.recipe.as_given.model, "a resumed run compares what was given"


def test_a_name_of_the_hub_may_have_a_revision(hub: Path) -> None:
    (hub / "refs/v2").write_text(NEWER)
    assert open_pretrained("some/bert@v2").commit == open_pretrained(f"some/bert@{NEWER}").commit == NEWER
    with refused("hub.no_answer", "model.pretrained"):
        open_pretrained("some/bert@v3")


def search(tmp_path: Path, folder: Path, *overrides: str) -> Recipe:
    return recipe_of(tmp_path, folder, "tune={space: 'tune_spaces.image:rates', trials: 2}", *overrides)


def described(run: Run) -> Recipe:
    """Return the recipe that the search's trials vary."""
    assert run.recipe.tune
    return prepare_trials(run, run.recipe.tune, load_space(run.recipe.tune.space, run.recipe), local_cluster)[1]


def test_a_search_keeps_what_its_trials_start_from(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert")
    recipe = search(tmp_path, folder)
    run = start_or_resume("tune", recipe)
    varied = described(run)
    sha256 = sha256_in(folder)
    assert varied.model.weights_sha256 == run.recipe.model.weights_sha256 == sha256
    best = ParetoTrial(trial=1, epochs=2, values={"val_accuracy": 0.9}, params={"train.optimizer.lr": 0.01})
    (file := tmp_path / "best.yaml").write_text(best_yaml(run.recipe, best, run.run_id), encoding="utf-8")
    found = load_recipe(file).model
    assert (found.weights_sha256, found.configuration) == (sha256, varied.model.configuration)
    assert found.configuration
    run.open()
    again = start_or_resume("tune", search(tmp_path, folder, "tune.resume=true"))
    assert (again.run_id, again.recipe.model) == (run.run_id, run.recipe.model)
    write_encoder(folder, labels=2)
    with refused("pretrained.changed", "model.pretrained"):
        described(again)


def test_a_trial_that_draws_another_pretrained_model_reads_that_ones_configuration(tmp_path: Path) -> None:
    folder, other = write_encoder(tmp_path / "bert"), write_encoder(tmp_path / "other", hidden_size=16)
    run = Run.start("tune", search(tmp_path, folder))
    varied = described(run)
    assert varied.tune
    drawn = trial_recipe(varied, {"model.pretrained": str(other)}, varied.tune)
    assert (drawn.model.configuration, drawn.model.weights_sha256) == (None, None)
    best = ParetoTrial(trial=1, epochs=2, values={}, params={"model.pretrained": str(other)})
    (file := tmp_path / "best.yaml").write_text(best_yaml(run.recipe, best, run.run_id), encoding="utf-8")
    shutil.rmtree(folder)
    trained = Run.start("train", load_recipe(file))
    model = prepare_run(trained)[0].recipe.model
    assert model.weights_sha256 == sha256_in(other)
    assert model.configuration
    assert model.configuration["hidden_size"] == 16
