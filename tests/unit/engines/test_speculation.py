"""Prompt lookup: an engine that guesses tokens gives the answers of one that does not."""

import asyncio
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from app.engines.generation.base import GenerationEngine, GenerationSettings, Grammar, Piece, PromptLookup, Sampling
from app.engines.generation.openvino import Pipeline
from app.engines.generation.process import SupervisedGeneration
from app.engines.generation.program import openvino
from tests.generating import END_ID
from tests.generation_contract import started, until

_SETTINGS = GenerationSettings(cache_bytes=2**22, max_streams=16, max_step_tokens=64)
_LOOKUP = replace(_SETTINGS, speculation=PromptLookup())


@dataclass(frozen=True)
class _Asked:
    prompt: list[int]
    sampling: Sampling
    is_cancelled: bool = False


def _asked(count: int) -> list[_Asked]:
    """Return requests of every kind. Every other prompt repeats itself."""
    draw = np.random.default_rng(0)
    kinds = [
        Sampling(60, has_logprobs=True),
        Sampling(90),
        Sampling(40, temperature=0.9, top_p=0.95, seed=5, has_logprobs=True),
        Sampling(70, repetition_penalty=1.2),
        Sampling(50, temperature=1.2, top_k=20, seed=2**40, frequency_penalty=0.4),
        Sampling(80, end_ids=frozenset(range(0, 250, 40))),
        Sampling(60, grammar=Grammar("regex", "(ab|cd)*x[0-9]{20}"), end_ids=frozenset({END_ID})),
    ]
    asked = []
    for number in range(count):
        period, length = int(draw.integers(2, 9)), int(draw.integers(1, 150))
        tokens = draw.integers(1, 250, length if number % 2 else period).tolist()
        prompt = (tokens * length)[:length]
        sampling = replace(kinds[number % len(kinds)], max_tokens=1 + int(draw.integers(0, 90)))
        asked.append(_Asked(prompt, sampling, is_cancelled=number % 8 == 3))
    return asked


@pytest.fixture(scope="module")
def expected(exported: Path) -> list[Piece]:
    """The answers without speculation, each generated alone."""

    async def alone() -> list[Piece]:
        engine = SupervisedGeneration(openvino(), exported, _SETTINGS)
        await engine.start()
        answers = [await _answer(engine, replace(asked, is_cancelled=False)) for asked in _asked(32)]
        await engine.close()
        return answers

    return asyncio.run(alone())


async def _answer(engine: GenerationEngine, asked: _Asked) -> Piece:
    """Return a whole answer, or the beginning of one that its caller gives up."""
    tokens, logprobs, finish = list[int](), list[float](), None
    stream = engine.generate(asked.prompt, asked.sampling)
    async for piece in stream:
        tokens += piece.tokens
        logprobs += piece.logprobs
        finish = piece.finish
        if asked.is_cancelled:
            break
    await stream.aclose()
    return Piece(tuple(tokens), tuple(logprobs), finish)


async def _joining(engine: GenerationEngine, asked: Sequence[_Asked]) -> list[Piece]:
    """Answer all requests. Each begins a little later than the one before."""

    async def later(number: int, request: _Asked) -> Piece:
        await asyncio.sleep(0.002 * number)
        return await _answer(engine, request)

    return await asyncio.gather(*(later(number, request) for number, request in enumerate(asked)))


def _require_equal(asked: Sequence[_Asked], answers: Sequence[Piece], expected: Sequence[Piece]) -> None:
    for request, answer, right in zip(asked, answers, expected, strict=True):
        if request.is_cancelled:
            assert answer.tokens == right.tokens[: len(answer.tokens)]
        else:
            assert (answer.tokens, answer.finish) == (right.tokens, right.finish)
            # Several tokens at a time are rounded in another order.
            np.testing.assert_allclose(answer.logprobs, right.logprobs, atol=1e-5)


def test_answers_are_the_same_among_others_that_come_and_go(exported: Path, expected: list[Piece]) -> None:
    async def together() -> None:
        engine = SupervisedGeneration(openvino(), exported, _LOOKUP)
        await engine.start()
        for _ in range(2):
            _require_equal(_asked(32), await _joining(engine, _asked(32)), expected)
        statistics = engine.statistics
        assert (statistics.preemptions, statistics.restarts, statistics.running) == (0, 0, 0)
        await engine.close()

    asyncio.run(together())


def test_steps_are_saved_where_text_repeats(exported: Path) -> None:
    async def steps(settings: GenerationSettings) -> tuple[Piece, int]:
        engine = SupervisedGeneration(openvino(), exported, settings)
        await engine.start()
        answer = await _answer(engine, _Asked([7, 9] * 20, Sampling(200)))
        await engine.close()
        return answer, engine.statistics.steps

    (plain, many), (looked_up, few) = asyncio.run(steps(_SETTINGS)), asyncio.run(steps(_LOOKUP))
    assert looked_up == plain
    assert few < 0.6 * many


def test_answers_go_on_when_the_process_is_killed(exported: Path, expected: list[Piece]) -> None:
    async def killed() -> None:
        asked = [replace(request, is_cancelled=False) for request in _asked(32)]
        async with started(SupervisedGeneration(openvino(), exported, _LOOKUP)) as engine:
            streams = asyncio.create_task(_joining(engine, asked))
            for restarts in range(2):
                before = engine.statistics.generated_tokens
                await until(lambda: engine.statistics.generated_tokens >= before + 50)  # noqa: B023
                assert engine.pid
                os.kill(engine.pid, signal.SIGKILL)
                await until(lambda: engine.statistics.restarts > restarts)  # noqa: B023
            _require_equal(asked, await streams, expected)

    asyncio.run(killed())


@pytest.mark.parametrize("settings", [_SETTINGS, _LOOKUP], ids=["plain", "lookup"])
def test_no_more_answers_run_than_there_are_streams(exported: Path, settings: GenerationSettings) -> None:
    async def first_pieces() -> None:
        async with started(SupervisedGeneration(openvino(), exported, replace(settings, max_streams=2))) as engine:
            streams = [engine.generate([number + 1] * 8, Sampling(400)) for number in range(3)]
            await asyncio.gather(*(anext(stream) for stream in streams[:2]))
            third = asyncio.create_task(anext(streams[2]))
            steps = engine.statistics.steps
            await until(lambda: engine.statistics.steps >= steps + 20)
            assert not third.done()
            await streams[0].aclose()
            await third

    asyncio.run(first_pieces())


def test_a_step_has_room_for_the_guesses_of_all_answers(exported: Path) -> None:
    settings = replace(_SETTINGS, cache_bytes=2**24, max_streams=32)
    draw = np.random.default_rng(0)
    prompts = [
        (draw.integers(1, 250, int(draw.integers(2, 9))).tolist() * 40)[: int(draw.integers(4, 120))] for _ in range(32)
    ]

    def answers(speculation: PromptLookup | None) -> dict[int, list[int]]:
        pipeline = Pipeline(exported, replace(settings, speculation=speculation))
        tokens: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
        for number, prompt in enumerate(prompts):
            pipeline.start(number, tuple(prompt), Sampling(24))
        while pipeline.is_busy:
            list(pipeline.begin_waiting())
            for progress in pipeline.step().progress:
                tokens[progress.request] += progress.tokens
        return tokens

    with ThreadPoolExecutor(1) as apart:  # OpenVINO would leave this thread a signal stack
        guessed, plain = apart.map(answers, (PromptLookup(tokens=15), None))
    # Without the room, the library raises an error in this case, and gives wrong tokens in others.
    assert guessed == plain
