"""The metrics that Prometheus reads for a deployed model, and its number of replicas."""

import json
from collections import defaultdict

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from upath import UPath

from tests.engine_contract import PROCESSOR, SIGNATURE, exported, rows
from tests.helpers import wait_until
from tests.jobs import run_job
from tests.launch import Cluster
from tests.publishing import CARD
from tests.toy import LABELS, body, publish_version


@pytest.mark.usefixtures("emptied")
def test_replicas_fit_on_the_node_and_export_why_batches_were_made_without_a_mistake(
    cluster: dict[str, str], ray: Cluster
) -> None:
    def told() -> dict[tuple[str, str], float]:
        """Return the series of ``names`` for the version, by the metric's name and its reason, over all replicas."""
        values: dict[tuple[str, str], float] = defaultdict(float)
        found = json.loads((ray.state.runtime / "ray/prom_metrics_service_discovery.json").read_bytes())
        for target in (target for item in found for target in item["targets"]):
            page = httpx.get(f"http://{target}/metrics").text
            ours = "\n".join(line for line in page.splitlines() if "ray_rayloom_" in line)
            for family in text_string_to_metric_families(ours):
                for sample in family.samples:
                    version_of = sample.labels.get("model"), sample.labels.get("version")
                    if sample.name in names and version_of == ("toy", str(version)):
                        values[sample.name, sample.labels.get("reason", "")] += sample.value
        return values

    wait_until(lambda: ray.cpus()[1] > 0)
    cpus = int(ray.cpus()[1])
    serving = CARD.serving.model_copy(update={"replicas": cpus + 1, "threads": 1})  # a larger node measured them
    storage = UPath(cluster["RAYLOOM_STORAGE"])
    version = publish_version(storage, "toy", exported(), SIGNATURE, PROCESSOR, LABELS, serving=serving)
    deployed = run_job(cluster, "deploy", "recipes/reviews.yaml", "name=toy", f"serve.version={version}")
    assert deployed["metrics"]["replicas"] == cpus
    url = f"{deployed['artifacts']['http']}/v2/models/toy/infer"
    one = {"input_ids": rows(1)["input_ids"]}
    assert [httpx.post(url, json=body(given)).status_code for given in (rows(1), rows(2), one)] == [200, 200, 400]
    expected = {
        ("ray_rayloom_batches_total", "idle"): 2,
        ("ray_rayloom_waiting", ""): 0,
    }
    names = {name for name, _ in expected} | {"ray_rayloom_failures_total"}
    wait_until(lambda: told() == expected)
