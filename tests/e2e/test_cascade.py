"""A cascade as a person deploys it: calibrated by the job, and served under the large model's name."""

import httpx
import pytest
from upath import UPath

from app.repository.repository import Repository
from tests.cascades import publish_stages
from tests.engine_contract import TEXTS
from tests.helpers import run
from tests.jobs import run_job
from tests.launch import Cluster


@pytest.mark.slow
@pytest.mark.usefixtures("emptied")
def test_a_cascade_is_calibrated_deployed_and_says_who_answered(cluster: dict[str, str]) -> None:
    publish_stages(UPath(cluster["RAYLOOM_STORAGE"]))
    cascade = "serve.cascade={before: [tiny], accuracy_floor: 0.8}"
    settings = ["recipes/reviews.yaml", "name=toy", "serve.threads=1", cascade]
    deployed = run_job(cluster, "deploy", *settings, "serve.cpus_per_replica=0.5")
    rule = deployed["metrics"]["cascade"]
    assert (rule["rows"], rule["accuracy_floor"], rule["confidence"]) == (32, 0.8, 0.95)
    asked = f"{deployed['artifacts']['http']}/v1/models/toy/predict"
    answer = httpx.post(asked, json={"inputs": TEXTS[:4]}).json()
    assert f"toy/{answer['model_version']}" == deployed["artifacts"]["model"]
    assert {prediction["stage"] for prediction in answer["predictions"]} <= {0, 1}
    first = Repository(UPath(cluster["RAYLOOM_STORAGE"])).production("tiny")
    room = f"serve.cpus_per_replica={Cluster(cluster).cpus()[1]}"
    again = run_job(cluster, "deploy", *settings, room, succeeds=False)
    assert "the calibration of serve.cascade and the running replicas need" in again["error"]
    refused = run("rayloom", "models", "delete", "tiny", str(first), environment=cluster)
    assert (refused.returncode, "is served at" in refused.stderr) == (2, True), refused.stderr
