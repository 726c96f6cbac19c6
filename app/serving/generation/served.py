"""A version of a language model behind an endpoint: admits requests, and streams their answers."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from app.engines.generation.base import GenerationEngine, GenerationStatistics
from app.errors import DeadlineError, OverloadError, RequestError, short_repr
from app.repository.manifest import Generation, Manifest
from app.serving.generation.admission import Admission
from app.serving.generation.limits import GenerationLimits
from app.serving.generation.policy import GenerationPolicy
from app.serving.generation.request import GenerationRequest
from app.serving.generation.statistics import RequestTimer, StreamStatistics
from app.serving.generation.stream import AnswerStream, StreamedModel
from app.serving.generation.template import Message, Tool
from app.serving.generation.texts import is_longer
from app.serving.generation.tokenizer import GenerationTokenizer

Result = TypeVar("Result")

MAX_ANSWERS = 128
MAX_STOP_TEXTS, MAX_STOP_CHARACTERS = 16, 1000
_ON_LOOP_CHARACTERS, _SHORT_CHARACTERS = 1024, 2**14
"""Texts up to these lengths are encoded on the event loop, within two milliseconds, and do not wait for long ones."""
_MAX_ENCODING = 64
"""Maximum number of texts that are being encoded or wait for it."""
_DRAIN_S = 120.0


class ServedGenerator:
    """A language model whose requests wait in a queue that counts tokens, and whose answers are streamed.

    All methods are called on one event loop.
    """

    def __init__(
        self,
        manifest: Manifest,
        engine: GenerationEngine,
        tokenizer: GenerationTokenizer,
        policy: GenerationPolicy,
        cache_bytes: int = 2**30,
        *,
        on_close: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve a model.

        Args:
            manifest: the manifest of a version that generates tokens.
            engine: the started engine, which this object closes.
            tokenizer: the version's tokenizer.
            policy: the limits.
            cache_bytes: memory of the engine for keys and values.
            on_close: called after the engine is closed.
            clock: the time in seconds, as the event loop's.
        """
        assert manifest.generation is not None
        self.manifest, self.engine, self.tokenizer, self.policy = manifest, engine, tokenizer, policy
        self.generation: Generation = manifest.generation
        self.version = str(manifest.version)
        """The version, as the protocol writes it."""
        self.limits = GenerationLimits(
            self.generation.context_length, cache_bytes // self.generation.cache_bytes_per_token, policy.max_tokens
        )
        self.statistics = StreamStatistics()
        """The live counters of its requests."""
        self.admission = Admission(policy, clock)
        """The queue, with its counters."""
        self._streamed = StreamedModel(self.version, engine, tokenizer, self.admission, clock)
        self._clock, self._on_close = clock, on_close
        self._open: set[AnswerStream] = set()
        # Separate pools: in the default one, health checks would wait behind long texts.
        self._short, self._long = (ThreadPoolExecutor(1, f"encode-{length}") for length in ("short", "long"))
        self._encoding = 0

    @property
    def engine_statistics(self) -> GenerationStatistics:
        """The counters of the engine."""
        return self.engine.statistics

    @property
    def in_flight(self) -> int:
        """Requests that have been admitted and not answered yet."""
        return len(self._open)

    async def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, as ``GenerationTokenizer.encode`` does. Long ones are read in a thread.

        Raises:
            OverloadError: too many texts are being read.
            RequestError: the text cannot be encoded, or is too long.
        """
        with self._counting_refusals():
            if len(text) <= _ON_LOOP_CHARACTERS:
                return self.tokenizer.encode(text)
            return await self._in_thread(len(text) > _SHORT_CHARACTERS, lambda: self.tokenizer.encode(text))

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> tuple[int, ...]:
        """Return the tokens of messages, as ``GenerationTokenizer.chat`` does, read in a thread. Raises as ``encode``.

        A thread is needed, because the time that a template takes is unknown.
        """
        with self._counting_refusals():
            is_long = is_longer([messages, tools], _SHORT_CHARACTERS)
            return await self._in_thread(is_long, lambda: self.tokenizer.chat(messages, tools))

    async def _in_thread(self, is_long: bool, work: Callable[[], Result]) -> Result:
        if self._encoding >= _MAX_ENCODING:
            raise OverloadError(f"{self._encoding} prompts are being read already: try again").of("queue.full")
        self._encoding += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._long if is_long else self._short, work)
        finally:
            self._encoding -= 1

    @contextmanager
    def _counting_refusals(self) -> Iterator[RequestTimer]:
        timer = RequestTimer(self.statistics, self._clock)
        try:
            yield timer
        except BaseException as error:
            timer.failed(error)
            raise

    async def generate(self, request: GenerationRequest) -> AnswerStream:
        """Admit a request, and return its answers once the first tokens have come.

        Close the answers, also after an error. If the call is cancelled, they are closed.

        Raises:
            RequestError: the model cannot answer the request, or the engine refuses it.
            OverloadError: it does not fit in the queue.
            DeadlineError: its deadline passed before the first tokens.
            EngineError: the engine failed.
        """
        with self._counting_refusals() as timer:
            request = self._checked(request)
            deadline_s = self._deadline_s(request.timeout_s)
            level = request.priority or self.policy.default_priority
            tickets = self.admission.admit(
                len(request.prompt), request.sampling.max_tokens, request.num_answers, level, deadline_s
            )
            stream = AnswerStream(self._streamed, request, tickets, timer, deadline_s, self._open.discard)
            self._open.add(stream)
            try:
                await stream.begin()
            except BaseException:
                await stream.aclose()
                raise
            return stream

    def _deadline_s(self, timeout_s: float | None) -> float:
        allowed = [given for given in (timeout_s, self.policy.default_timeout_s) if given is not None]
        return self._clock() + min(allowed) if allowed else math.inf

    def _checked(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request with the model's own end tokens. Raises RequestError if the model cannot answer it."""
        if not request.prompt:
            raise RequestError("the prompt is empty: give at least one token").of("prompt.empty", "prompt")
        if request.sampling.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.sampling.max_tokens}: expected 1 or more").of(
                "max_tokens.range", "max_tokens"
            )
        self.limits.require(len(request.prompt), request.sampling.max_tokens)
        if (low := min(request.prompt)) < 0 or max(request.prompt) >= self.generation.vocab_size:
            token = short_repr(low if low < 0 else max(request.prompt))  # a client may send thousands of digits
            raise RequestError(
                f"the prompt has token {token}: expected 0 to {self.generation.vocab_size - 1}, which the model has"
            ).of("prompt.tokens", "prompt")
        if not 1 <= request.num_answers <= MAX_ANSWERS:
            raise RequestError(f"n is {request.num_answers}: expected 1 to {MAX_ANSWERS}").of("answers.range", "n")
        if not 0 <= request.priority <= self.policy.priority_levels:
            raise RequestError(
                f"priority is {request.priority}: expected 1 to {self.policy.priority_levels}, or 0 for the default"
            ).of("priority.range", "priority")
        if request.timeout_s is not None and not request.timeout_s > 0:
            raise DeadlineError(f"the timeout is {request.timeout_s:g} s: allow more time").of("deadline.queue")
        _check_stop(request.stop)
        ends = request.sampling.end_ids | frozenset(self.generation.end_ids)
        return replace(request, sampling=replace(request.sampling, end_ids=ends))

    async def check(self) -> None:
        """Raise EngineError if the engine does not answer, and cannot be replaced."""
        await self.engine.check()

    async def close(self, drain_s: float = _DRAIN_S) -> None:
        """Let the admitted answers finish, for a bounded time. Then free the engine's memory."""
        await self.admission.close(drain_s)
        await asyncio.gather(*(stream.abort() for stream in list(self._open)))
        await self.engine.close()
        for encoder in (self._short, self._long):
            await asyncio.to_thread(encoder.shutdown)
        self._on_close()


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_TEXTS:
        raise RequestError(f"stop has {len(stop)} texts: expected {MAX_STOP_TEXTS} at most").of("stop.many", "stop")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise RequestError(f"stop has a text of {len(text)} characters: expected 1 to {MAX_STOP_CHARACTERS}").of(
                "stop.length", "stop"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise RequestError(f"stop has {short_repr(text)}, with half of a character: send valid Unicode").of(
                "text.unicode", "stop"
            )
