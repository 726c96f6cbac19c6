"""OpenAI's requests without a server: what is read, what is refused, and how tool calls are written."""

import json
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.engines.generation.base import Grammar
from app.serving.generation.request import Delta, GeneratedToken, Usage
from app.serving.protocol.openai.answers import ChatWriter, CompletionWriter
from app.serving.protocol.openai.chat import ChatRequest
from app.serving.protocol.openai.completions import CompletionRequest
from app.serving.protocol.openai.fields import read_request
from tests.wording import refused

USER = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
UNSUPPORTED = "parameter.unsupported"
BAD_TURN = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]}
IMAGE = {"type": "image_url", "image_url": {"url": "u"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> ChatRequest:
    return read_request(ChatRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return read_request(CompletionRequest, json.dumps({"model": "m", "prompt": "x", **fields}).encode())


def test_null_is_the_default_and_what_changes_nothing_is_accepted() -> None:
    optional = ChatRequest.model_fields.keys() - {"model", "messages"}
    assert chat(**dict.fromkeys(optional)) == chat()
    harmless = {
        "logit_bias": {},
        "modalities": ["text"],
        "service_tier": "auto",
        "store": False,
        "user": "me",
        "top_logprobs": 0,
    }
    assert chat(**harmless, metadata={"a": "b"}, parallel_tool_calls=False).sampling(5) == chat().sampling(5)
    assert completion(best_of=1, echo=False, suffix="", logit_bias={}).sampling(5) == completion().sampling(5)


def test_the_fields_reach_the_engine() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": -1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.2,
    }  # fmt: skip
    sampling = completion(**fields, logprobs=0).sampling(9)
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.max_tokens, sampling.has_logprobs) == (9, True)
    assert (completion().sampling(1).temperature, completion(top_k=-1).sampling(1).top_k) == (1.0, None)
    assert chat(response_format={"type": "json_object"}).grammar == Grammar("json_schema", '{"type": "object"}')
    assert chat(stop="a").stop_texts == ("a",)


def test_a_conversation_is_as_templates_read_it() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns: list[dict[str, Any]] = [
        {"role": "developer", "content": parts},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    asked = chat(messages=turns, tools=[TOOL])
    assert asked.turns == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert asked.callable_tools == [TOOL]
    assert chat(tools=[TOOL], tool_choice="none").callable_tools is None


@pytest.mark.parametrize(
    ("fields", "rule", "key"),
    [
        ({"messages": [{**USER, "content": [IMAGE]}]}, UNSUPPORTED, "messages.0.content.0"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, UNSUPPORTED, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, UNSUPPORTED, "messages.0"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, UNSUPPORTED, "messages.1"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, UNSUPPORTED, "messages.0"),
        ({"messages": [BAD_TURN]}, UNSUPPORTED, "messages.0.tool_calls.0.function.arguments"),
        ({"temperature": 3}, "key.type", "temperature"),
        ({"temperature": "1"}, "key.type", "temperature"),
        ({"temperature": 1e-42}, UNSUPPORTED, "temperature"),
        ({"top_p": 1e-46}, "key.type", "top_p"),
        ({"repetition_penalty": 1e-38}, "key.type", "repetition_penalty"),
        ({"top_k": 2**64}, "key.type", "top_k"),
        ({"max_tokens": 10**30}, "key.type", "max_tokens"),
        ({"n": True}, "key.type", "n"),
        ({"max_tokens": 0}, "key.type", "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, UNSUPPORTED, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, UNSUPPORTED, "stream_options"),
        ({"response_format": {"type": "json_schema"}}, UNSUPPORTED, "response_format"),
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, UNSUPPORTED, "tools.0"),
        ({"tools": [TOOL], "tool_choice": "required"}, UNSUPPORTED, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, UNSUPPORTED, "parallel_tool_calls"),
        ({"tools": [TOOL], "logprobs": True}, UNSUPPORTED, "logprobs"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, UNSUPPORTED, "response_format"),
        ({"function_call": "auto"}, UNSUPPORTED, "function_call"),
        ({"best_of": 2}, "key.unknown", "best_of"),
        *(({name: given}, UNSUPPORTED, name) for name, given in {
            "audio": {"voice": "x"}, "modalities": ["text", "audio"], "store": True, "prediction": {},
            "verbosity": "low", "reasoning_effort": "low", "service_tier": "flex",
            "web_search_options": {}, "moderation": {"model": "m"},
            "prompt_cache_options": {}, "prompt_cache_retention": "24h", "logit_bias": {"1": 1},
        }.items()),
    ],
)  # fmt: skip
def test_what_the_engine_does_not_have_is_refused_by_its_name(fields: dict[str, Any], rule: str, key: str) -> None:
    with refused(rule, key):
        chat(**fields)


@pytest.mark.parametrize(
    ("body", "rule", "key"),
    [
        (b'{"model": "m", "prompt": "x", "model": "n"}', "key.repeated", "model"),
        (b'{"model": "m", "prompt": "x", "temperature": NaN}', "key.type", "temperature"),
        (b'{"model": "m", "prompt": "x", "seed": 1e400}', "key.type", "seed"),
        (b'{"model": "m", "prompt": "\\ud800"}', "json.invalid", None),
        (b'{"model": "m", "prompt": "x", "suffix": "y"}', UNSUPPORTED, "suffix"),
        (b'{"model": "m", "prompt": "x", "echo": true}', UNSUPPORTED, "echo"),
        (b'{"model": "m", "prompt": "x", "best_of": 2}', UNSUPPORTED, "best_of"),
        (b'{"model": "m", "prompt": "x", "logprobs": 3}', UNSUPPORTED, "logprobs"),
        (b'{"model": "m", "prompt": null}', "key.missing", "prompt"),
        (b'{"model": "m", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "json.invalid", None),
    ],
    ids=[
        "repeated key",
        "NaN",
        "infinity",
        "surrogate",
        "suffix",
        "echo",
        "best_of",
        "logprobs",
        "null",
        "5000 digits",
    ],
)
def test_json_that_is_ambiguous_or_none_is_refused(body: bytes, rule: str, key: str | None) -> None:
    with refused(rule, key):
        read_request(CompletionRequest, body)


def test_a_repeated_key_among_many_is_found_at_once() -> None:
    keys = ", ".join(f'"{key}": 0' for key in [*range(60_000), 59_999])
    schema = f'{{"type": "json_schema", "json_schema": {{"name": "s", "schema": {{{keys}}}}}}}'
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "response_format": {schema}}}'
    began_s = time.process_time()
    with refused("key.repeated", "59999"):
        read_request(ChatRequest, body.encode())
    assert time.process_time() - began_s < 5  # comparing all pairs took minutes


def test_a_schema_with_nan_is_refused() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"a": float("nan")}}}
    with refused("json.invalid"):
        chat(response_format=schema)


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "é<"}}\n</tool_call>'


