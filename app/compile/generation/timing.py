"""The speed at which an engine generates tokens, in one stream and in several."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from app.compile.generation.variants import GenerationVariant
from app.compile.timing import Concurrency
from app.engines.generation.base import GenerationEngine, Sampling

STREAMS = (1, 16)
"""Numbers of answers at a time that are measured."""
ROUNDS = 3


TimedRound = tuple[float, list[float], list[float]]
"""Tokens per second of all answers. For each answer, seconds to its first token and mean seconds per token."""


@dataclass(frozen=True)
class TimedWork:
    """What an engine generates while it is timed."""

    prompts: Sequence[Sequence[int]]
    num_tokens: int

    def prompts_of(self, number: int, streams: int) -> list[Sequence[int]]:
        """Return the prompts of a round. Successive rounds cycle through all prompts."""
        return [self.prompts[(number * streams + place) % len(self.prompts)] for place in range(streams)]


class GenerationPoint(GenerationVariant):
    """The measurement of one variant in one setting."""

    concurrency: Concurrency
    """Replicas, each with its threads."""
    streams: int
    """Answers at a time, over all replicas."""
    tokens_per_s: float
    first_token_ms: float
    """Median time to the first token of an answer."""
    token_p95_ms: float
    """The time per token at the 95th percentile over answers: an answer's time divided by its tokens."""

    def __str__(self) -> str:
        at_once = f"{self.streams} stream{'s' * (self.streams > 1)}"
        return (
            f"{self.title}, {at_once}, {self.concurrency}: {self.tokens_per_s:,.0f} tokens/s, first token "
            f"{self.first_token_ms:.1f} ms, p95 of a token {self.token_p95_ms:.2f} ms"
        )


async def time_in_turns(
    opened: Mapping[GenerationVariant, Sequence[GenerationEngine]], concurrency: Concurrency, work: TimedWork
) -> list[GenerationPoint]:
    """Time variants in turns, so that a slow spell of the machine affects all of them."""
    rounds: dict[tuple[GenerationVariant, int], list[TimedRound]] = {}
    for number in range(ROUNDS + 1):
        for variant, engines in opened.items():
            for streams in STREAMS:
                timed = await time_once(engines, work.prompts_of(number, streams), work.num_tokens)
                if number:  # the first round warms up
                    rounds.setdefault((variant, streams), []).append(timed)
    return [point_of(variant, concurrency, streams, timed) for (variant, streams), timed in rounds.items()]


async def time_once(
    engines: Sequence[GenerationEngine], prompts: Sequence[Sequence[int]], num_tokens: int
) -> TimedRound:
    """Generate answers to all prompts concurrently. Return the measurements."""

    async def answer(engine: GenerationEngine, prompt: Sequence[int]) -> tuple[float, float]:
        start, first = time.perf_counter(), None
        async for _ in engine.generate(prompt, Sampling(max_tokens=num_tokens)):
            first = first or time.perf_counter() - start
        # Not the time between pieces, because a busy machine reads several at once.
        return first or 0.0, (time.perf_counter() - start) / num_tokens

    began = time.perf_counter()
    timed = await asyncio.gather(
        *(answer(engines[number % len(engines)], prompt) for number, prompt in enumerate(prompts))
    )
    elapsed = time.perf_counter() - began
    return len(prompts) * num_tokens / elapsed, [first for first, _ in timed], [token for _, token in timed]


def point_of(
    variant: GenerationVariant, concurrency: Concurrency, streams: int, rounds: Sequence[TimedRound]
) -> GenerationPoint:
    """Return the medians of several rounds."""
    tokens = [token for _, _, each in rounds for token in each]
    return GenerationPoint(
        precision=variant.precision,
        speculation=variant.speculation,
        concurrency=concurrency,
        streams=streams,
        tokens_per_s=round(median(speed for speed, _, _ in rounds), 1),
        first_token_ms=round(1e3 * median(first for _, firsts, _ in rounds for first in firsts), 3),
        token_p95_ms=round(1e3 * float(np.percentile(tokens, 95)), 3),
    )
