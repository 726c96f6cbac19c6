"""What every engine of language models in a process of its own must do, against transformers."""

import asyncio
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from app.engines.generation import trial
from app.engines.generation.base import (
    GenerationEngine,
    GenerationSettings,
    Grammar,
    Piece,
    RefusedError,
    Sampling,
)
from app.engines.generation.process import SupervisedGeneration
from app.engines.generation.registry import open_generation
from app.errors import EngineError
from tests.generating import END_ID, VOCABULARY
from tests.helpers import wait_until

SETTINGS = GenerationSettings(cache_bytes=2**26)
USUAL_TRIAL_S = trial._TIMEOUT_S
LENGTH = 1024
PROMPTS = np.random.default_rng(0).integers(1, VOCABULARY - 1, (12, 24)).tolist()
Opened = Callable[..., Any]


@asynccontextmanager
async def opened(name: str, folder: Path, **settings: Any) -> AsyncIterator[SupervisedGeneration]:
    """Start an engine."""
    engine = open_generation(name, folder, replace(SETTINGS, **settings))
    assert isinstance(engine, SupervisedGeneration)
    async with started(engine):
        yield engine


@asynccontextmanager
async def started(engine: SupervisedGeneration) -> AsyncIterator[SupervisedGeneration]:
    """Start an engine, and close it. No answer ends before the test sees that it has begun."""
    await engine.start()
    await until(lambda: engine.pid is not None)
    keep_close(engine.pid)
    try:
        yield engine
    finally:
        await engine.close()


def results_of(pid: int | None) -> Path:
    """Return the pipe that a process of the engine writes to this one."""
    inherited = {os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)}
    ours = {os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if os.path.lexists(fd.path)} - inherited
    ends = [Path(fd.path) for fd in os.scandir(f"/proc/{pid}/fd") if os.readlink(fd.path) in ours]
    (end,) = [end for end in ends if str(end.readlink()).startswith("pipe:") and _is_for_writing(end)]
    return end


def keep_close(pid: int | None) -> None:
    """Let the pipe of an idle process hold few steps, so that it waits for a test that the system does not run."""
    with results_of(pid).open("wb") as pipe:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, os.sysconf("SC_PAGESIZE"))


def _is_for_writing(fd: Path) -> bool:
    (flags,) = re.findall(r"flags:\s*(\d+)", (fd.parent.parent / "fdinfo" / fd.name).read_text())
    return int(flags, 8) & os.O_ACCMODE == os.O_WRONLY


async def ask(engine: GenerationEngine, prompt: list[int], sampling: Sampling) -> Piece:
    """Return a whole answer as one piece."""
    pieces = [piece async for piece in engine.generate(prompt, sampling)]
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    logprobs = tuple(logprob for piece in pieces for logprob in piece.logprobs)
    return Piece(tokens, logprobs, pieces[-1].finish)


async def ask_all(engine: GenerationEngine, *samplings: Sampling) -> list[Piece]:
    """Return the answers to as many prompts, all at a time."""
    return list(await asyncio.gather(*(ask(engine, p, s) for p, s in zip(PROMPTS, samplings, strict=False))))


async def until(condition: Callable[[], bool], timeout_s: float = 180) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


def children() -> set[str]:
    """Return the ids of this process's children."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def is_running(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


_PARENT = """
import asyncio, sys
from pathlib import Path
from app.engines.generation.base import GenerationSettings, Sampling
from app.engines.generation.registry import open_generation

async def main():
    engine = open_generation(sys.argv[1], Path(sys.argv[2]), GenerationSettings(cache_bytes=2**26))
    await engine.start()
    async for piece in engine.generate([1, 2, 3], Sampling(1_000)):
        print(engine.pid, flush=True)

