"""OpenAI's routes as its own client meets them, and as bytes: a small model behind uvicorn."""

import asyncio
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from upath import UPath

from app.serving.batching.statistics import FailureReason
from app.serving.config import DeployedGenerator, DeployedModel, EndpointConfig
from app.serving.generation.served import ServedGenerator
from app.telemetry.catalog import REQUESTS
from tests.engine_contract import exported
from tests.generating import TEMPLATE, generator_config, publish_language_model
from tests.generation_contract import keep_close
from tests.helpers import wait_until
from tests.serving import Server, serving
from tests.toy import publish, version_config
from tests.wire import message

MESSAGES: Any = [{"role": "user", "content": "def area(width"}]
PROMPT = "for number in"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def storage(language_model: Path, exported_model: Path, tmp_path_factory: pytest.TempPathFactory) -> UPath:
    """With the language model ``writer``, and ``toy``, which classifies."""
    folder = UPath(tmp_path_factory.mktemp("openai"))
    publish_language_model(folder, "writer", language_model, exported_model)
    publish(folder, exported())
    return folder


@pytest.fixture(scope="module")
def server(storage: UPath) -> Iterator[Server]:
    with serving() as started:
        started.run(started.endpoint.update(config_of(storage)))
        engine: Any = started.endpoint.generators["writer"].find(None).engine
        wait_until(lambda: engine.pid is not None)
        keep_close(engine.pid)  # so that no answer ends before the test sees that it has begun
        yield started
        started.run(started.endpoint.update(EndpointConfig()))
        started.run(started.endpoint.wait_closed())


def config_of(storage: UPath, **bounds: Any) -> EndpointConfig:
    writer = DeployedGenerator(production=generator_config(storage, 1, **bounds))
    return EndpointConfig(generators={"writer": writer}).serving(
        "toy", DeployedModel(production=version_config(storage, 1))
    )


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.front}/v1", api_key="none", max_retries=0)


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_a_chat_is_the_same_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    asked: Any = {"model": "writer", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert (whole.object, whole.model, whole.system_fingerprint) == ("chat.completion", "writer", "writer/1")
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
    assert whole.usage
    assert whole.usage.completion_tokens == 20
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == choice.message.content
    assert {(chunk.object, chunk.model) for chunk in chunks} == {("chat.completion.chunk", "writer")}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, [chunk.usage for chunk in chunks[:-1]]) == ([], [None] * (len(chunks) - 1))
    used = chunks[-1].usage
    assert used
    assert (used.prompt_tokens, used.completion_tokens) == (whole.usage.prompt_tokens, 20)
    parts: Any = [{"type": "text", "text": "def area(width"}]
    again = client.chat.completions.create(**{**asked, "messages": [{"role": "user", "content": parts}]})
    assert again.choices[0].message.content == choice.message.content


def test_the_asynchronous_client_streams_many_at_once(server: Server, client: openai.OpenAI) -> None:
    alone = client.completions.create(model="writer", prompt=PROMPT, max_tokens=30, temperature=0).choices[0].text

    async def scenario() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"http://{server.front}/v1", api_key="none") as asking:

            async def stream() -> str:
                events = await asking.completions.create(
                    model="writer", prompt=PROMPT, max_tokens=30, temperature=0, stream=True
                )
                return "".join([event.choices[0].text async for event in events])

            return await asyncio.gather(*(stream() for _ in range(16)))

    assert asyncio.run(scenario()) == [alone] * 16


def test_a_seed_repeats_answers_and_gives_each_of_several_another(client: openai.OpenAI) -> None:
    asked: Any = {"model": "writer/1", "messages": MESSAGES, "max_tokens": 16, "seed": 7, "n": 3}
    one, other = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in other.choices]
    assert len(set(texts)) == 3
    assert one.model == "writer/1"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert [text_of(chunks, index) for index in range(3)] == texts


def test_several_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "print(", "The quick"]
    asked: Any = {"model": "writer", "max_tokens": 8, "temperature": 0}
    together = client.completions.create(prompt=prompts, n=2, **asked)
    alone = [client.completions.create(prompt=prompt, **asked) for prompt in prompts]
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone for _ in range(2)]
    assert together.usage
    assert together.usage.completion_tokens == 48
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)
    assert len(client.completions.create(model="writer", prompt=[5, 6], temperature=0).choices[0].text) > 0


