"""The time to the first token, for a prompt whose prefix is in the cache."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from app.engines.generation.base import GenerationSettings, Sampling
from benchmarks.generation.material import Material, prompts
from benchmarks.generation.streams import answer, opened
from benchmarks.markdown import Goal, verdict

_TOKENS, _PROMPTS = 512, 5
_GOAL = 0.1


@dataclass(frozen=True)
class Prefix:
    """Median seconds to the first token of prompts with 512 tokens."""

    miss_s: float
    hit_s: float

    title: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    """The goals tell everything."""

    @property
    def goals(self) -> Iterator[Goal]:
        """The goal of this part."""
        ratio = self.hit_s / self.miss_s
        reached = f"{ratio:.3f} ({1e3 * self.hit_s:.0f} of {1e3 * self.miss_s:.0f} ms)"
        yield Goal(f"first token, hit / miss at {_TOKENS} tokens", f"≤ {_GOAL}", reached, verdict(ratio <= _GOAL))


def time_prefix(material: Material) -> Prefix:
    """Ask each prompt twice."""
    return asyncio.run(_time(material))


async def _time(material: Material) -> Prefix:
    sampling = Sampling(max_tokens=4)
    async with opened(material.compiled("fp32"), GenerationSettings(prefix_cache=True)) as engine:
        await answer(engine, prompts(1, seed=2)[0].tolist(), sampling)
        given = prompts(_PROMPTS, _TOKENS, seed=3).tolist()
        missed, hit = [[(await answer(engine, prompt, sampling)).first_s for prompt in given] for _ in range(2)]
    return Prefix(median(missed), median(hit))