asyncio.run(main())
"""


class _Hostile:
    """An engine that other answers use while it is given a grammar."""

    def __init__(self, engine: GenerationEngine, runner: asyncio.Runner) -> None:
        self._engine, self._runner = engine, runner

    def give(self, grammar: Grammar, is_refused: bool) -> None:
        self._runner.run(self._give(grammar, is_refused))

    async def _give(self, grammar: Grammar, is_refused: bool) -> None:
        other = asyncio.create_task(ask(self._engine, PROMPTS[0], Sampling(500)))
        with pytest.raises(RefusedError) if is_refused else nullcontext():
            await ask(self._engine, PROMPTS[1], Sampling(8, grammar=grammar))
        assert len((await other).tokens) == 500
        assert self._engine.statistics.restarts == 0


class GenerationContract:
    """Inherit, name the engine, and say with fixtures ``source`` and ``exported`` what it opens.

    ``source`` is a Llama of transformers with ``LENGTH`` tokens.
    """

    engine_name: ClassVar[str]
    max_pause_s: ClassVar[float]
    """Time until answers go on after the process was killed, beyond the time that a process takes to start."""
    followed: ClassVar[tuple[str, ...]] = ()
    """Hostile grammars that the engine can follow."""

    @pytest.fixture(scope="class")
    def hostile(self, exported: Path) -> Iterator[_Hostile]:
        with asyncio.Runner() as runner:
            engine = open_generation(self.engine_name, exported, SETTINGS)
            runner.run(engine.start())
            yield _Hostile(engine, runner)
            runner.run(engine.close())

    def test_answers_equal_transformers(self, source: Path, exported: Path) -> None:
        samplings = [
            Sampling(24, has_logprobs=True),
            Sampling(24, repetition_penalty=1.3, has_logprobs=True),
            Sampling(24, presence_penalty=1.5, frequency_penalty=0.5, has_logprobs=True),
            Sampling(24, end_ids=frozenset(range(100)), has_logprobs=True),
            Sampling(24, temperature=1.0, top_k=1, seed=3, has_logprobs=True),
        ]

        async def both() -> None:
            reference = open_generation("transformers", source)
            await reference.start()
            async with opened(self.engine_name, exported) as engine:
                for expected, answer in zip(
                    await ask_all(reference, *samplings), await ask_all(engine, *samplings), strict=True
                ):
                    assert (answer.tokens, answer.finish) == (expected.tokens, expected.finish)
                    np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)

        asyncio.run(both())

    def test_an_answer_is_the_same_among_others(self, exported: Path) -> None:
        samplings = [
            Sampling(16, temperature=number % 2, seed=number, has_logprobs=True) for number in range(len(PROMPTS))
        ]

        async def alone_and_together() -> None:
            async with opened(self.engine_name, exported, prefix_cache=False) as engine:
                alone = [(await ask(engine, p, s)) for p, s in zip(PROMPTS, samplings, strict=True)]
                assert await ask_all(engine, *samplings) == alone  # bit for bit

        asyncio.run(alone_and_together())

    def test_answers_go_on_when_the_process_is_killed(self, exported: Path) -> None:
        letters = Grammar("regex", "[a-z ]{300,400}")
        samplings = [
            *[Sampling(300, has_logprobs=True)] * 4,
            *[Sampling(300, temperature=1.0, top_p=0.9, top_k=50, seed=seed) for seed in (1, 2)],
            Sampling(300, presence_penalty=1.0),
            Sampling(300, repetition_penalty=1.2),
            Sampling(300, temperature=0.8, seed=4, frequency_penalty=1.0),
            Sampling(300, grammar=letters, end_ids=frozenset({END_ID})),
            Sampling(300, temperature=1.0, seed=7, grammar=letters, end_ids=frozenset({END_ID})),
            Sampling(300, temperature=1.0),
        ]

        async def killed() -> None:
            began_s = time.monotonic()
            async with opened(self.engine_name, exported) as engine:
                start_s = time.monotonic() - began_s
                expected = await ask_all(engine, *samplings)
                streams = asyncio.gather(ask_all(engine, *samplings))
                generated = engine.statistics.generated_tokens
                await until(lambda: engine.statistics.generated_tokens > generated + 12 * 50)
                assert engine.pid
                os.kill(engine.pid, signal.SIGKILL)
                killed_at = time.monotonic()
                await until(lambda: engine.statistics.restarts == 1)
                generated = engine.statistics.generated_tokens
                await until(lambda: engine.statistics.generated_tokens > generated)
                pause_s = time.monotonic() - killed_at
                (answers,) = await streams
                assert [answer.tokens for answer in answers[:-1]] == [answer.tokens for answer in expected[:-1]]
                assert len(answers[-1].tokens) == 300
                assert all(len(answer.logprobs) == 300 for answer in answers[:4])
                assert pause_s - start_s < self.max_pause_s

        asyncio.run(killed())

    def test_a_cancelled_answer_frees_its_cache(self, exported: Path) -> None:
        async def cancelled() -> None:
            async with opened(self.engine_name, exported, prefix_cache=False) as engine:
                streams = [engine.generate(prompt, Sampling(900)) for prompt in PROMPTS[1:]]
                for stream in streams:
                    await anext(stream)
                await until(lambda: engine.statistics.generated_tokens > 11 * 300)
                # However long it has run once we look, it has less than a sixth of what the others have now.
                other = asyncio.create_task(ask(engine, PROMPTS[0], Sampling(500)))
                await until(lambda: engine.statistics.running == 12)
                before = engine.statistics
                for stream in streams:
                    await stream.aclose()
                # The process may take some steps before it hears of it. By themselves they would have 500 more.
                await until(lambda: engine.statistics.cache_usage < before.cache_usage / 6)
                assert engine.statistics.steps < before.steps + 400
                assert engine.statistics.running <= 1
                assert len((await other).tokens) == 500

        asyncio.run(cancelled())

    def test_a_prompt_that_was_cancelled_before_it_was_read_is_read_anew(self, exported: Path) -> None:
        async def cancelled() -> None:
            async with opened(self.engine_name, exported, prefix_cache=False) as engine:
                expected = await ask_all(engine, *[Sampling(20)] * 6)
            async with opened(self.engine_name, exported) as engine:
                for prompt, answer in zip(PROMPTS, expected, strict=False):
                    # More tokens than a step reads.
                    streams = [engine.generate(prompt, Sampling(100)) for _ in range(30)]
                    begun = [asyncio.ensure_future(anext(stream)) for stream in streams]
                    await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
                    for task in begun:
                        task.cancel()
                    await asyncio.gather(*begun, return_exceptions=True)
                    for stream in streams:
                        await stream.aclose()
                    assert (await ask(engine, prompt, Sampling(20))).tokens == answer.tokens

        asyncio.run(cancelled())

    @pytest.mark.parametrize(
        "grammar",
        [
            Grammar("json_schema", '{"type": "nonsense"}'),
            Grammar("json_schema", '{"type":'),
            Grammar("regex", "((("),
            Grammar("json_schema", '{"$ref": "#/nowhere"}'),
            Grammar("json_schema", "[" * 60_000),
            Grammar("json_schema", '{"allOf":[' * 3000 + "{}" + "]}" * 3000),
            Grammar("regex", "(" * 20_000 + ")" * 20_000),
            Grammar("regex", "((a{1,500}){1,500}){1,500}"),
            Grammar("regex", "a" * 70_000),
        ],
        ids=lambda grammar: f"{grammar.text[:24]} {len(grammar.text)}",
    )
    def test_a_hostile_grammar_hurts_nobody_else(
        self, grammar: Grammar, hostile: _Hostile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if is_refused := grammar.text not in self.followed:
            monkeypatch.setattr(trial, "_TIMEOUT_S", USUAL_TRIAL_S)
        hostile.give(grammar, is_refused)

    def test_a_token_beyond_the_vocabulary_is_refused(self, exported: Path) -> None:
        async def beyond() -> None:
            async with opened(self.engine_name, exported) as engine:
                with pytest.raises(RefusedError, match="the prompt has token 9999: expected 0 to"):
                    await ask(engine, [1, 9999], Sampling(4))

        asyncio.run(beyond())

    def test_closing_leaves_no_process(self, exported: Path) -> None:
        async def closed() -> None:
            async with opened(self.engine_name, exported) as engine:
                await ask(engine, PROMPTS[0], Sampling(4, grammar=Grammar("regex", "[a-z]{4,8}")))
                answer = asyncio.create_task(ask(engine, PROMPTS[0], Sampling(900)))
                await until(lambda: engine.statistics.running == 1)
            with pytest.raises(EngineError, match="closed"):
                await answer

        before = children()
        asyncio.run(closed())
        assert children() == before

    def test_the_process_ends_with_its_parent(self, exported: Path) -> None:
        command = [sys.executable, "-c", _PARENT, self.engine_name, str(exported)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
            assert parent.stdout
            pid = int(parent.stdout.readline())
            parent.kill()
        wait_until(lambda: not is_running(pid))
