"""Whatever is sent to OpenAI's routes is answered, or refused with a sentence. Nobody else notices."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from upath import UPath

from app.serving.config import DeployedGenerator, EndpointConfig
from tests.fuzzing import damage, put_something
from tests.generating import generator_config
from tests.serving import Server, serving

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "writer",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be short"}]},
            {"role": "user", "content": "x", "name": "me"},
        ],
        "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["a"], "stream": False,
        "logprobs": True, "top_logprobs": 0, "presence_penalty": 0.1, "frequency_penalty": 0.1, "top_k": 5,
        "logit_bias": {}, "user": "u", "metadata": {"a": "b"}, "response_format": {"type": "text"}, "priority": 1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "none",
    },
    "/v1/completions": {
        "model": "writer", "prompt": ["x", "y"], "max_tokens": 2, "temperature": 0, "n": 1, "stop": "a", "logprobs": 0,
        "stream": True, "stream_options": {"include_usage": True}, "repetition_penalty": 1.1, "best_of": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server(generating_storage: UPath) -> Iterator[Server]:
    with serving() as started:
        writer = DeployedGenerator(production=generator_config(generating_storage, 1))
        started.run(started.endpoint.update(EndpointConfig(generators={"writer": writer})))
        yield started
        started.run(started.endpoint.update(EndpointConfig()))
        started.run(started.endpoint.wait_closed())


@pytest.mark.parametrize("tries", [120, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", BODIES)
def test_hostile_bodies_are_answered_or_refused(server: Server, path: str, tries: int) -> None:
    rng, statuses = random.Random(0), []
    generator = server.endpoint.generators["writer"].find(None)
    pid = generator.engine.pid  # type: ignore[attr-defined] # of the engine in a process
    with httpx.Client(base_url=f"http://{server.http}", timeout=30) as client:
        good = client.post(path, json=BODIES[path])
        assert good.status_code == 200, good.text
        for _ in range(tries):
            body = put_something(BODIES[path], rng)
            body = damage(body, rng) if rng.random() < 0.3 else body
            answer = client.post(path, content=body)
            statuses.append(answer.status_code)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert 400 <= answer.status_code < 500, (body, error)
                assert error["type"] == "invalid_request_error"
                assert " " in error["message"]
                assert len(error["message"]) < 1000
        assert client.post(path, json=BODIES[path]).status_code == 200
    assert tries / 20 < statuses.count(200) < tries * 19 / 20, "neither all nor none were valid"
    assert generator.in_flight == 0
    assert generator.engine.pid == pid, "the engine was not restarted"  # type: ignore[attr-defined]


SCHEMAS: list[Any] = [
    {"type": "nonsense"}, {"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:1/x"}, {"enum": []}, True,
    {"type": "string", "pattern": "((("}, {"type": "string", "pattern": "(a|aa){40}b"}, {"minLength": 10**9}, "x", [],
    {"type": "array", "minItems": 3, "maxItems": 1}, {"not": {}}, {"allOf": [{"type": "string"}, {"type": "null"}]},
    {"properties": {"a" * 5000: {"const": "\ud800"}}}, {"patternProperties": {"[": {}}}, {"type": ["object", 7]},
]  # fmt: skip
"""Schemas that cannot be followed, or mean nothing."""
IDS: list[Any] = [[-1], [300], [10**30], [1.5], [True], [[]], [[1], [2.0]], [], [None], ["a", 1], [2**31], [[-(2**63)]]]
LENGTHS: list[Any] = [0, -1, 127, 128, 129, 2**31 - 1, 2**31, 10**30, 1e3, 1.5, "7", True, [7], {}]
STOPS: list[Any] = [
    "",
    [""],
    ["a"] * 17,
    "x" * 1001,
    "\ud800",
    [None],
    [["a"]],
    7,
    {"a": "b"},
    [" "] * 16,
    "\0",
    ["e", ""],
]
PROMPT_LENGTHS = (0, 1, 127, 128, 129, 5000, 200_000)


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """Return a schema, mostly a valid one, of random keywords."""
    if not depth or rng.random() < 0.2:
        return rng.choice(SCHEMAS)
    inner = [random_schema(rng, depth - 1) for _ in range(2)]
    keywords = {
        "type": rng.choice(["object", "array", "string", "integer", "null", "number", "boolean"]),
        "properties": {"a": inner[0], "b": inner[1]},
        "required": ["a", "c"],
        "items": inner[0],
        "anyOf": inner,
        "maxLength": rng.choice([0, 3, -1, 10**6]),
        "enum": [1, "a", None, inner[0]],
        "additionalProperties": inner[1],
        "pattern": rng.choice(["^[a-z]+$", "\\p{L}", "(?=a)b", "[", "a{1,9999}"]),
    }
    return {key: keywords[key] for key in rng.sample(sorted(keywords), k=rng.randint(1, 3))}


def hostile(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a route, and a body with a hostile schema, ids, length or stop text."""
    body = {"model": "writer", "max_tokens": 8, "temperature": rng.choice([0, 1]), "stream": rng.random() < 0.5}
    completion = {**body, "prompt": rng.choices(range(1, 300), k=rng.randint(1, 40))}
    match rng.choice(["schema", "ids", "length", "prompt", "stop"]):
        case "schema":
            schema = rng.choice(SCHEMAS) if rng.random() < 0.5 else random_schema(rng)
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            return "/v1/chat/completions", {
                **body, "messages": [{"role": "user", "content": "x"}], "response_format": wanted
            }  # fmt: skip
        case "ids":
            return "/v1/completions", {**completion, "prompt": rng.choice(IDS)}
        case "length":
            return "/v1/completions", {**completion, "max_tokens": rng.choice(LENGTHS)}
        case "prompt":
            length = rng.choice(PROMPT_LENGTHS)
            return "/v1/completions", {**completion, "prompt": rng.choice([[7] * length, "a " * length])}
        case _:
            return "/v1/completions", {**completion, "stop": rng.choice(STOPS)}


