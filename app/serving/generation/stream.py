"""The answers to a request, as a stream of text."""

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Self

from app.engines.generation.base import FinishReason, GenerationEngine, Piece, RefusedError
from app.errors import DeadlineError, EngineError, OverloadError, RequestError
from app.serving.generation.admission import Admission, Ticket
from app.serving.generation.decoder import AnswerText, TextPart
from app.serving.generation.request import Delta, GenerationRequest, Usage
from app.serving.generation.statistics import RequestTimer
from app.serving.generation.tokenizer import GenerationTokenizer


@dataclass(frozen=True)
class StreamedModel:
    """The parts of a served model that its streams share."""

    version: str
    engine: GenerationEngine
    tokenizer: GenerationTokenizer
    admission: Admission
    clock: Callable[[], float]
    """The time in seconds, as the event loop's."""


class AnswerStream:
    """The answers to a request, as a stream. Each answer is a request to the engine."""

    def __init__(
        self,
        model: StreamedModel,
        request: GenerationRequest,
        tickets: Sequence[Ticket],
        timer: RequestTimer,
        deadline_s: float,
        on_end: "Callable[[AnswerStream], object]",
    ) -> None:
        """Start to answer a request whose tickets are in the queue.

        Args:
            model: the model that answers.
            request: the request, which the served model has checked.
            tickets: one for each answer.
            timer: counts the request.
            deadline_s: time by which the answers are due, on the model's clock.
            on_end: called when no answer of this stream is running. It may be called twice.
        """
        self._model, self._request, self._timer, self._deadline_s = model, request, timer, deadline_s
        self._on_end = on_end
        self.usage = Usage(prompt_tokens=len(request.prompt))
        """The tokens so far."""
        self._has_started = self._is_closed = False
        self._is_read = asyncio.Event()
        """Set once the engine has read the prompt. The other answers share its cache."""
        self._first: Delta | None = None
        self._deltas: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        self._unfinished, self._tickets = request.num_answers, tickets
        self._tasks = [asyncio.create_task(self._run(index, ticket)) for index, ticket in enumerate(tickets)]

    @property
    def version(self) -> str:
        """The version that answers."""
        return self._model.version

    async def begin(self) -> None:
        """Wait for the first part. Raises the error that comes instead."""
        self._first = await self._next()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Return the next part of an answer.

        Raises:
            DeadlineError: the deadline has passed. All answers end.
            EngineError: the engine failed, or died in an answer that cannot be repeated. All answers end.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if not self._unfinished or self._is_closed:
            raise StopAsyncIteration
        try:
            return await self._next()
        except Exception:
            await self.aclose()
            raise

    async def _next(self) -> Delta:
        item = await self._deltas.get()
        if isinstance(item, BaseException):
            self._timer.failed(item)
            raise item
        if item.finish:
            self._unfinished -= 1
            if not self._unfinished:
                self._timer.answered()
                self._on_end(self)
        return item

    async def aclose(self) -> None:
        """Cancel the unfinished answers."""
        self._is_closed, self._first = True, None
        self._timer.failed(asyncio.CancelledError())
        await self._cancel()

    async def abort(self) -> None:
        """End the answers with an error, because the model is unloaded. Complete ones can still be read."""
        if all(task.done() for task in self._tasks):
            return
        error = OverloadError("the model was unloaded before the answer was complete: try again").of("queue.closed")
        await self._cancel()
        self._deltas.put_nowait(error)
        self._timer.failed(error)

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for ticket in self._tickets:  # of tasks that had not begun
            self._model.admission.leave(ticket)
        self._on_end(self)

    async def _run(self, index: int, ticket: Ticket) -> None:
        """Generate one answer when its turn comes."""
        try:
            async with self._model.admission.turn(ticket):
                await self._generate(index, ticket)
        except Exception as error:  # whoever reads the stream gets it
            self._deltas.put_nowait(_as_refusal(error))

    async def _generate(self, index: int, ticket: Ticket) -> None:
        if not self._has_started:
            self._has_started = True
            self._timer.started(len(self._request.prompt))
        left_s = None if self._deadline_s == math.inf else max(0.0, self._deadline_s - self._model.clock())
        try:
            async with asyncio.timeout(left_s) as limit, aclosing(self._parts(index, ticket)) as deltas:
                async for delta in deltas:
                    self._deltas.put_nowait(delta)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(
                f"the answer was not complete at its deadline, after {self.usage.completion_tokens} tokens: allow "
                "more time, or ask for fewer tokens"
            ).of("deadline.answer") from error

    async def _parts(self, index: int, ticket: Ticket) -> AsyncGenerator[Delta, None]:
        model, request = self._model, self._request
        if index:
            await self._is_read.wait()
        sampling = replace(request.sampling, seed=_seed_of(request.sampling.seed, index))
        text, finish = model.tokenizer.answer(request.stop), None
        if not index:
            model.admission.worked_off(ticket, len(request.prompt))
        async with aclosing(model.engine.generate(request.prompt, sampling)) as pieces:
            async for piece in pieces:
                self._is_read.set()
                self._count(index, ticket, piece)
                part, finish = self._part(text, piece)
                if part.text or part.tokens or finish:
                    yield Delta(index, part.text, part.tokens, finish)
                if finish:
                    break
        if finish is None:
            raise EngineError("the engine ended an answer without a reason").of("engine.unfinished")
        self._timer.finished(finish)

    def _count(self, index: int, ticket: Ticket, piece: Piece) -> None:
        self.usage.completion_tokens += len(piece.tokens)
        self._timer.received(index, len(piece.tokens))
        self._model.admission.worked_off(ticket, len(piece.tokens))

    def _part(self, text: AnswerText, piece: Piece) -> tuple[TextPart, FinishReason | None]:
        part = text.add(self._model.tokenizer.written(piece.tokens), piece.logprobs)
        if part.is_stopped:
            return part, "stop"
        if piece.finish is None:
            return part, None
        rest = text.end()
        whole = TextPart(part.text + rest.text, part.tokens + rest.tokens)
        return whole, "stop" if rest.is_stopped else piece.finish


def _seed_of(seed: int | None, index: int) -> int | None:
    """Return the seed of an answer. The first answer has the request's seed."""
    if seed is None or not index:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:4])


def _as_refusal(error: Exception) -> Exception:
    """Return the client's error if the engine has refused its request."""
    if not isinstance(error, RefusedError):
        return error
    refusal = RequestError(f"the model cannot answer this request: {error}").of(error.rule, error.key)
    refusal.__cause__ = error
    return refusal
