"""What Prometheus reads of a deployed model."""

import json
from collections import defaultdict

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from upath import UPath

from tests.engine_contract import exported, rows
from tests.helpers import wait_until
from tests.launch import Cluster
from tests.toy import body, deploy, publish


@pytest.mark.usefixtures("emptied")
def test_why_batches_were_made_and_requests_failed_is_exported(cluster: dict[str, str], ray: Cluster) -> None:
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

    (version,) = publish(UPath(cluster["RAYLOOM_STORAGE"]), exported())
    url = f"{deploy(cluster, version)['http']}/v2/models/toy/infer"
    one = {"input_ids": rows(1)["input_ids"]}
    assert [httpx.post(url, json=body(given)).status_code for given in (rows(1), rows(2), one)] == [200, 200, 400]
    expected = {
        ("ray_rayloom_batches_total", "idle"): 2,
        ("ray_rayloom_failures_total", "unread"): 1,
        ("ray_rayloom_waiting", ""): 0,
    }
    names = {name for name, _ in expected}
    wait_until(lambda: told() == expected)
