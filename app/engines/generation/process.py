"""An engine in its own process. If the process dies, it is replaced, and the answers continue."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from app.engines.generation.base import GenerationSettings, GenerationStatistics, Piece, RefusedError, Sampling
from app.engines.generation.channel import Begun, Cancel, Progress, Refused, Step
from app.engines.generation.child import Child
from app.engines.generation.program import Program
from app.engines.generation.stream import Stream
from app.engines.generation.trial import GrammarTrial
from app.errors import EngineError

_MAX_DEATHS = 5
"""Consecutive deaths without a new token and without a known reason, after which the engine gives up."""
_MAX_KILLS = 2
"""Deaths that only one answer can have caused, after which it is refused."""
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0
_LOAD_TIMEOUT_S = 600.0
"""Time to load a model, after which its process counts as hanging."""


_NO_STEP = Step([], cache_usage=0.0, preemptions=0)


@dataclass
class _Counts:
    """The counters of each step. They are cheaper to update than ``GenerationStatistics``."""

    generated_tokens: int = 0
    steps: int = 0
    restarts: int = 0
    last_step: Step = _NO_STEP
    earlier_preemptions: int = 0
    """Preemptions in processes that died."""


class SupervisedGeneration:
    """A language model that a program runs in a process.

    If the process dies, another one continues the answers. It continues a greedy answer after its delivered tokens, and
    generates any other answer again from its prompt, with the same seed. Repeated tokens must equal the delivered ones.
    """

    def __init__(
        self, program: Program, folder: Path, settings: GenerationSettings, *, step_timeout_s: float = 60.0
    ) -> None:
        """Prepare to load a model.

        Args:
            program: the program of the engine.
            folder: a published version, or one in the making.
            settings: how to load it.
            step_timeout_s: the time for one step, after which the process counts as hanging and is replaced.
        """
        self._program, self._folder, self._settings = program, folder, settings
        self._step_timeout_s = step_timeout_s
        self._trial = GrammarTrial(program, folder, settings)
        self._streams: dict[int, Stream] = {}
        self._requests = itertools.count()
        self._child: Child | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._failure: EngineError | None = EngineError("the engine has not been started").of("engine.not_started")
        self._fruitless_deaths = 0
        self._last_message = 0.0
        self._counts = _Counts()
        self._version = ""

    @property
    def name(self) -> str:
        """The name in recipes and manifests."""
        return self._program.name

    @property
    def version(self) -> str:
        """The version of the library, once the engine has started."""
        return self._version

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        return self._child.pid if self._child else None

    @property
    def statistics(self) -> GenerationStatistics:
        """The current counts."""
        counts = self._counts
        return GenerationStatistics(
            running=len(self._streams),
            generated_tokens=counts.generated_tokens,
            steps=counts.steps,
            preemptions=counts.earlier_preemptions + counts.last_step.preemptions,
            cache_usage=counts.last_step.cache_usage,
            restarts=counts.restarts,
        )

    async def start(self) -> None:
        """Load the model. Raises EngineError if it cannot be loaded."""
        child = await self._load()
        self._failure = None
        self._supervision = asyncio.create_task(self._supervise(child))

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        """Generate an answer, as in ``GenerationEngine.generate``."""
        self._require_running()
        if sampling.grammar:
            await self._trial.check(sampling.grammar)
            self._require_running()
        if not sampling.is_repeatable:
            # With a seed that is known here, another process can continue the answer.
            sampling = replace(sampling, seed=secrets.randbits(32))
        request = next(self._requests)
        stream = self._streams[request] = Stream(request, tuple(prompt), sampling)
        self._submit_waiting()
        try:
            async for piece in stream:
                yield piece
        finally:
            self._drop(stream)

    async def check(self) -> None:
        """Raise EngineError if the process keeps dying, or the engine is closed."""
        self._require_running()

    async def close(self) -> None:
        """End all answers and the process."""
        self._give_up(EngineError("the engine is closed").of("engine.closed"))
        if self._supervision:
            self._supervision.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervision
        await self._trial.close()

    def _require_running(self) -> None:
        if self._failure:
            raise self._failure

    def _give_up(self, error: EngineError) -> None:
        self._failure = error
        for stream in self._streams.values():
            stream.fail(error)

    async def _load(self) -> Child:
        child = await Child.load(self._program, "serve", self._folder, self._settings, _LOAD_TIMEOUT_S)
        self._version = child.version
        return child

    async def _supervise(self, child: Child) -> None:
        """Run one process after another to serve the answers, until they die too often."""
        while True:
            try:
                await self._serve(child)
            except EngineError:
                self._bury()
            while True:
                if self._failure:
                    return
                await asyncio.sleep(self._backoff_s)
                try:
                    child = await self._load()
                    break
                except EngineError as error:
                    self._note_death(error)

    async def _serve(self, child: Child) -> None:
        """Exchange messages with a process until it dies, which raises EngineError."""
        self._child = child
        watching = asyncio.create_task(self._watch(child))
        self._last_message = asyncio.get_running_loop().time()
        for stream in self._streams.values():
            if not stream.is_suspect:
                self._submit(stream)
        self._submit_waiting()
        try:
            while True:
                message = await child.receive()
                self._last_message = asyncio.get_running_loop().time()
                match message:
                    case Step():
                        self._note_step(message)
                    case Begun(request):
                        self._begin(request)
                    case Refused(request, reason):
                        self._end(request, RefusedError(reason))
        finally:
            self._child = None
            watching.cancel()
            await child.end()

    async def _watch(self, child: Child) -> None:
        """Kill a process that has work and does not report a step."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._step_timeout_s / 4)
            if not any(stream.is_submitted for stream in self._streams.values()):
                self._last_message = loop.time()
            elif loop.time() - self._last_message > self._step_timeout_s:
                child.kill()

    def _submit_waiting(self) -> None:
        """Submit the answers that wait. If some of them may have killed a process, submit only one of these.

        It joins only answers that this process gave tokens and that are beyond suspicion, so a death has one likely
        reason.
        """
        waiting = [stream for stream in self._streams.values() if not stream.is_submitted]
        suspects = [stream for stream in waiting if stream.is_suspect]
        if not suspects:
            for stream in waiting:
                self._submit(stream)
            return
        submitted = [stream for stream in self._streams.values() if stream.is_submitted]
        if all(stream.has_answered and not stream.is_suspect for stream in submitted):
            self._submit(min(suspects, key=lambda stream: stream.kills))

    def _submit(self, stream: Stream) -> None:
        if self._child:
            if not any(other.is_submitted for other in self._streams.values()):
                self._last_message = asyncio.get_running_loop().time()
            self._child.send(stream.resume())

    def _drop(self, stream: Stream) -> None:
        """Forget an answer, and cancel it unless it has ended."""
        if self._streams.pop(stream.request, None) and stream.is_submitted and self._child:
            self._child.send(Cancel(stream.request))
        self._submit_waiting()

    def _end(self, request: int, error: EngineError) -> None:
        """End an answer with an error. Its reader may notice late, and must not have it submitted again."""
        if stream := self._streams.pop(request, None):
            stream.fail(error)
            self._submit_waiting()

    def _begin(self, request: int) -> None:
        if stream := self._streams.get(request):
            stream.has_begun = True

    def _note_step(self, step: Step) -> None:
        num_tokens = sum(self._deliver(progress) for progress in step.progress)
        self._counts.last_step = step
        self._counts.steps += 1
        self._counts.generated_tokens += num_tokens
        if num_tokens:
            self._fruitless_deaths = 0

    def _deliver(self, progress: Progress) -> int:
        """Hand tokens to their answer. Return how many of them are new."""
        stream = self._streams.get(progress.request)
        if stream is None:
            return 0
        before = stream.has_answered, stream.is_suspect
        num_new = stream.advance(progress)
        if stream.is_finished:
            del self._streams[progress.request]
        if before != (stream.has_answered, stream.is_suspect):
            self._submit_waiting()
        return num_new

    def _bury(self) -> None:
        """Record the death of the process in each of its answers."""
        self._counts.restarts += 1
        self._counts.earlier_preemptions += self._counts.last_step.preemptions
        self._counts.last_step = _NO_STEP
        submitted = [stream for stream in self._streams.values() if stream.is_submitted]
        for stream in submitted:
            stream.interrupt()
        suspects = [stream for stream in submitted if stream.is_suspect]
        # An answer that was repeating tokens is less likely the reason: an earlier process outlived them.
        if likely := [stream for stream in suspects if not stream.is_repeating]:
            for stream in suspects:
                stream.is_suspect = not stream.is_repeating
            suspects = likely
        if len(suspects) != 1 or not self._blame(suspects[0]):
            self._note_death(EngineError("the engine's process died").of("process.died"))

    def _blame(self, stream: Stream) -> bool:
        """Blame one answer for a death. Return whether the request, rather than the engine, is the likely cause.

        The engine generated a token when its process started, so it works.
        """
        is_plausible = stream.blame()
        if stream.kills >= _MAX_KILLS:
            reason = f"the request ended the engine's process {stream.kills} times: change it"
            self._end(stream.request, RefusedError(reason))
        return is_plausible

    def _note_death(self, error: EngineError) -> None:
        self._fruitless_deaths += 1
        if self._fruitless_deaths >= _MAX_DEATHS:
            self._give_up(
                EngineError(f"{error}; it died {self._fruitless_deaths} times without a token").of(
                    error.rule, error.key
                )
            )

    @property
    def _backoff_s(self) -> float:
        """The delay before the next process starts. There is none after a process that gave tokens."""
        repeated = self._fruitless_deaths - 1
        return min(_MAX_BACKOFF_S, _BACKOFF_S * 2**repeated) if repeated > 0 else 0.0
