"""Train, compile and deploy with storage on S3 only, while processes are killed."""

import json
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from optuna.trial import TrialState
from upath import UPath

from app.artifacts import CHECKPOINTS
from app.storage import to_path
from app.training.checkpoints.store import CheckpointStore
from tests.helpers import local_cluster, submit
from tests.search import DIGITS, search, trials_in
from tests.tables import Faults

NAME = "name=remote"
DEATH, EVERY_STEPS, EPOCHS = 30, 8, 3
"""The second rank kills itself in its 30th step. A checkpoint is written every 8 steps."""


@pytest.fixture(scope="module")
def storage(s3: dict[str, str]) -> Iterator[UPath]:
    """A bucket for this module only. This process can access it, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.items():
            patch.setenv(name, value)
        bucket = to_path(f"s3://remote-{secrets.token_hex(4)}")
        bucket.mkdir()
        yield bucket / "storage"


@pytest.fixture(scope="module")
def remote(s3: dict[str, str], storage: UPath) -> Iterator[dict[str, str]]:
    """A cluster that stores in the bucket, with no storage on its disk."""
    with tempfile.TemporaryDirectory(prefix="rayloom-s3-", ignore_cleanup_errors=True) as home:
        with local_cluster(Path(home), **s3, RAYLOOM_STORAGE=str(storage)) as environment:
            yield environment
        assert not (Path(home) / "storage").exists()


def logged(folder: UPath) -> tuple[list[int], list[int]]:
    """Return the steps and the epochs in a run's metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    return steps, [line["epoch"] for line in lines if "val_loss" in line]


def test_a_search_whose_promoted_trials_go_on_from_objects(
    remote: dict[str, str], storage: UPath, tmp_path: Path, faults: Faults
) -> None:
    with faults("S3", "a search of 20 trials", "promoted trials go on from their checkpoints") as fault:
        result, _ = search(
            remote,
            *(NAME, "model.args={width: 8}", "train.epochs=4", "train.early_stopping=null", "tune.trials=20"),
            *("tune.space=tests.faults.troubled:rates", "tune.reduction_factor=2"),
        )
        folder = storage / "runs/tune" / result["run_id"]
        (study,) = (storage / "studies").glob("*.db")
        (tmp_path / "copy.db").write_bytes(study.read_bytes())
        trials = trials_in(tmp_path / "copy.db", result["run_id"])
        assert len(trials) == 20
        assert {trial.state for trial in trials} == {TrialState.COMPLETE, TrialState.PRUNED}
        assert (folder / "best.yaml").exists()
        resumed = 0
        for trial in trials:
            own = folder / f"trials/{trial.number:04d}"
            steps, epochs = logged(own)
            assert steps == list(range(1, len(steps) + 1))
            assert epochs == list(trial.intermediate_values)
            log = (own / "log.txt").read_text(encoding="utf-8")
            assert "never finished" not in log
            assert log.count("epoch 1/4 ") == 1  # it never began anew
            resumed += "going on from step" in log
        fault.saw(f"{resumed} trials went on from their checkpoints, none began anew")
        assert resumed


@pytest.fixture(scope="module")
def trained(remote: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a training run in which one worker was killed."""
    deaths = tmp_path_factory.mktemp("deaths")
    return submit(
        remote,
        "train",
        *(DIGITS, NAME, f"train.epochs={EPOCHS}", "train.early_stopping=null", "train.max_failures=1"),
        *(f"train.checkpoint.every_steps={EVERY_STEPS}", "train.checkpoint.background=false"),
        "model.factory=tests.faults.models:DyingCnn",
        f"model.args={{width: 8, pause_s: 0.0, deaths: [{DEATH}], folder: {deaths}}}",
    )


def test_a_training_with_a_killed_worker_keeps_every_step_once(
    trained: dict[str, Any], storage: UPath, faults: Faults
) -> None:
    with faults("S3", "SIGKILL of a worker in training", "goes on from the last checkpoint; each step once") as fault:
        metrics, folder = trained["metrics"], storage / "runs/train" / trained["run_id"]
        assert metrics["resumed_from_step"] == DEATH // EVERY_STEPS * EVERY_STEPS
        steps, epochs = logged(folder)
        assert steps == list(range(1, metrics["steps"] + 1))
        assert epochs == list(range(1, EPOCHS + 1))
        store = CheckpointStore(folder / CHECKPOINTS)
        assert all(map(store.is_intact, store.committed()))
        assert len(list((folder / "tensorboard").iterdir())) == 2
        assert not (folder / "heartbeat").exists()
        fault.saw(f"went on from step {metrics['resumed_from_step']} of {metrics['steps']}")


def test_what_was_trained_is_compiled_deployed_and_answers(
    trained: dict[str, Any], remote: dict[str, str], storage: UPath, faults: Faults
) -> None:
    with faults("S3", "compile and deploy", "the endpoint answers") as fault:
        compiled = submit(remote, "compile", DIGITS, NAME, "compile.engines=[onnxruntime]", "compile.precisions=[fp32]")
        version = compiled["artifacts"]["model"]
        assert (storage / "models" / version / "manifest.json").exists()
        deployed = submit(remote, "deploy", DIGITS, NAME)
        pixels = np.linspace(-1, 1, 64).tolist()
        asked = {"inputs": [{"name": "pixel_values", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": pixels}]}
        answer = httpx.post(f"{deployed['artifacts']['http']}/v2/models/remote/infer", json=asked, timeout=30).json()
        assert answer["outputs"][0]["shape"] == [1, 10]
        fault.saw(f"{version} answers")
    objects = Counter(UPath(name).name for name in storage.fs.find(storage.path))
    assert not [name for name in objects if name.endswith(".tmp") or name.startswith(".mark")]
