"""Language models whose engine's process is killed again and again."""

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from app.engines.generation.base import GenerationSettings, Grammar, Sampling
from app.engines.generation.process import SupervisedGeneration
from app.engines.generation.program import openvino
from tests.generating import END_ID, VOCABULARY, export_language_model, make_language_model

_KILLS, _LENGTH, _STREAMS = 20, 1024, 64
_SAMPLINGS = (
    Sampling(900),
    Sampling(900, temperature=1.0, top_p=0.9, seed=1),
    Sampling(900, presence_penalty=1.0, repetition_penalty=1.1),
    Sampling(900, temperature=0.7, seed=2, grammar=Grammar("regex", "[a-z ]{800,2000}"), end_ids=frozenset({END_ID})),
)
_PROMPTS = np.random.default_rng(0).integers(1, VOCABULARY - 1, (_STREAMS, 24)).tolist()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that an engine opens."""
    source = make_language_model(tmp_path_factory.mktemp("source"), "llama", length=_LENGTH)
    return export_language_model(source, tmp_path_factory.mktemp("exported"))


async def _tokens(engine: SupervisedGeneration, number: int) -> list[int]:
    stream = engine.generate(_PROMPTS[number], _SAMPLINGS[number % len(_SAMPLINGS)])
    return [token async for piece in stream for token in piece.tokens]


@pytest.mark.slow
def test_no_token_is_wrong_lost_or_doubled_in_twenty_kills(exported: Path) -> None:
    pauses: list[float] = []

    async def kill(engine: SupervisedGeneration) -> None:
        """Kill the process each time that it has generated some tokens."""
        while len(pauses) < _KILLS:
            generated = engine.statistics.generated_tokens
            while engine.statistics.generated_tokens < generated + 20 * _STREAMS:
                await asyncio.sleep(0.001)
            assert engine.pid
            os.kill(engine.pid, signal.SIGKILL)
            began = time.monotonic()
            await asyncio.sleep(0.05)  # what is in the pipe still arrives
            generated = engine.statistics.generated_tokens
            while engine.statistics.generated_tokens == generated:
                await asyncio.sleep(0.001)
            pauses.append(time.monotonic() - began)

    async def killed() -> None:
        engine = SupervisedGeneration(openvino(), exported, GenerationSettings(cache_bytes=2**27))
        await engine.start()
        expected = await asyncio.gather(*(_tokens(engine, number) for number in range(_STREAMS)))
        killing = asyncio.create_task(kill(engine))
        while not killing.done():
            assert await asyncio.gather(*(_tokens(engine, number) for number in range(_STREAMS))) == expected
        await killing
        assert engine.statistics.restarts == _KILLS
        await engine.close()

    asyncio.run(killed())
    print(f"median pause {np.median(pauses):.2f} s, longest {max(pauses):.2f} s")
    assert np.median(pauses) < 2.5
