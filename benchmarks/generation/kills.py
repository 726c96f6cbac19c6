"""Kills of the engine's process while it answers."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from app.engines.generation.base import GenerationSettings, Sampling
from benchmarks.generation.material import Material, prompts
from benchmarks.generation.streams import Answer, answers, opened
from benchmarks.markdown import Goal, verdict

_STREAMS, _KILLS, _TOKENS = 64, 20, 32
_PAUSE_S = 2.5


@dataclass(frozen=True)
class Kills:
    """The fate of the streams."""

    kills: int
    wrong: int
    """Streams whose tokens differ from a run without kills: wrong, lost or repeated."""
    greedy_pause_s: float
    """The longest time that a greedy stream waited for its next tokens."""
    seeded_pause_s: float
    """The same of a stream with a seed, whose delivered tokens are generated again."""
    title: ClassVar[str] = "An engine is killed"

    @property
    def goals(self) -> Iterator[Goal]:
        """The goals of this part."""
        what = f"engine killed {self.kills} times amid {_STREAMS} streams"
        yield Goal(f"{what}: streams with other tokens", "0", str(self.wrong), verdict(not self.wrong))
        for kind, pause_s in (("greedy", self.greedy_pause_s), ("seeded", self.seeded_pause_s)):
            yield Goal(
                f"{what}: longest pause of a {kind} one",
                f"≤ {_PAUSE_S} s",
                f"{pause_s:.2f} s",
                verdict(pause_s <= _PAUSE_S),
            )

    @property
    def summary(self) -> str:
        """The sentences that describe the run."""
        return (
            f"{_STREAMS} answers of {_TOKENS} tokens ran {self.kills} times. Half of them were greedy, and half had a "
            f"seed. Each time, the engine's process got SIGKILL at a random time. {self.wrong} answers differ from the "
            f"same answers without a kill. The longest pause was {self.greedy_pause_s:.2f} s in a greedy answer and "
            f"{self.seeded_pause_s:.2f} s in one with a seed. After a kill, a new process starts and reads all prompts "
            "and delivered tokens again, with 1 thread. An answer with a seed waits longer. Its random numbers restart "
            "with the process, so its delivered tokens are generated again."
        )


def kill_engine(material: Material) -> Kills:
    """Kill the engine once in each run of the answers, at a random time."""
    return asyncio.run(_kill(material))


async def _kill(material: Material) -> Kills:
    given = prompts(_STREAMS, seed=4).tolist()
    samplings = [Sampling(_TOKENS) if number % 2 else Sampling(_TOKENS, 1.0, seed=number) for number in range(_STREAMS)]
    rng = random.Random(0)  # times, not secrets
    async with opened(material.compiled("fp32"), GenerationSettings(max_streams=_STREAMS)) as engine:

        async def ask() -> list[Answer]:
            both = [answers(engine, [prompt], sampling) for prompt, sampling in zip(given, samplings, strict=True)]
            return [found for (found,) in await asyncio.gather(*both)]

        began_s = time.monotonic()
        expected = [found.tokens for found in await ask()]
        undisturbed_s = time.monotonic() - began_s
        wrong, pauses_s = 0, {"greedy": 0.0, "seeded": 0.0}
        for _ in range(_KILLS):
            asking = asyncio.create_task(ask())
            await asyncio.sleep(rng.uniform(0.1, 0.9) * undisturbed_s)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            found = await asking
            wrong += sum(one.tokens != tokens for one, tokens in zip(found, expected, strict=True))
            for one, sampling in zip(found, samplings, strict=True):
                kind = "seeded" if sampling.temperature else "greedy"
                pauses_s[kind] = max(pauses_s[kind], one.pause_s)
    return Kills(_KILLS, wrong, pauses_s["greedy"], pauses_s["seeded"])
