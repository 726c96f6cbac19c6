"""Language models behind an endpoint: which version answers, and what the other requests say of them."""

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from upath import UPath

from app.compile.generation.export import load_causal_lm
from app.engines.generation.base import Sampling
from app.errors import EngineError, StorageError
from app.repository.repository import Repository
from app.serving.batching.statistics import FailureReason
from app.serving.config import CandidateConfig, DeployedGenerator, DeployedModel, EndpointConfig, GeneratorConfig
from app.serving.endpoint import Endpoint
from app.serving.generation.request import GenerationRequest
from app.serving.generation.rollout import GenerationTarget
from app.serving.metrics import endpoint_values
from app.telemetry import catalog
from tests.engine_contract import exported
from tests.generating import (
    card_of,
    export_language_model,
    generator_config,
    make_language_model,
    publish_language_model,
)
from tests.helpers import wait_until
from tests.serving import Server, serving
from tests.toy import publish, version_config
from tests.wire import message
from tests.wording import refused

PROMPT = "def area(width"


@pytest.fixture(scope="module")
def storage(language_model: Path, exported_model: Path, tmp_path_factory: pytest.TempPathFactory) -> UPath:
    """With versions 1 and 2 of ``writer``, which are equal, and 3, which has other weights; and with ``toy``."""
    folder = UPath(tmp_path_factory.mktemp("rollout"))
    for _ in range(2):
        publish_language_model(folder, "writer", language_model, exported_model)
    other = make_language_model(tmp_path_factory.mktemp("other"), seed=1)
    publish_language_model(folder, "writer", other, export_language_model(other, tmp_path_factory.mktemp("export")))
    publish(folder, exported())
    return folder


def config_of(
    production: GeneratorConfig, canary: GeneratorConfig | None = None, shadow: GeneratorConfig | None = None
) -> EndpointConfig:
    writer = DeployedGenerator(
        production=production,
        canary=canary and CandidateConfig(version=canary, percent=25),
        shadow=shadow and CandidateConfig(version=shadow, percent=100),
    )
    config = EndpointConfig(generators={"writer": writer})
    return EndpointConfig.model_validate_json(config.model_dump_json())


async def ask(target: GenerationTarget, max_tokens: int = 16, **knobs: float) -> tuple[int, ...]:
    """Return the tokens of an answer."""
    sampling = Sampling(max_tokens=max_tokens, **knobs)  # type: ignore[arg-type]
    answers = await target.generate(GenerationRequest(await target.encode(PROMPT), sampling))
    try:
        return tuple([token.id async for delta in answers for token in delta.tokens])
    finally:
        await answers.aclose()


async def settled(endpoint: Endpoint, compared: int) -> None:
    """Wait until the shadow has compared so many answers."""
    shadow = endpoint.generators["writer"].shadow
    assert shadow is not None
    async with asyncio.timeout(30):
        while sum(shadow.answers.values()) < compared:
            await asyncio.sleep(0.02)


def test_a_canary_answers_its_share_and_a_named_version_answers_alone(storage: UPath) -> None:
    async def scenario() -> None:
        endpoint = Endpoint(random.Random(3))
        await endpoint.update(config_of(generator_config(storage, 1), canary=generator_config(storage, 3)))
        expected = {version: await ask(endpoint.generator("writer", version)) for version in ("1", "3")}
        assert expected["1"] != expected["3"]
        drawn = [endpoint.generator("writer") for _ in range(40)]
        assert 4 <= Counter(target.version for target in drawn)["3"] <= 16
        for target in drawn[:6]:
            assert await ask(target) == expected[target.version]
        assert [(listed.version, listed.reason) for listed in endpoint.index] == [("1", ""), ("3", "canary, 25 %")]
        with refused("model.only_text", "model"):
            endpoint.route("writer")
        await endpoint.update(EndpointConfig())
        await endpoint.wait_closed()

    asyncio.run(scenario())


