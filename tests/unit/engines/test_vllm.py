"""vLLM as the engine of language models, in an environment of its own, which ``RAYLOOM_TEST_VLLM_PYTHON`` names."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.engines.generation.base import RefusedError, Sampling
from tests.generating import make_language_model
from tests.generation_contract import LENGTH, PROMPTS, GenerationContract, ask, ask_all, is_running, opened, until
from tests.vllm_python import WIDTH, name_vllm, needs_vllm

pytestmark = [needs_vllm(), pytest.mark.slow]
_TOKEN_BYTES = 2 * 2 * 32 * 2 * 4
"""2 layers, 2 heads and 32 numbers, for keys and values in float32."""


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        name_vllm(monkeypatch)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in transformers' folder."""
    return make_language_model(tmp_path_factory.mktemp("source"), "llama", WIDTH, LENGTH)


@pytest.fixture(scope="module")
def exported(source: Path) -> Path:
    """The same folder, which vLLM opens."""
    return source


class TestVllm(GenerationContract):
    engine_name, max_pause_s = "vllm", 60.0
    followed = ("((a{1,500}){1,500}){1,500}",)


def test_values_that_vllm_would_change_are_refused_by_name(exported: Path) -> None:
    async def scenario() -> None:
        async with opened("vllm", exported) as engine:
            with pytest.raises(RefusedError, match=r"temperature is 0\.001: vLLM takes 0, which is greedy, or 0\.01"):
                await ask(engine, [1], Sampling(2, temperature=0.001))
            with pytest.raises(RefusedError, match="presence_penalty"):
                await ask(engine, [1], Sampling(2, presence_penalty=9.0))
            # No vocabulary is as large, so all tokens stay.
            assert len((await ask(engine, [1], Sampling(2, temperature=1.0, top_k=2**64))).tokens) == 2
            assert engine.statistics.restarts == 0

    asyncio.run(scenario())


def test_preempted_answers_are_counted_and_right(exported: Path) -> None:
    async def crowded() -> None:
        # 640 tokens, and a block that vLLM keeps
        async with opened("vllm", exported, cache_bytes=672 * _TOKEN_BYTES) as engine:
            alone = [await ask(engine, prompt, Sampling(300)) for prompt in PROMPTS[:6]]
            assert engine.statistics.preemptions == 0
            assert await ask_all(engine, *[Sampling(300)] * 6) == alone
            assert engine.statistics.preemptions > 0
            with pytest.raises(RefusedError, match="924 tokens together: expected 640 at most"):
                await ask(engine, PROMPTS[0], Sampling(900))

    asyncio.run(crowded())


def _group(leader: int) -> list[int]:
    """Return the processes of a group that run."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if _group_of(pid) == leader and is_running(pid)]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@pytest.mark.skipif(not Path("/sys/devices/system/node/node1").exists(), reason="vLLM's shards need a NUMA node each")
def test_the_processes_of_shards_die_with_the_killed_one(exported: Path) -> None:
    async def killed() -> None:
        async with opened("vllm", exported, tensor_parallel=2) as engine:
            expected = await ask_all(engine, *[Sampling(200)] * 4)
            before = engine.statistics.generated_tokens
            answers = asyncio.create_task(ask_all(engine, *[Sampling(200)] * 4))
            await until(lambda: engine.statistics.generated_tokens > before + 100)
            leader = engine.pid
            assert leader
            assert len(_group(leader)) >= 3
            os.kill(leader, signal.SIGKILL)
            await until(lambda: engine.statistics.restarts == 1)
            first = leader
            await until(lambda: not _group(first), 5)
            assert await answers == expected
            leader = engine.pid
        assert leader
        assert not _group(leader)

    asyncio.run(killed())