def test_stop_texts_end_an_answer_and_are_not_part_of_it(client: openai.OpenAI) -> None:
    asked: Any = {"model": "writer", "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    free = client.completions.create(**asked).choices[0].text
    stop = free[10:13]
    stopped = client.completions.create(**asked, stop=stop).choices[0]
    assert (stopped.text, stopped.finish_reason) == (free[: free.index(stop)], "stop")
    events = list(client.completions.create(**asked, stop=["never", stop], stream=True))
    assert "".join(event.choices[0].text for event in events) == stopped.text
    assert events[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    asked: Any = {"model": "writer", "max_tokens": 12, "temperature": 0}
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, **asked)
    assert chat.choices[0].logprobs
    tokens = chat.choices[0].logprobs.content
    assert tokens
    assert len(tokens) == 12
    assert all(token.logprob <= 0 and token.top_logprobs == [] for token in tokens)
    assert (
        b"".join(bytes(token.bytes or []) for token in tokens).decode(errors="replace")
        == chat.choices[0].message.content
    )
    chunks = list(client.chat.completions.create(messages=MESSAGES, logprobs=True, stream=True, **asked))
    streamed = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or []
    ]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in tokens], abs=1e-5)
    given = client.completions.create(prompt=PROMPT, logprobs=0, **asked).choices[0]
    assert given.logprobs
    assert (len(given.logprobs.tokens or []), len(given.logprobs.token_logprobs or [])) == (12, 12)
    assert given.logprobs.text_offset
    assert given.logprobs.text_offset == sorted(given.logprobs.text_offset)
    # The model also generates bytes that are not UTF-8.
    places = zip(given.logprobs.tokens or [], given.logprobs.text_offset, strict=True)
    assert all(name.startswith("bytes:") or given.text.startswith(name, place) for name, place in places)


def test_an_answer_follows_its_format(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yes"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="writer",
        messages=MESSAGES,
        seed=3,
        max_tokens=90,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    ).choices[0]
    said = answer.message.content or ""
    assert json.loads(said)["a"] in ("x", "yes") if answer.finish_reason == "stop" else said.lstrip().startswith("{")
    with pytest.raises(openai.BadRequestError, match="json_schema cannot be followed"):
        client.chat.completions.create(
            model="writer",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nonsense"}}},
        )
    assert client.completions.create(model="writer", prompt=PROMPT).choices[0].text, "one bad schema hurts nobody"


