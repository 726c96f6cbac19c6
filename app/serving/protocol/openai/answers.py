"""Answers as OpenAI's clients read them: whole, or as server-sent events.

A stream has hundreds of events that differ only in their text. So the bytes around the text are prepared once.
https://developers.openai.com/api/reference/resources/chat/subresources/completions/streaming-events
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.serving.generation.request import Delta, GeneratedToken, Usage
from app.serving.protocol.openai.errors import ErrorBody
from app.serving.protocol.openai.tool_calls import ToolCall, ToolCallReader

DONE = b"data: [DONE]\n\n"
_MIN_LOGPROB = -9999.0
"""OpenAI's value for the least likely tokens. JSON has no infinity."""


def error_event(error: ErrorBody) -> bytes:
    """Return the event of an error. It is the last one: clients raise it, and ``[DONE]`` would mean success."""
    return _event(error.model_dump())


def _event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


@dataclass
class _Answer:
    """The parts of one answer so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[GeneratedToken] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True)
class Part:
    """The next part of an answer, with tool calls apart from the text."""

    index: int
    text: str
    tokens: Sequence[GeneratedToken]
    finish: str | None
    calls: Sequence[ToolCall] = ()


class AnswerWriter(ABC):
    """Writes the answers to one request."""

    object: str
    """The kind of a whole answer."""
    chunk_object: str
    """The kind of a chunk."""
    id_prefix: str
    _first_choice = b""
    """The choice before the first part of an answer, with a placeholder for the index; empty if there is none."""
    _choice_begin: bytes
    """The bytes before the text of a part in its choice, with a placeholder for the index."""
    _choice_end: bytes
    """The bytes after the text."""

    def __init__(self, model: str, version: str, has_logprobs: bool, includes_usage: bool = False) -> None:
        """Begin to write.

        Args:
            model: the name in the request.
            version: the version that answers.
            has_logprobs: whether to write the log-probabilities.
            includes_usage: whether a stream ends with the numbers of tokens.
        """
        self._common = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
            # With an equal fingerprint, the same seed gives the same answer.
            "system_fingerprint": f"{model.partition('/')[0]}/{version}",
        }
        self._has_logprobs, self._includes_usage = has_logprobs, includes_usage
        head = orjson.dumps({**self._common, "object": self.chunk_object})[:-1]
        self._begin = b"data: " + head + b',"choices":['
        self._end = b'],"usage":null}\n\n' if includes_usage else b"]}\n\n"
        self._before: dict[int, bytes] = {}
        """The bytes before the text of a part in its event, by the index of the answer."""
        self._after = self._choice_end + self._end
        self._is_plain = not has_logprobs
        """Whether a part is its text."""

    def event(self, delta: Delta) -> bytes:
        """Return the event of a part; no bytes if the part is empty."""
        # The usual case, kept cheap because it runs for each token.
        if self._is_plain and delta.finish is None and (before := self._before.get(delta.index)):
            return b"".join((before, orjson.dumps(delta.text), self._after)) if delta.text else b""
        part = self._part(delta)
        first = b""
        if part.index not in self._before:
            self._before[part.index] = self._begin + self._choice_begin % part.index
            if self._first_choice:
                first = self._begin + self._first_choice % part.index + self._end
        if part.finish or part.calls or self._has_logprobs:
            return first + self._begin + orjson.dumps(self._choice(part)) + self._end
        if not part.text:
            return first
        return first + self._before[part.index] + orjson.dumps(part.text) + self._after

    def end(self, usage: Usage) -> bytes:
        """Return the last events of a stream."""
        if not self._includes_usage:
            return DONE
        last = {**self._common, "object": self.chunk_object, "choices": [], "usage": _usage(usage)}
        return _event(last) + DONE

    def whole(self, deltas: Iterable[Delta], usage: Usage) -> bytes:
        """Return the answers as one object."""
        answers: defaultdict[int, _Answer] = defaultdict(_Answer)
        for part in map(self._part, deltas):
            answer = answers[part.index]
            answer.text.append(part.text)
            answer.tokens += part.tokens
            answer.calls += part.calls
            answer.finish = part.finish
        choices = [self._whole_choice(index, answer) for index, answer in sorted(answers.items())]
        return orjson.dumps({**self._common, "object": self.object, "choices": choices, "usage": _usage(usage)})

    def _part(self, delta: Delta) -> Part:
        return Part(delta.index, delta.text, delta.tokens, delta.finish)

    @abstractmethod
    def _choice(self, part: Part) -> dict[str, Any]:
        """Return the choice of a part that has more than text."""

    @abstractmethod
    def _whole_choice(self, index: int, answer: _Answer) -> dict[str, Any]:
        """Return the choice of a complete answer."""


class ChatWriter(AnswerWriter):
    """Writes the answers to a conversation."""

    object, chunk_object, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    _first_choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
    _choice_begin = b'{"index":%d,"delta":{"content":'
    _choice_end = b'},"logprobs":null,"finish_reason":null}'

    def __init__(
        self, model: str, version: str, has_logprobs: bool, includes_usage: bool = False, has_tools: bool = False
    ) -> None:
        """Begin to write. ``has_tools``: whether the model may call tools."""
        super().__init__(model, version, has_logprobs, includes_usage)
        self._readers: defaultdict[int, ToolCallReader] | None = defaultdict(ToolCallReader) if has_tools else None
        self._is_plain = self._is_plain and not has_tools

    def _part(self, delta: Delta) -> Part:
        if self._readers is None:
            return super()._part(delta)
        reader = self._readers[delta.index]
        text, calls = reader.add(delta.text)
        finish: str | None = delta.finish
        if finish:
            text += reader.end()
            finish = "tool_calls" if reader.count and finish == "stop" else finish
        return Part(delta.index, text, delta.tokens, finish, calls)

    def _choice(self, part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": part.text} if part.text or not part.finish else {}
        if part.calls:
            assert self._readers is not None
            first = self._readers[part.index].count - len(part.calls)
            delta["tool_calls"] = [{"index": first + i, **_call(call)} for i, call in enumerate(part.calls)]
        return {
            "index": part.index,
            "delta": delta,
            "logprobs": self._logprobs(part.tokens),
            "finish_reason": part.finish,
        }

    def _whole_choice(self, index: int, answer: _Answer) -> dict[str, Any]:
        text = "".join(answer.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if answer.calls:
            message |= {"content": text if text.strip() else None, "tool_calls": [_call(call) for call in answer.calls]}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": answer.finish,
        }

    def _logprobs(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        content = [
            {
                "token": token.text.decode(errors="replace"),
                "logprob": _logprob(token),
                "bytes": list(token.text),
                "top_logprobs": [],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionWriter(AnswerWriter):
    """Writes continuations of texts."""

    object = chunk_object = "text_completion"
    id_prefix = "cmpl"
    _choice_begin = b'{"index":%d,"text":'
    _choice_end = b',"logprobs":null,"finish_reason":null}'

    def _choice(self, part: Part) -> dict[str, Any]:
        return self._completion(part.index, part.text, part.tokens, part.finish)

    def _whole_choice(self, index: int, answer: _Answer) -> dict[str, Any]:
        return self._completion(index, "".join(answer.text), answer.tokens, answer.finish)

    def _completion(
        self, index: int, text: str, tokens: Sequence[GeneratedToken], finish: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self._has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        return {
            "tokens": [_name(token.text) for token in tokens],
            "token_logprobs": [_logprob(token) for token in tokens],
            "top_logprobs": None,
            "text_offset": [token.offset for token in tokens],
        }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprob(token: GeneratedToken) -> float:
    return max(_MIN_LOGPROB, token.logprob if token.logprob is not None else _MIN_LOGPROB)


def _name(text: bytes) -> str:
    """Return a token's text as OpenAI writes it in objects without a field for its bytes."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