@pytest.mark.parametrize(("shadow", "agrees"), [(2, True), (3, False)])
def test_a_shadow_is_judged_by_greedy_tokens_and_lengths(storage: UPath, shadow: int, agrees: bool) -> None:
    async def scenario() -> None:
        endpoint = Endpoint()
        await endpoint.update(config_of(generator_config(storage, 1), shadow=generator_config(storage, shadow)))
        answers: Sequence[tuple[int, ...]] = [await ask(endpoint.generator("writer")) for _ in range(3)]
        await ask(endpoint.generator("writer"), temperature=1.0)  # it cannot be repeated
        await settled(endpoint, 3)
        judged = endpoint.generators["writer"].shadow
        assert judged is not None
        assert judged.answers == {agrees: 3, not agrees: 0}
        assert sum(judged.tokens.values()) == judged.lengths["client"] == sum(map(len, answers))
        assert (judged.tokens[False] == 0) is agrees
        assert (judged.lengths["client"] == judged.lengths["shadow"]) or not agrees
        told = list(endpoint_values(endpoint))
        assert {value.metric for value in told} >= {*catalog.GENERATION, catalog.WAITING, catalog.TRAFFIC_RATIO}
        counted = {value.labels: value.value for value in told if value.metric is catalog.GENERATION_SHADOW_TOKENS}
        assert counted["writer", str(shadow), "true"] == judged.tokens[True]
        await endpoint.update(EndpointConfig())
        await endpoint.wait_closed()

    asyncio.run(scenario())


def test_an_update_lets_streams_end_and_then_ends_their_process(storage: UPath) -> None:
    async def scenario() -> None:
        endpoint = Endpoint()
        await endpoint.update(config_of(generator_config(storage, 1)))
        expected = await ask(endpoint.generator("writer"), 64)
        first = endpoint.generators["writer"].find(None)
        pid = first.engine.pid  # type: ignore[attr-defined] # of the engine in a process
        asked = asyncio.create_task(ask(endpoint.generator("writer"), 64))
        while not first.in_flight:
            await asyncio.sleep(0)
        await endpoint.update(config_of(generator_config(storage, 3)))
        assert endpoint.generator("writer").version == "3"
        assert await asked == expected
        await endpoint.wait_closed()
        assert not psutil.pid_exists(pid)
        await endpoint.update(EndpointConfig())
        await endpoint.wait_closed()

    asyncio.run(scenario())


def test_a_version_that_cannot_be_loaded_changes_nothing(storage: UPath) -> None:
    async def scenario() -> None:
        endpoint = Endpoint()
        served = generator_config(storage, 1)
        await endpoint.update(config_of(served))
        with pytest.raises(StorageError, match="was replaced"):
            await endpoint.update(config_of(generator_config(storage, 3), canary=replace_seal(served)))
        assert endpoint.generator("writer").version == "1"
        assert await ask(endpoint.generator("writer"))
        await endpoint.check()
        await endpoint.generators["writer"].find(None).engine.close()
        with pytest.raises(EngineError):
            await endpoint.check()
        await endpoint.update(EndpointConfig())
        await endpoint.wait_closed()

    asyncio.run(scenario())


@contextmanager
def asked_by_hand(server: Server) -> Iterator[socket.socket]:
    """Ask for a stream of a megabyte, with small buffers of the system, so that it fills the server's own."""
    body = {"model": "writer", "prompt": PROMPT, "n": 64, "max_tokens": 64, "temperature": 1, "logprobs": 0}
    host, _, port = server.http.rpartition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        client.connect((host, int(port)))
        client.sendall(message("POST", "/v1/completions", json.dumps({**body, "stream": True}).encode()))
        yield client


async def let_time_pass(connection: Any, timer: asyncio.TimerHandle) -> None:
    """End the time within which a client must have read something, unless that has begun anew."""
    if connection._stalled is timer:
        unread: Any = timer._args  # type: ignore[attr-defined]
        timer.cancel()
        connection._close_if_stalled(*unread)


def test_a_client_loses_its_place_if_it_reads_nothing_and_not_if_it_reads_slowly(storage: UPath) -> None:
    with serving() as server:
        server.fast_path.send_timeout_s = 0.5
        server.run(server.endpoint.update(config_of(generator_config(storage, 1))))
        served, admission = server.endpoint.generators["writer"].find(None), server.fast_path.admission
        with asked_by_hand(server):
            wait_until(lambda: admission.ongoing == 1)
            wait_until(lambda: admission.ongoing == 0)
            wait_until(lambda: (served.in_flight, served.engine_statistics.running) == (0, 0))
            assert served.statistics.failures == {FailureReason.CANCELLED: 1}
            wait_until(lambda: not server.listener.server_state.connections)
        server.fast_path.send_timeout_s = 600.0  # which pass when the test says so: this client may be held up, too
        with asked_by_hand(server) as client:
            wait_until(lambda: bool(server.listener.server_state.connections))
            connection: Any = next(iter(server.listener.server_state.connections))
            read = b""
            wait_until(lambda: connection._stalled is not None)
            while timer := connection._stalled:  # until the system holds what is left
                unread = connection.transport.get_write_buffer_size()
                while connection._stalled is timer and connection.transport.get_write_buffer_size() >= unread:
                    read += client.recv(4096)
                server.run(let_time_pass(connection, timer))
                # The answer may have ended, but only the first client lost its place.
                assert served.statistics.failures == {FailureReason.CANCELLED: 1}
            while part := client.recv(2**15):
                read += part
            assert read.count(b'"finish_reason":"') == 64
        server.run(server.endpoint.update(EndpointConfig()))
        server.run(server.endpoint.wait_closed())


