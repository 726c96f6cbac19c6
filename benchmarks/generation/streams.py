"""Answers of Rayloom's engine without a server."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from app.engines.generation.base import GenerationSettings, Sampling
from app.engines.generation.process import SupervisedGeneration
from app.engines.generation.program import openvino


@dataclass
class Answer:
    """The answer to one prompt, with its times."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_s: float = 0.0
    """Seconds to the first token."""
    pause_s: float = 0.0
    """The longest time between two pieces."""


@asynccontextmanager
async def opened(folder: Path, settings: GenerationSettings) -> AsyncIterator[SupervisedGeneration]:
    """Run the engine until the end of the block."""
    engine = SupervisedGeneration(openvino(), folder, settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def answer(engine: SupervisedGeneration, prompt: Sequence[int], sampling: Sampling) -> Answer:
    """Return the whole answer to a prompt."""
    answered, last_s = Answer(), time.perf_counter()
    began_s = last_s
    async for piece in engine.generate(prompt, sampling):
        now_s = time.perf_counter()
        if answered.tokens:
            answered.pause_s = max(answered.pause_s, now_s - last_s)
        else:
            answered.first_s = now_s - began_s
        last_s = now_s
        answered.tokens += piece.tokens
        answered.logprobs += piece.logprobs
    return answered


async def answers(engine: SupervisedGeneration, given: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
    """Return the answers to prompts that are sent concurrently."""
    return await asyncio.gather(*(answer(engine, prompt, sampling) for prompt in given))
