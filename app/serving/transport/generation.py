"""OpenAI's routes for text: chats and completions, whole or as server-sent events.

Like ``infer``, they bypass Ray Serve and FastAPI. A stream has hundreds of messages, and each would cost a task, a
queue and a log record.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from app.errors import DisconnectedError, RequestError, short_repr
from app.serving.access import Caller, headers_of
from app.serving.generation.request import Answers, Delta, GenerationRequest, Usage
from app.serving.generation.rollout import GenerationTarget
from app.serving.protocol.infer import LIMITS
from app.serving.protocol.openai.answers import AnswerWriter, ChatWriter, CompletionWriter, error_event
from app.serving.protocol.openai.chat import ChatRequest
from app.serving.protocol.openai.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from app.serving.protocol.openai.fields import GenerationFields, read_request
from app.serving.protocol.openai.models import parse_name
from app.serving.transport.asgi import read_body, unless_gone
from app.serving.transport.errors import error_response, openai_error
from app.serving.transport.inference_call import Admission, InferenceCall, admitted

Fields = TypeVar("Fields", bound=GenerationFields)
Tokens = tuple[int, ...]

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Otherwise, proxies such as nginx would buffer the events.
    (b"x-accel-buffering", b"no"),
]


class Route(Protocol, Generic[Fields]):
    """The meaning of a route's requests."""

    request: type[Fields]

    async def prompts(self, request: Fields, target: GenerationTarget) -> Sequence[Tokens]:
        """Return the prompts in the model's tokens. Raises RequestError."""
        ...

    def max_tokens(self, request: Fields, target: GenerationTarget, prompt: Tokens) -> int:
        """Return the limit of an answer to a prompt."""
        ...

    def writer(self, request: Fields, version: str) -> AnswerWriter:
        """Return the writer for the answers of a version."""
        ...


class ChatRoute:
    """Answers conversations."""

    request = ChatRequest

    async def prompts(self, request: ChatRequest, target: GenerationTarget) -> Sequence[Tokens]:
        """Return the conversation in the model's tokens."""
        tools = request.callable_tools
        if tools and not target.tokenizer.writes_tool_calls:
            raise RequestError(
                f"tools: the chat template of model {short_repr(request.model)} asks for no tool calls that can be "
                "read, which are JSON between <tool_call> and </tool_call>; leave tools out"
            ).of("parameter.unsupported", "tools")
        return [await target.chat(request.turns, tools)]

    def max_tokens(self, request: ChatRequest, target: GenerationTarget, prompt: Tokens) -> int:
        """Return the limit of the answer, by default up to the model's length."""
        given = request.max_completion_tokens or request.max_tokens
        return given or target.limits.default_max_tokens(len(prompt))

    def writer(self, request: ChatRequest, version: str) -> AnswerWriter:
        """Return the writer of the answers."""
        has_tools = request.callable_tools is not None
        return ChatWriter(request.model, version, request.wants_logprobs, request.includes_usage, has_tools)


class CompletionRoute:
    """Continues texts."""

    request = CompletionRequest

    async def prompts(self, request: CompletionRequest, target: GenerationTarget) -> Sequence[Tokens]:
        """Return the prompts in the model's tokens."""
        return [await target.encode(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in request.prompts]

    def max_tokens(self, request: CompletionRequest, target: GenerationTarget, prompt: Tokens) -> int:
        """Return the limit of an answer."""
        return request.max_tokens or min(DEFAULT_MAX_TOKENS, target.limits.default_max_tokens(len(prompt)))

    def writer(self, request: CompletionRequest, version: str) -> AnswerWriter:
        """Return the writer of the answers."""
        return CompletionWriter(request.model, version, request.wants_logprobs, request.includes_usage)


_ROUTES: Mapping[str, Route[Any]] = {"/v1/chat/completions": ChatRoute(), "/v1/completions": CompletionRoute()}


def is_generation(scope: Scope) -> bool:
    """Return whether a request asks for text."""
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _ROUTES


class GenerationApi:
    """Answers the requests for text."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def answer(self, scope: Scope, receive: Receive, send: Send, takes_slot: bool) -> None:
        """Answer a request that ``is_generation``. It takes a slot once its body has arrived, until its answer ends.

        An error before the first token has its status. A later one is the last event of the stream.
        """
        headers, response = headers_of(scope), _Response(send)
        with InferenceCall(self._admission, "openai") as call:
            try:
                with call.counted():
                    self._admission.require_access(Caller.of(headers))
                    call.begin_trace(headers.get("traceparent"))
                    receive = admitted(receive, call, headers, LIMITS.json_bytes, takes_slot)
                    await _answer(call, _ROUTES[scope["path"]], headers, receive, response)
            except Exception as error:
                if not response.has_started:
                    await error_response(error, call.traceparent, scope["path"])(scope, receive, send)
                elif not isinstance(error, DisconnectedError):
                    await response.end(error_event(openai_error(error)))


class _Response:
    """The response to a request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False

    async def start(self, headers: Sequence[tuple[bytes, bytes]], traceparent: str | None) -> None:
        traced = [(b"traceparent", traceparent.encode())] if traceparent else []
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*headers, *traced]})

    async def write(self, content: bytes) -> None:
        """Send a part. Wait while the client does not read, so that buffers stay bounded."""
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes) -> None:
        await self._send({"type": "http.response.body", "body": content})