@pytest.mark.parametrize("tries", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_requests_hurt_no_honest_stream(server: Server, tries: int) -> None:
    generator = server.endpoint.generators["writer"].find(None)
    pid, restarts = generator.engine.pid, generator.engine_statistics.restarts  # type: ignore[attr-defined]
    rng, statuses = random.Random(tries), Counter[int]()
    honest = [
        {"model": "writer", "prompt": [number + 1] * 20, "max_tokens": 64, "temperature": number % 2, "seed": number}
        for number in range(8)
    ]

    async def read(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            lines = [line async for line in answer.aiter_lines()]
        assert "data: [DONE]" in lines
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))

    async def attack(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        answer = await client.post(path, content=json.dumps(body))
        statuses[answer.status_code] += 1
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, (body, answer.text)
        if answer.status_code != 200:
            assert " " in answer.json()["error"]["message"], body
        elif body["stream"]:
            assert "data: [DONE]" in answer.text or '"error"' in answer.text, body

    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=f"http://{server.http}", timeout=60) as client:
            expected = [await read(client, body) for body in honest]
            for _ in range(tries // 20):
                attacks = [attack(client, *hostile(rng)) for _ in range(20)]
                texts = await asyncio.gather(*(read(client, body) for body in honest), *attacks)
                assert texts[: len(honest)] == expected

    asyncio.run(scenario())
    assert sum(statuses.values()) == tries
    assert min(statuses[200], statuses[400]) > tries / 20, statuses
    assert (generator.in_flight, generator.engine_statistics.restarts) == (0, restarts)
    assert generator.engine.pid == pid, "the engine was not restarted"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "body",
    [b"", b"[" * 100_000, b"\xff\xfe{}", b"null", b'"x"', b"1e999", b"{" * 300 + b"}" * 300],
    ids=lambda body: str(body)[:20],
)  # fmt: skip
def test_what_is_no_object_is_refused(server: Server, body: bytes) -> None:
    for path in BODIES:
        answer = httpx.post(f"http://{server.http}{path}", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    assert json.loads(answer.content)["error"]["type"] == "invalid_request_error"
