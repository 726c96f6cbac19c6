"""A version on its way into production: a canary beside the old one, then all requests."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from upath import UPath

from tests.engine_contract import PROCESSOR, SIGNATURE, TEXTS, exported
from tests.helpers import rayloom
from tests.jobs import run_job
from tests.toy import LABELS, publish_version

DEPLOY = ["deploy", "recipes/reviews.yaml", "name=tried", "serve.threads=1"]


@pytest.mark.usefixtures("emptied")
def test_a_canary_is_served_promoted_and_then_answers_everything(cluster: dict[str, str]) -> None:
    def models(*arguments: str) -> tuple[int, str]:
        done = rayloom("models", *arguments, environment=cluster)
        return done.returncode, done.stdout + done.stderr

    def versions(endpoint: str) -> Counter[str]:
        asked = f"{endpoint}/v1/models/tried/predict"
        return Counter(httpx.post(asked, json={"inputs": TEXTS[:2]}).json()["model_version"] for _ in range(40))

    for _ in range(2):
        publish_version(UPath(cluster["RAYLOOM_STORAGE"]), "tried", exported(), SIGNATURE, PROCESSOR, LABELS)
    tried = run_job(
        cluster, *DEPLOY, "serve.version=1", "serve.canary={percent: 50, version: 2}", "serve.replicas=[1, 2]"
    )
    assert tried["artifacts"]["model"] == "tried/1"
    assert 1 <= tried["metrics"]["replicas"] <= 2  # another model may ask for two
    endpoint = tried["artifacts"]["http"]
    assert set(versions(endpoint)) == {"1", "2"}
    assert "tried version 2 (canary, 50 %)" in rayloom("status", environment=cluster).stdout
    code, told = models("delete", "tried", "2")
    assert (code, "version 2, is served at" in told) == (2, True), told
    code, told = models("promote", "tried", "2")
    assert (code, "the endpoint still serves version 1" in told) == (0, True), told
    run_job(cluster, *DEPLOY)
    assert versions(endpoint) == {"2": 40}
    code, told = models("delete", "tried", "1")
    assert (code, "version 1, is previous" in told) == (2, True), told


@pytest.mark.slow
@pytest.mark.usefixtures("emptied")
def test_deploys_at_one_time_add_up_one_that_is_late_changes_nothing_and_undeploy_takes_one_away(
    cluster: dict[str, str],
) -> None:
    def job(name: str, kind: str = "deploy", *overrides: str, succeeds: bool = True) -> dict[str, Any]:
        return run_job(
            cluster, kind, "recipes/reviews.yaml", f"name={name}", "serve.version=1", *overrides, succeeds=succeeds
        )

    for name in ("one", "two", "late"):
        publish_version(UPath(cluster["RAYLOOM_STORAGE"]), name, exported(), SIGNATURE, PROCESSOR, LABELS)
    with ThreadPoolExecutor() as pool:
        endpoint, _ = (item["artifacts"]["http"] for item in pool.map(job, ("one", "two")))

    def served() -> set[str]:
        return {item["name"] for item in httpx.get(f"{endpoint}/v1/predict").json()}

    both = served()
    assert both >= {"one", "two"}
    late = job("late", "deploy", "serve.ready_timeout_s=0.01", succeeds=False)
    assert "goes on with what it served before" in late["error"]
    assert "serve.ready_timeout_s" in late["error"]
    assert served() == both
    assert set(job("one", "undeploy")["metrics"]["models"]) == served() == both - {"one"}
    assert "'one' is not deployed: the endpoint serves" in job("one", "undeploy", succeeds=False)["error"]