def test_models_are_listed_and_found(server: Server, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("writer", "model", "rayloom")
    assert model.created > 1_600_000_000
    assert model.model_extra == {"version": "1", "max_model_len": 128, "has_chat": True}
    assert client.models.retrieve("writer") == model
    assert client.models.retrieve("writer/1").id == "writer/1"
    for name in ("other", "writer/7", "toy"):
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve(name)
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    natural = httpx.get(f"http://{server.http}/v1/predict").json()
    assert [listed["name"] for listed in natural] == ["toy"]


@pytest.mark.parametrize(
    ("change", "kind", "code", "param", "words"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model", "deployed are toy, writer"),
        ({"model": "writer/9"}, openai.NotFoundError, "model_not_found", "model", "served are 1"),
        ({"model": "toy"}, openai.BadRequestError, None, "model", "/v1/models/toy/predict"),
        ({"messages": []}, openai.BadRequestError, "invalid_value", "messages", "1 or more"),
        ({"messages": [{"role": "system", "content": "x"}]}, openai.BadRequestError, None, "messages", "add one"),
        ({"max_tokens": 4000}, openai.BadRequestError, "context_length_exceeded", "max_tokens", "128 tokens"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "unsupported_value", "logit_bias", "leave it out"),
        ({"top_logprobs": 2, "logprobs": True}, openai.BadRequestError, "unsupported_value", "top_logprobs", "send 0"),
        ({"extra_body": {"min_p": 0.1}}, openai.BadRequestError, "unknown_parameter", "min_p", "min_p"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "unsupported_value", "functions", "use tools"),
        ({"tools": TOOLS}, openai.BadRequestError, "unsupported_value", "tools", "leave tools out"),
        ({"stop": "", "n": 1}, openai.BadRequestError, None, "stop", "0 characters"),
        ({"extra_body": {"priority": 99}}, openai.BadRequestError, None, "priority", "for the default"),
        ({"extra_body": {"timeout_s": 1e-4}}, openai.InternalServerError, None, None, "deadline"),
    ],
)  # fmt: skip
def test_refusals_raise_the_error_of_their_kind(
    client: openai.OpenAI, change: dict[str, Any], kind: type[openai.APIStatusError], code: str, param: str, words: str
) -> None:
    with pytest.raises(kind) as refused:
        client.chat.completions.create(**{"model": "writer", "messages": MESSAGES, **change}, stream=True)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert words in refused.value.message
    assert refused.value.type == ("server_error" if refused.value.status_code >= 500 else "invalid_request_error")


@contextmanager
def paused(server: Server) -> Iterator[ServedGenerator]:
    """Stop the engine's process in the block, so that answers take as long as they should."""
    generator = server.endpoint.generators["writer"].find(None)
    process = psutil.Process(generator.engine.pid)  # type: ignore[attr-defined] # of the engine in a process
    process.suspend()
    try:
        yield generator
    finally:
        process.resume()


def test_a_full_queue_is_a_rate_limit_after_which_clients_try_again(storage: UPath) -> None:
    with serving() as server, ThreadPoolExecutor() as pool:
        server.run(server.endpoint.update(config_of(storage, max_streams=1, queue_tokens=150)))
        url = f"http://{server.http}/v1"
        asked: Any = {"model": "writer", "prompt": PROMPT, "max_tokens": 100, "temperature": 0}
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            with paused(server) as generator:
                answers = [pool.submit(lambda: client.completions.create(**asked)) for _ in range(2)]
                wait_until(lambda: generator.in_flight == 2)
                refused = httpx.post(f"{url}/completions", json=asked)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
                with pytest.raises(openai.RateLimitError):
                    client.completions.create(**asked)
                # It waits for Retry-After, when the queue is free.
                patient = client.with_options(max_retries=5)
                answers.append(pool.submit(lambda: patient.completions.create(**asked)))
                wait_until(lambda: generator.statistics.failures[FailureReason.REJECTED] >= 3)
            assert len({answer.result().choices[0].text for answer in answers}) == 1
        server.run(server.endpoint.update(EndpointConfig()))
        server.run(server.endpoint.wait_closed())


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_frees_its_place(server: Server, is_stream: bool) -> None:
    asked = {"model": "writer", "prompt": PROMPT, "max_tokens": 110, "n": 16, "temperature": 1.5, "stream": is_stream}
    before, generator = outcomes(server).get("cancelled", 0), server.endpoint.generators["writer"].find(None)
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port))) as asking:
        content = message("POST", "/v1/completions", json.dumps(asked).encode())
        if is_stream:
            asking.sendall(content)
            assert asking.recv(4096).startswith(b"HTTP/1.1 200")
        else:
            with paused(server):
                asking.sendall(content)
                wait_until(lambda: generator.in_flight == 1)
                asking.close()
                wait_until(lambda: not generator.in_flight)
    wait_until(lambda: not generator.in_flight and not generator.engine_statistics.running)
    wait_until(lambda: outcomes(server).get("cancelled", 0) == before + 1)


def outcomes(server: Server) -> dict[str, int]:
    """Return the number of requests for text by how they ended."""
    counted = [sample for sample in server.endpoint.traffic.samples() if sample.metric is REQUESTS]
    return {sample.labels[3]: int(sample.value) for sample in counted if sample.labels[2] == "openai"}