async def _answer(
    call: InferenceCall, route: Route[Any], headers: Mapping[str, str], receive: Receive, response: _Response
) -> None:
    body = await read_body(headers, receive)
    call.received = len(body)
    reader = call.admission.endpoint.reader
    content = await reader.inflate(body, headers.get("content-encoding", ""), LIMITS.json_bytes)
    request = await reader.read(len(content), partial(read_request, route.request, content), len(body))
    await unless_gone(receive, call.run(_generate(call, route, request, response)))


async def _generate(call: InferenceCall, route: Route[Any], request: GenerationFields, response: _Response) -> None:
    name, version = parse_name(request.model)
    target = call.admission.endpoint.generator(name, version)
    call.model, call.version = name, target.version
    prompts = await route.prompts(request, target)
    call.hold(0)  # the body is not needed any more
    requests = [_request_of(request, prompt, route.max_tokens(request, target, prompt)) for prompt in prompts]
    async with _answers_to(requests, target) as answers:
        writer = route.writer(request, answers[0].version)
        if request.stream:
            await _stream(call, writer, answers, response)
        else:
            deltas = [delta async for delta in _in_turn(answers)]
            content = writer.whole(deltas, _usage_of(answers))
            call.sent = len(content)
            json_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
            await response.start(json_headers, call.traceparent)
            await response.end(content)


def _request_of(request: GenerationFields, prompt: Tokens, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        prompt, request.sampling(max_tokens), request.stop_texts, request.n, request.priority, request.timeout_s
    )


async def _stream(call: InferenceCall, writer: AnswerWriter, answers: Sequence[Answers], response: _Response) -> None:
    # The first tokens of all answers are here.
    await response.start(_STREAM_HEADERS, call.traceparent)
    async for delta in _in_turn(answers):
        if event := writer.event(delta):
            call.sent += len(event)
            await response.write(event)
    end = writer.end(_usage_of(answers))
    call.sent += len(end)
    await response.end(end)


@asynccontextmanager
async def _answers_to(
    requests: Sequence[GenerationRequest], target: GenerationTarget
) -> AsyncIterator[Sequence[Answers]]:
    """Generate answers to all requests concurrently. In the end, cancel the unfinished ones."""
    async with AsyncExitStack() as stack:

        async def begin(request: GenerationRequest) -> Answers:
            answers = await target.generate(request)
            stack.push_async_callback(answers.aclose)
            return answers

        if len(requests) == 1:
            yield [await begin(requests[0])]
            return
        tasks = [asyncio.create_task(begin(request)) for request in requests]
        try:
            begun = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        yield begun


async def _in_turn(answers: Sequence[Answers]) -> AsyncIterator[Delta]:
    """Yield the answers of one request after another, numbered consecutively."""
    number = 0
    for one in answers:
        highest = number
        async for delta in one:
            highest = max(highest, number + delta.index)
            yield replace(delta, index=number + delta.index) if number else delta
        number = highest + 1


def _usage_of(answers: Sequence[Answers]) -> Usage:
    usages = [one.usage for one in answers]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
    )