def deltas(text: str, rng: random.Random, finish: Any = "stop") -> list[Delta]:
    """Return a text in parts of some characters."""
    parts = []
    while text:
        size = rng.randint(1, 7)
        parts.append(text[:size])
        text = text[size:]
    return [*(Delta(0, part, ()) for part in parts), Delta(0, "", (), finish)]


@pytest.mark.parametrize(
    ("text", "content", "calls", "finish"),
    [
        (HERMES, None, 1, "tool_calls"),
        (f"I ask.\n{HERMES}\n{HERMES}", "I ask.\n", 2, "tool_calls"),
        ("a < b and <tool_cal", "a < b and <tool_cal", 0, "stop"),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", 0, "stop"),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', 0, "stop"),
        (HERMES[:-3], HERMES[:-3], 0, "stop"),
    ],
)
def test_tool_calls_are_told_apart_from_text_however_it_is_cut(
    text: str, content: str | None, calls: int, finish: str
) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        writer = ChatWriter("m", "1", has_logprobs=False, has_tools=True)
        whole = ChatCompletion.model_validate_json(writer.whole(deltas(text, rng), Usage(1)))
        (choice,) = whole.choices
        made: Sequence[Any] = choice.message.tool_calls or []
        assert (choice.message.content, len(made), choice.finish_reason) == (content, calls, finish)
        assert all((call.function.name, json.loads(call.function.arguments)) == ("f", {"a": "é<"}) for call in made)
        writer = ChatWriter("m", "1", has_logprobs=False, has_tools=True)
        events = b"".join([*map(writer.event, deltas(text, rng)), writer.end(Usage(1))]).split(b"\n\n")
        chunks = [ChatCompletionChunk.model_validate_json(event[6:]) for event in events[:-2]]
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert (said.strip(), [call.index for call in streamed]) == ((content or "").strip(), list(range(calls)))
        assert chunks[-1].choices[0].finish_reason == finish


def test_tokens_that_are_parts_of_characters_have_names_and_offsets() -> None:
    given = ((b"a", 0), (b"\xe4\xb9", 1), (b"\xa6", 1), (b"b", 2))
    tokens = tuple(GeneratedToken(0, text, -1.0, offset) for text, offset in given)
    writer = CompletionWriter("m", "1", has_logprobs=True)
    event = json.loads(writer.event(Delta(0, "a书b", tokens))[6:])
    assert event["choices"][0]["logprobs"] == {
        "tokens": ["a", "bytes:\\xe4\\xb9", "bytes:\\xa6", "b"],
        "token_logprobs": [-1.0] * 4,
        "top_logprobs": None,
        "text_offset": [0, 1, 1, 2],
    }