def test_events_are_framed_as_they_should_be(server: Server) -> None:
    asked = {"model": "writer", "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"http://{server.front}/v1/chat/completions", json=asked) as answer:
        content = b"".join(answer.iter_raw())
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    events = content.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        assert event.startswith(b"data: ")
        assert b"\n" not in event
        chunk = json.loads(event.removeprefix(b"data: "))
        assert ChatCompletionChunk.model_validate(chunk).choices
        assert "usage" not in chunk


def test_an_error_within_a_stream_is_its_last_event(server: Server, client: openai.OpenAI) -> None:
    asked: Any = {"model": "writer", "prompt": PROMPT, "max_tokens": 110, "n": 64, "stream": True}

    def last_event(timeout_s: float) -> str:
        url, content = f"http://{server.http}/v1/completions", {**asked, "timeout_s": timeout_s}
        with httpx.stream("POST", url, json=content, timeout=60) as answer:
            if answer.status_code == 504:  # a busy machine takes longer for the first token
                return last_event(3 * timeout_s)
            lines = answer.iter_lines()
            next(lines)
            with paused(server):
                *_, last, _ = lines
        return last

    def begun(timeout_s: float) -> openai.Stream[Any]:
        try:
            stream: openai.Stream[Any] = client.completions.create(**asked, extra_body={"timeout_s": timeout_s})
        except openai.InternalServerError:
            return begun(3 * timeout_s)
        return stream

    assert json.loads(last_event(0.5).removeprefix("data: "))["error"]["type"] == "server_error"
    stream = begun(0.5)
    next(stream)
    with paused(server), pytest.raises(openai.APIError, match="deadline"):
        list(stream)
    assert outcomes(server)["deadline"] >= 2


def test_a_stream_goes_on_when_the_engines_process_is_killed(server: Server, client: openai.OpenAI) -> None:
    asked: Any = {"model": "writer", "prompt": PROMPT, "max_tokens": 100, "temperature": 0}
    expected = client.completions.create(**asked).choices[0].text
    generator = server.endpoint.generators["writer"].find(None)
    stream = client.completions.create(**asked, stream=True)
    texts = [next(stream).choices[0].text]
    psutil.Process(generator.engine.pid).kill()  # type: ignore[attr-defined] # of the engine in a process
    texts += [event.choices[0].text for event in stream]
    assert "".join(texts) == expected


def test_a_slow_reader_holds_up_nobody(server: Server, client: openai.OpenAI) -> None:
    asked: Any = {"model": "writer", "prompt": PROMPT, "max_tokens": 100, "temperature": 0}
    with httpx.stream("POST", f"http://{server.http}/v1/completions", json={**asked, "stream": True}) as slow:
        lines = slow.iter_lines()
        next(lines)
        assert client.completions.create(**asked).usage
        generator = server.endpoint.generators["writer"].find(None)
        wait_until(lambda: not generator.in_flight)
        assert sum(line.startswith("data: ") for line in lines) > 50


def test_the_routes_are_described_with_an_example(server: Server) -> None:
    described = httpx.get(f"http://{server.http}/openapi.json").json()
    paths = described["paths"]
    assert "$defs" not in json.dumps(described), "all references are to the components"
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        assert content["example"]["model"]
        assert "model" in content["schema"]["properties"]
    assert "ChatMessage" in described["components"]["schemas"]
    assert {"/v1/models", "/v1/predict"} <= paths.keys()


def test_other_paths_of_openai_say_that_they_are_not_there(client: openai.OpenAI) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.responses.create(model="writer", input="x"),
        lambda: client.images.generate(prompt="x"),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="here: see /docs"):
            call()


def test_tools_go_through_a_template_that_asks_for_calls_as_json(
    language_model: Path, exported_model: Path, tmp_path: Path
) -> None:
    exported_copy = shutil.copytree(exported_model, tmp_path / "exported")
    asks = '{% if tools %}{{ tools[0].function.name }}: <tool_call>{"name", "arguments"}{% endif %}'
    (exported_copy / "chat_template.jinja").write_text(asks + TEMPLATE, encoding="utf-8")
    storage = UPath(tmp_path / "storage")
    publish_language_model(storage, "writer", language_model, exported_copy)
    with serving() as server:
        writer = DeployedGenerator(production=generator_config(storage, 1))
        server.run(server.endpoint.update(EndpointConfig(generators={"writer": writer})))
        with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client:

            def prompt_tokens(**fields: Any) -> int:
                asked: Any = {"model": "writer", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
                answer: ChatCompletion = client.chat.completions.create(**asked, **fields)
                assert answer.usage
                return answer.usage.prompt_tokens

            without = prompt_tokens()
            assert prompt_tokens(tools=TOOLS, tool_choice="auto") > without
            assert prompt_tokens(tools=TOOLS, tool_choice="none") == without
            with pytest.raises(openai.BadRequestError, match="force or restrict tool calls"):
                prompt_tokens(tools=TOOLS, tool_choice="required")
        server.run(server.endpoint.update(EndpointConfig()))
        server.run(server.endpoint.wait_closed())


def test_the_client_parses_and_accumulates_answers(client: openai.OpenAI) -> None:
    class Choice(pydantic.BaseModel):
        yes: bool

    asked: Any = {"model": "writer", "messages": MESSAGES, "temperature": 0}
    with client.chat.completions.stream(**asked, max_completion_tokens=10, n=2) as stream:
        events = [event.type for event in stream]
        final = stream.current_completion_snapshot  # the final one raises for answers that were cut
    assert {"chunk", "content.delta", "content.done"} <= set(events)
    assert [choice.finish_reason for choice in final.choices] == ["length"] * 2
    whole = client.chat.completions.create(**asked, max_tokens=10)
    assert final.choices[1].message.content == whole.choices[0].message.content
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked, max_tokens=1, response_format=Choice)
    again: Any = [*MESSAGES, whole.choices[0].message, {"role": "user", "content": "x"}]
    assert client.chat.completions.create(model="writer", messages=again, max_tokens=2).choices[0].message.content
