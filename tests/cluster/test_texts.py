"""Texts on three machines without a shared disk: OpenAI's client, and the recipe of the demo."""

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.conftest import RayCluster, made_cluster
from tests.helpers import ROOT
from tests.tables import Faults

pytestmark = pytest.mark.slow
PUBLISH = """
import os
from pathlib import Path
from upath import UPath
from tests.generating import export_language_model, make_language_model, publish_language_model
source = make_language_model(Path("/tmp/source"))
exported = export_language_model(source, Path("/tmp/exported"))
publish_language_model(UPath(os.environ["RAYLOOM_STORAGE"]), "writer", source, exported)
"""
CHAT = """
import json, sys
from pathlib import Path
import openai
token, answers = Path("~/.rayloom/endpoint_token").expanduser().read_text().strip(), []
for address in sys.argv[1:]:
    client = openai.OpenAI(base_url=f"http://{address}:8000/v1", api_key=token, max_retries=0, timeout=60)
    asked = {"model": "writer", "prompt": "def area(width", "max_tokens": 24, "temperature": 0}
    for _ in range(4):
        answers.append(client.completions.create(**asked).choices[0].text)
        answers.append("".join(part.choices[0].text for part in client.completions.create(**asked, stream=True)))
print(json.dumps(answers))
"""
"""Print what each address completes for OpenAI's client."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A cluster of its own: the other one has no room for replicas that replace its replicas."""
    with made_cluster() as made:
        made.start()
        yield made


def test_each_machine_completes_texts_alike(cluster: RayCluster) -> None:
    published = cluster.on_head("python", "-c", PUBLISH)
    assert published.returncode == 0, published.stderr
    generation = "serve.generation={cache_mb: 64, max_streams: 4}"
    cluster.submit("deploy", "writer", "serve.replicas=2", "serve.threads=1", "serve.host=0.0.0.0", generation)
    asked = cluster.on_head("python", "-c", CHAT, *(machine.address for machine in cluster.workers))
    assert asked.returncode == 0, asked.stderr
    answers = json.loads(asked.stdout)
    assert len(answers) == 16
    assert len({*answers}) == 1
    assert answers[0]


def test_the_demo_needs_no_shared_disk(cluster: RayCluster, faults: Faults) -> None:
    with faults("N17", "the recipe of 'make demo' on 3 machines with S3", "a score of 0.82 ± 0.02") as fault:
        (demo,) = re.findall(r"submit lifecycle (recipes/reviews.yaml train.*)", (ROOT / "Makefile").read_text())
        result = cluster.submit("lifecycle", *demo.split(), "serve.host=0.0.0.0")
        fault.saw(f"{result['score']:.4f}")
        assert abs(result["score"] - 0.82) <= 0.02
        with cluster.network.entered():
            answers = [
                httpx.post(
                    f"http://{machine.address}:8000/v1/models/reviews/predict",
                    json={"inputs": ["质量太差，用了一天就坏了"]},
                    headers=cluster.endpoint_headers,
                    timeout=30,
                ).json()["predictions"]
                for machine in cluster.workers
            ]
        assert answers[0] == answers[1]