def test_a_version_from_another_processor_is_served_with_a_warning(
    language_model: Path, exported_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = card_of(load_causal_lm(language_model).config, exported_model, has_chat=True)
    key = card.engine_key.model_copy(update={"precision": "int8", "architecture": "x86_64 with other sums"})
    repository = Repository(UPath(tmp_path))
    repository.publish("writer", UPath(exported_model), card.model_copy(update={"engine_key": key}))

    async def scenario() -> None:
        endpoint = Endpoint()
        await endpoint.update(config_of(generator_config(UPath(tmp_path), 1)))
        assert await ask(endpoint.generator("writer"))
        await endpoint.update(EndpointConfig())
        await endpoint.wait_closed()

    asyncio.run(scenario())
    assert "on cpu x86_64 with other sums; on x86_64 with" in caplog.text


def replace_seal(config: GeneratorConfig) -> GeneratorConfig:
    return config.model_copy(update={"seal": "0" * 64, "policy": replace(config.policy, max_streams=3)})


def test_the_protocol_describes_a_language_model_and_refuses_to_run_it(storage: UPath) -> None:
    with serving() as server:
        toy = DeployedModel(production=version_config(storage, 1))
        config = config_of(generator_config(storage, 1)).serving("toy", toy)
        server.run(server.endpoint.update(config))
        tokens = server.run(ask(server.endpoint.generator("writer")))
        with httpx.Client(base_url=f"http://{server.front}") as client:
            assert client.get("/v2/models/writer/ready").json() == {"name": "writer", "ready": True}
            metadata = client.get("/v2/models/writer").json()
            assert (metadata["platform"], metadata["versions"]) == ("openvino_genai", ["1"])
            (stats,) = client.get("/v2/models/writer/versions/1/stats").json()["model_stats"]
            assert (stats["inference_count"], stats["inference_stats"]["success"]["count"]) == (1, 1)
            assert stats["execution_count"] >= len(tokens)
            listed = client.post("/v2/repository/index").json()
            assert [(model["name"], model["state"]) for model in listed] == [("toy", "READY"), ("writer", "READY")]
            inputs = [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}]
            answer = client.post("/v2/models/writer/infer", json={"inputs": inputs})
            assert (answer.status_code, answer.json()["error"]) == (
                400, "model 'writer' generates text: send a POST to /v1/chat/completions or /v1/completions",
            )  # fmt: skip
            assert client.post("/v2/repository/models/writer/unload").status_code == 400
            assert client.get("/v2/models/writer/versions/7/ready").status_code == 404
        with refused("model.no_text", "model"):
            server.endpoint.generator("toy")
        server.run(server.endpoint.update(EndpointConfig()))
        server.run(server.endpoint.wait_closed())


def test_an_engine_is_replaced_though_its_version_lies_in_a_bucket(
    language_model: Path, exported_model: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    bucket = UPath("s3://generating")
    bucket.mkdir()
    publish_language_model(bucket, "writer", language_model, exported_model)

    async def scenario() -> None:
        endpoint = Endpoint()
        await endpoint.update(config_of(generator_config(bucket, 1)))
        expected = await ask(endpoint.generator("writer"), 64)
        engine = endpoint.generators["writer"].find(None).engine
        process = psutil.Process(engine.pid)  # type: ignore[attr-defined] # of the engine in a process
        process.suspend()  # so that the answer does not end before the kill
        asked = asyncio.create_task(ask(endpoint.generator("writer"), 64))
        while not engine.statistics.running:
            await asyncio.sleep(0)
        process.kill()
        assert await asked == expected
        assert engine.statistics.restarts == 1
        await endpoint.update(EndpointConfig())
        await endpoint.wait_closed()

    asyncio.run(scenario())
