"""Training under Ray Train and under torchrun: the same, whoever runs it."""

from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch
from upath import UPath

from app.published.weights import load_weights
from tests.helpers import SGD, flip, losses, train_alone
from tests.jobs import run_job


@pytest.fixture(scope="module")
def one(home: Path) -> list[float]:
    """The losses of one process."""
    return losses(train_alone(*SGD, f"storage={home / 'storage'}"))


def test_one_and_two_workers_and_ray_draw_the_same_curve(cluster: dict[str, str], one: list[float]) -> None:
    two = losses(train_alone(*SGD, processes=2))
    before = actors(cluster)
    ray = losses(run_job(cluster, "train", "recipes/digits.yaml", *SGD))
    assert len(one) == 20
    assert one[-1] < 0.9 * one[0]
    assert two == pytest.approx(one, abs=1e-4)
    assert ray == pytest.approx(one, abs=1e-4)
    started = {name for actor, name in actors(cluster).items() if actor not in before}
    assert started >= {"TrainController", "RayTrainWorker"}
    assert not started & {"DatasetManager", "PreemptionWatcher", "_AutoscalingCoordinatorActor"}, "nothing for them"


def actors(cluster: dict[str, str]) -> dict[str, str]:
    """Return the class of every actor that the cluster has or had, by the actor's id."""
    token = Path(cluster["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8").strip()
    address = f"{cluster['RAY_API_SERVER_ADDRESS']}/api/v0/actors?limit=10000"
    answer = httpx.get(address, headers={"Authorization": f"Bearer {token}"}, timeout=30.0)
    return {actor["actor_id"]: actor["class_name"] for actor in answer.json()["data"]["result"]["result"]}


def test_the_best_weights_are_kept_and_checked() -> None:
    result = train_alone("train.epochs=3", "train.early_stopping.patience=1")
    trained = load_weights(UPath(result["artifacts"]["weights"]))
    assert trained.targets.labels == [str(digit) for digit in range(10)]
    assert result["metrics"]["val_accuracy"] > 0.5
    folder = Path(result["artifacts"]["weights"])
    flip(folder / "model.safetensors")
    with pytest.raises(Exception, match=r"model\.safetensors.* was changed"):
        load_weights(UPath(folder))


def test_a_run_that_goes_on_with_fewer_steps_than_it_made_validates_and_ends() -> None:
    keys = ["train.early_stopping=null", "train.checkpoint.every_steps=4"]
    stopped = train_alone(*keys, "alerts=[{metric: step, above: 6, do: [stop]}]")
    made = stopped["metrics"]["steps"]
    assert (stopped["status"], stopped["metrics"]["epochs"]) == ("stopped", 0)
    ended = train_alone(*keys, "train.resume=latest", "train.max_steps=5")
    assert (ended["status"], ended["metrics"]["steps"], ended["metrics"]["epochs"]) == ("succeeded", made, 1)
    assert ended["metrics"]["val_loss"] > 0


@pytest.mark.slow
def test_each_rank_tracks_the_statistics_of_its_own_samples_under_powersgd() -> None:
    """The first two steps of PowerSGD reduce in full, so they train the model that other plans do."""
    keys = ["model={factory: tests.parity.numerics:NormalisedCnn}", *SGD, "train.max_steps=2"]
    plans = ("{zero_stage: 0}", "{zero_stage: 0, powersgd: {rank: 2}}")
    plain, reduced = (
        safetensors.torch.load_file(Path(result["artifacts"]["weights"]) / "model.safetensors")
        for result in (train_alone(*keys, f"train.plan={plan}", processes=2) for plan in plans)
    )
    for name in plain:
        torch.testing.assert_close(reduced[name], plain[name], rtol=1e-5, atol=1e-6)
