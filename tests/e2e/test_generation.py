"""A language model on a cluster, beside another model: streamed, killed, replaced, and taken away."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Event

import httpx
import openai
import psutil
import pytest
from upath import UPath

from tests.engine_contract import PROCESSOR, SIGNATURE, TEXTS, exported
from tests.generating import export_language_model, make_language_model, publish_language_model
from tests.helpers import rayloom, wait_until
from tests.jobs import run_job, serve_nothing
from tests.launch import Cluster
from tests.toy import LABELS, publish_version

DEPLOY = ["deploy", "writer", "serve.threads=1", "serve.generation={cache_mb: 64, max_streams: 8}"]
STREAMS, TOKENS, LENGTH = 3, 900, 1024
ENGINE = "app.engines.generation.openvino"


@dataclass
class Streamed:
    """What the stream of a client brought."""

    text: str = ""
    finish: str | None = None
    version: str = ""


@pytest.fixture(scope="module")
def endpoint(cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Version 1 of ``writer`` is served. With its seed, most answers are as long as they may be."""
    publish_writer(cluster, tmp_path_factory.mktemp("writer"), seed=1)
    yield run_job(cluster, *DEPLOY)["artifacts"]["http"]
    serve_nothing(cluster)


def publish_writer(cluster: dict[str, str], folder: Path, seed: int) -> None:
    """Publish the next version of ``writer``, which is then in production."""
    source = make_language_model(folder / "source", "llama", width=64, length=LENGTH, seed=seed)
    exported_model = export_language_model(source, folder / "exported")
    publish_language_model(UPath(cluster["RAYLOOM_STORAGE"]), "writer", source, exported_model)


def engines(ray: Cluster) -> list[psutil.Process]:
    """The processes in which the replicas' language models run."""
    children = [child for replica in ray.replicas() for child in replica.children(recursive=True)]
    return [child for child in children if {ENGINE, "serve"} <= {*child.cmdline()}]


def stream(endpoint: str, number: int, has_begun: Event | None = None) -> Streamed:
    """Ask for a greedy answer as OpenAI's client does, and read it to its end."""
    client, streamed = openai.OpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0), Streamed()
    chunks = client.chat.completions.create(
        model="writer",
        messages=[{"role": "user", "content": f"number {number}"}],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
    )
    for chunk in chunks:
        for choice in chunk.choices:
            streamed.text += choice.delta.content or ""
            streamed.finish = choice.finish_reason or streamed.finish
        streamed.version = chunk.system_fingerprint or ""
        if has_begun and len(streamed.text) > 20:
            has_begun.set()
    return streamed


def amid_streams(endpoint: str, numbers: Iterable[int], harm: Callable[[], object]) -> list[Future[Streamed]]:
    """Return the streams of some clients, amid which something happens."""
    for _ in range(5):  # a busy machine may hold up this process until a stream has ended
        begun = {number: Event() for number in numbers}
        with ThreadPoolExecutor(len(begun)) as pool:
            streams = [pool.submit(stream, endpoint, number, event) for number, event in begun.items()]
            for event in begun.values():
                event.wait(60)
            if not any(one.done() for one in streams):
                harm()
                return streams
    raise AssertionError("streams end before the others have begun")


def test_a_stream_survives_its_engine_and_a_client_notices_a_dead_replica(endpoint: str, ray: Cluster) -> None:
    (replica,), (engine,) = ray.replicas(), engines(ray)
    # Some of its answers end early.
    answers = ((number, stream(endpoint, number)) for number in range(100))
    expected = dict(islice((pair for pair in answers if pair[1].finish == "length"), STREAMS))
    assert all(streamed.version == "writer/1" for streamed in expected.values())
    assert [one.result() for one in amid_streams(endpoint, expected, engine.kill)] == list(expected.values())
    assert ray.replicas() == [replica]

    left = [process.pid for process in replica.children(recursive=True)]
    cut = amid_streams(endpoint, expected, replica.kill)
    # A client never takes a part for the whole.
    assert all(isinstance(one.exception(), openai.APIError | httpx.HTTPError) for one in cut)
    wait_until(lambda: not any(map(psutil.pid_exists, left)))

    def answer() -> httpx.Response:
        body = {"model": "writer", "prompt": "a", "max_tokens": 1}
        return httpx.post(f"{endpoint}/v1/completions", json=body, timeout=60)

    refused = answer()
    while refused.status_code != 200:
        assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True), refused.text
        refused = answer()
    number, before = next(iter(expected.items()))
    assert stream(endpoint, number) == before


@pytest.mark.slow
def test_a_canary_comes_and_goes_and_nothing_is_left_of_a_removed_model(
    endpoint: str, ray: Cluster, cluster: dict[str, str], tmp_path: Path
) -> None:
    publish_version(UPath(cluster["RAYLOOM_STORAGE"]), "tried", exported(), SIGNATURE, PROCESSOR, LABELS)
    run_job(cluster, "deploy", "recipes/reviews.yaml", "name=tried", "serve.version=1", "serve.replicas=1")
    publish_writer(cluster, tmp_path, seed=0)
    rayloom("models", "promote", "writer", "1", environment=cluster)

    def versions() -> Counter[str]:
        body = {"model": "writer", "prompt": "def", "max_tokens": 2}
        answers = (httpx.post(f"{endpoint}/v1/completions", json=body, timeout=60) for _ in range(24))
        return Counter(answer.json()["system_fingerprint"] for answer in answers)

    expected = stream(endpoint, 0)
    with ThreadPoolExecutor(2) as pool:
        deploying = pool.submit(run_job, cluster, *DEPLOY, "serve.canary={percent: 50, version: 2}")
        streamed = []
        while not deploying.done():
            streamed.append(stream(endpoint, 0))
    assert deploying.result()["metrics"]["replicas"] == 1
    # The old replica and the old HAProxy let streams end.
    assert all(one == expected for one in streamed if one.version == "writer/1")
    assert all(one.finish for one in streamed)
    assert set(versions()) == {"writer/1", "writer/2"}
    status = rayloom("status", environment=cluster).stdout
    assert "writer version 2 (canary, 50 %)" in status
    assert "/v1/chat/completions" in status
    rayloom("models", "promote", "writer", "2", environment=cluster)
    run_job(cluster, *DEPLOY)
    assert set(versions()) == {"writer/2"}
    rayloom("models", "rollback", "writer", environment=cluster)
    run_job(cluster, *DEPLOY)
    assert set(versions()) == {"writer/1"}
    assert len(httpx.post(f"{endpoint}/v1/models/tried/predict", json={"inputs": TEXTS[:2]}).json()["predictions"]) == 2

    (engine,) = engines(ray)
    run_job(cluster, "undeploy", "writer")
    assert httpx.post(f"{endpoint}/v1/completions", json={"model": "writer", "prompt": "a"}).status_code == 404
    wait_until(lambda: not engine.is_running())
    run_job(cluster, *DEPLOY)
