"""A model that was trained elsewhere: imported, deployed by its name, asked, and undeployed."""

from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.helpers import rayloom
from tests.importing import EXACT, WIDTH, dense, right
from tests.jobs import run_job


@pytest.mark.usefixtures("emptied")
def test_an_imported_model_is_deployed_by_its_name_without_a_recipe(cluster: dict[str, str], tmp_path: Path) -> None:
    path = dense(tmp_path / "model.onnx")
    told = rayloom("models", "import", "dense", str(path), *EXACT, environment=cluster)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "'rayloom submit deploy dense' with default settings" in told.stdout
    deployed = run_job(cluster, "deploy", "dense", "serve.threads=1")
    assert deployed["artifacts"]["model"] == "dense/1"
    pixels = np.random.default_rng(5).standard_normal((3, WIDTH)).astype(np.float32)
    given = {"name": "pixels", "shape": list(pixels.shape), "datatype": "FP32", "data": pixels.tolist()}
    url = f"{deployed['artifacts']['http']}/v2/models/dense"
    (output,) = httpx.post(f"{url}/infer", json={"inputs": [given]}).json()["outputs"]
    np.testing.assert_array_equal(
        np.array(output["data"], np.float32).reshape(-1, WIDTH), right(path, {"pixels": pixels})["logits"]
    )
    assert httpx.get(url).json()["inputs"] == [{"name": "pixels", "datatype": "FP32", "shape": [-1, WIDTH]}]
    assert "dense" not in run_job(cluster, "undeploy", "dense")["metrics"]["models"]
