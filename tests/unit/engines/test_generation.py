"""The engine of language models in a process of its own, against transformers."""

import ast
import asyncio
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from app.engines.generation import trial
from app.engines.generation.base import (
    Grammar,
    RefusedError,
    Sampling,
)
from app.engines.generation.channel import Progress
from app.engines.generation.process import SupervisedGeneration
from app.engines.generation.program import VLLM_PYTHON, openvino
from app.engines.generation.registry import open_generation
from app.engines.generation.stream import Stream
from app.errors import EngineError
from tests import poisoned
from tests.generation_contract import (
    PROMPTS,
    SETTINGS,
    USUAL_TRIAL_S,
    GenerationContract,
    ask,
    ask_all,
    children,
    opened,
    results_of,
    started,
    until,
)
from tests.helpers import ROOT
from tests.wording import refused


class TestOpenVino(GenerationContract):
    engine_name, max_pause_s = "openvino_genai", 2.5


def test_a_value_that_the_library_cannot_hold_ends_no_process(exported: Path) -> None:
    async def scenario() -> None:
        async with opened("openvino_genai", exported) as engine:
            with pytest.raises(RefusedError):
                await ask(engine, [1], Sampling(max_tokens=2, temperature=1.0, top_k=2**64))
            assert engine.statistics.restarts == 0

    asyncio.run(scenario())


def test_answers_share_a_cache_that_is_too_small_for_all(exported: Path) -> None:
    async def crowded() -> None:
        # 640 tokens of 2 layers, 2 heads and 8 numbers, for keys and values in float32
        async with opened("openvino_genai", exported, cache_bytes=640 * 2 * 2 * 8 * 2 * 4) as engine:
            alone = [await ask(engine, prompt, Sampling(300)) for prompt in PROMPTS[:6]]
            assert await ask_all(engine, *[Sampling(300)] * 6) == alone
            samplings = [Sampling(64 + number, 1.0, seed=number) for number in range(6)]
            alone = [
                await ask(engine, prompt, sampling) for prompt, sampling in zip(PROMPTS[:6], samplings, strict=True)
            ]
            together = await asyncio.gather(*(ask_all(engine, *samplings) for _ in range(20)))
            assert all(answers == alone for answers in together)
            # OpenVINO GenAI gives wrong tokens to some of the answers whose cache it takes away.
            assert engine.statistics.preemptions == 0
            with pytest.raises(RefusedError, match="924 tokens together: expected 640 at most"):
                await ask(engine, PROMPTS[0], Sampling(900))
            assert engine.statistics.restarts == 0

    asyncio.run(crowded())


@pytest.mark.slow
def test_an_answer_that_waits_for_the_cache_is_not_to_blame_for_deaths(exported: Path) -> None:
    async def killed_twice() -> None:
        # 320 tokens: room for one of the two answers
        async with opened("openvino_genai", exported, cache_bytes=320 * 2 * 2 * 8 * 2 * 4) as engine:
            first, second = Sampling(280), Sampling(200)
            alone = [await ask(engine, PROMPTS[0], first), await ask(engine, PROMPTS[1], second)]
            asked = [asyncio.create_task(ask(engine, PROMPTS[0], first))]
            for restarts in range(2):
                generated = engine.statistics.generated_tokens
                await until(lambda: engine.statistics.generated_tokens > generated)  # noqa: B023
                if not restarts:
                    asked.append(asyncio.create_task(ask(engine, PROMPTS[1], second)))
                    await asyncio.sleep(0)
                assert engine.pid
                os.kill(engine.pid, signal.SIGKILL)
                await until(lambda: engine.statistics.restarts > restarts)  # noqa: B023
            assert await asyncio.gather(*asked) == alone
            assert engine.statistics.restarts == 2

    asyncio.run(killed_twice())


@pytest.mark.slow
def test_a_long_prompt_is_not_blamed_for_a_neighbour_that_dies_late(exported: Path) -> None:
    long = [1 + number % 250 for number in range(900)]

    async def poison() -> None:
        async with opened("openvino_genai", exported) as engine:
            alone = await ask(engine, long, Sampling(20))
        program = replace(openvino(), module=poisoned.__name__)
        async with started(SupervisedGeneration(program, exported, replace(SETTINGS, max_step_tokens=16))) as engine:
            deadly = asyncio.create_task(ask(engine, [poisoned.LATE_POISON], Sampling(50, 1.0, seed=1)))
            assert await ask(engine, long, Sampling(20)) == alone
            with pytest.raises(RefusedError, match="change it"):
                await deadly

    asyncio.run(poison())


def test_deaths_while_an_answer_repeats_its_tokens_are_not_blamed_on_it() -> None:
    stream, num_given = Stream(0, (1, 2), Sampling(9, temperature=1.0, seed=0)), 5

    def die_after(repeated: int) -> int:
        stream.resume()
        stream.has_begun = True
        stream.advance(Progress(0, tuple(range(repeated)), (), None))
        stream.interrupt()
        if stream.is_suspect:
            stream.blame()
        return stream.kills

    assert [die_after(repeated) for repeated in (num_given, 2, 3, 4)] == [0, 1, 1, 1]
    assert die_after(4) == 2, "the same token again"


def test_requests_that_kill_the_process_are_refused_and_no_other(exported: Path) -> None:
    program = replace(openvino(), module=poisoned.__name__)
    sampling, poisons = Sampling(100, has_logprobs=True), [[poisoned.POISON, number] for number in range(3)]

    async def poison() -> None:
        async with started(SupervisedGeneration(program, exported, SETTINGS)) as engine:
            expected = await ask_all(engine, *[sampling] * 8)
            # Two poisons begin first, and one amid the good requests.
            prompts = [*poisons[:2], *PROMPTS[:4], poisons[2], *PROMPTS[4:8]]
            assert engine.pid
            os.kill(engine.pid, signal.SIGSTOP)  # so that all begin in one step
            asked = [asyncio.create_task(ask(engine, prompt, sampling)) for prompt in prompts]
            await until(lambda: engine.statistics.running == len(prompts))
            os.kill(engine.pid, signal.SIGCONT)
            refused = [asked.pop(place) for place in (6, 1, 0)]
            assert [answer.tokens for answer in await asyncio.gather(*asked)] == [answer.tokens for answer in expected]
            for outcome in await asyncio.gather(*refused, return_exceptions=True):
                assert isinstance(outcome, RefusedError)
                assert str(outcome) == "the request ended the engine's process 2 times: change it"
            # After the first process, each poison was alone to blame.
            assert engine.statistics.restarts == 1 + 2 * len(poisons)
            await engine.check()

    asyncio.run(poison())


def test_a_step_that_the_graph_cannot_compute_is_an_error(exported: Path, tmp_path: Path) -> None:
    """With a stream of one thread, OpenVINO would return the tokens of an earlier step."""
    limited = shutil.copytree(exported, tmp_path / "limited")
    model = ov.Core().read_model(exported / "openvino_model.xml")
    tokens = model.input("input_ids").get_node()
    readers = tokens.output(0).get_target_inputs()
    flat = opset13.reshape(tokens, opset13.constant(np.array([-1])), False)
    # At most 64 zeros are added to the tokens, so the addition fails for more tokens.
    start, step, row = (opset13.constant(np.array(numbers)) for numbers in ([0], [1], [0] * 64))
    same = opset13.add(flat, opset13.slice(row, start, opset13.shape_of(flat), step))
    for reader in readers:
        reader.replace_source_output(opset13.reshape(same, opset13.shape_of(tokens), False).output(0))
    ov.save_model(model, limited / "openvino_model.xml", compress_to_fp16=False)

    async def scenario() -> None:
        async with opened("openvino_genai", limited, threads=1) as engine:
            expected = await ask(engine, PROMPTS[0], Sampling(4))
            with pytest.raises(RefusedError, match="ended the engine's process 2 times"):
                await ask(engine, PROMPTS[0] * 3, Sampling(4))
            assert await ask(engine, PROMPTS[0], Sampling(4)) == expected

    asyncio.run(scenario())


def test_the_event_loop_never_waits(exported: Path) -> None:
    busy: list[float] = []
    """CPU time of the loop's thread between two ticks, which other processes do not lengthen."""

    async def tick() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            busy.append(time.thread_time() - began)

    async def ticking() -> None:
        async with opened("openvino_genai", exported) as engine:
            task = asyncio.create_task(tick())
            await ask_all(engine, *[Sampling(200)] * 12)
            task.cancel()

    gc.collect()
    gc.disable()  # a collection takes longer, the more other tests have left in this process
    try:
        asyncio.run(ticking())
    finally:
        gc.enable()
    assert max(busy) < 0.01


def test_a_process_that_hangs_is_replaced(exported: Path) -> None:
    async def hanging() -> None:
        engine = SupervisedGeneration(openvino(), exported, SETTINGS, step_timeout_s=2)
        await engine.start()
        expected = await ask(engine, PROMPTS[0], Sampling(300))
        assert engine.pid
        os.kill(engine.pid, signal.SIGSTOP)
        assert await ask(engine, PROMPTS[0], Sampling(300)) == expected
        assert engine.statistics.restarts >= 1, "a busy machine may hold up a healthy process for as long"
        await engine.close()

    asyncio.run(hanging())


@contextmanager
def _no_more_files() -> Iterator[None]:
    """Let this process open no more files, so that it can start no process either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_answers_wait_while_the_system_starts_no_process(exported: Path) -> None:
    async def starved() -> None:
        async with opened("openvino_genai", exported) as engine:
            expected = await ask(engine, PROMPTS[0], Sampling(300))
            answer = asyncio.create_task(ask(engine, PROMPTS[0], Sampling(300)))
            await until(lambda: engine.statistics.generated_tokens > 320)
            assert engine.pid
            with _no_more_files():
                os.kill(engine.pid, signal.SIGKILL)
                await until(lambda: engine.statistics.restarts == 1)
                await asyncio.sleep(0.05)
            async with asyncio.timeout(30):
                assert await answer == expected

    asyncio.run(starved())


def test_a_process_that_writes_nonsense_is_replaced(exported: Path) -> None:
    async def confused() -> None:
        async with opened("openvino_genai", exported) as engine:
            expected = await ask(engine, PROMPTS[0], Sampling(16))
            results_of(engine.pid).write_bytes(b"\xff" * 8)
            await until(lambda: engine.statistics.restarts == 1)
            async with asyncio.timeout(30):
                assert await ask(engine, PROMPTS[0], Sampling(16)) == expected

    asyncio.run(confused())


def test_a_grammar_is_tried_again_after_its_trial_was_interrupted(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted() -> None:
        async with opened("openvino_genai", exported) as engine:
            grammars = [Grammar("regex", f"[a-z]{{{number}}}") for number in range(1, 4)]
            await ask(engine, PROMPTS[0], Sampling(4, grammar=grammars[0]))
            (process,) = {int(pid) for pid in children()} - before - {engine.pid}
            os.kill(process, signal.SIGSTOP)
            with monkeypatch.context() as patched:
                patched.setattr(trial, "_TIMEOUT_S", USUAL_TRIAL_S)
                with pytest.raises(RefusedError, match="takes longer than 2 s"):
                    await ask(engine, PROMPTS[0], Sampling(4, grammar=grammars[1]))
            await ask(engine, PROMPTS[0], Sampling(4, grammar=grammars[1]))
            (process,) = {int(pid) for pid in children()} - before - {engine.pid}
            os.kill(process, signal.SIGKILL)
            await until(lambda: not Path(f"/proc/{process}").exists())
            await asyncio.sleep(0.05)  # the event loop hears of it
            await ask(engine, PROMPTS[0], Sampling(4, grammar=grammars[2]))

    before = {int(pid) for pid in children()}
    asyncio.run(interrupted())


def test_an_engine_that_keeps_dying_gives_up(exported: Path) -> None:
    async def kill_until_it_gives_up(engine: SupervisedGeneration) -> None:
        async with asyncio.timeout(60):
            while True:
                await engine.check()
                if engine.pid:
                    with suppress(ProcessLookupError):
                        os.kill(engine.pid, signal.SIGKILL)
                await asyncio.sleep(0.05)

    async def dying() -> None:
        async with opened("openvino_genai", exported) as engine:
            with pytest.raises(EngineError, match="5 times without a token"):
                await kill_until_it_gives_up(engine)
            with pytest.raises(EngineError, match="5 times without a token"):
                await ask(engine, PROMPTS[0], Sampling(4))

    asyncio.run(dying())


def test_the_process_loads_neither_torch_nor_ray(exported: Path) -> None:
    async def loaded() -> str:
        async with opened("openvino_genai", exported) as engine:
            await ask(engine, PROMPTS[0], Sampling(1))
            return Path(f"/proc/{engine.pid}/maps").read_text()

    modules = asyncio.run(loaded())
    assert "libtorch" not in modules
    assert "_raylet" not in modules


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    engine = open_generation("openvino_genai", tmp_path)
    with pytest.raises(EngineError, match="OpenVINO cannot load"):
        asyncio.run(engine.start())
    with refused("engine.unknown"):
        open_generation("vlm", tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "RAYLOOM_VLLM_PYTHON is not set: expected the Python of an environment with vLLM; make one with"),
        ("/nowhere/python", "RAYLOOM_VLLM_PYTHON is '/nowhere/python', which is no program: expected"),
        pytest.param(
            sys.executable,
            "died before it had loaded .*; RAYLOOM_VLLM_PYTHON is .*: expected the Python of",
            marks=pytest.mark.slow,
        ),
        ("/bin/true", "died before it had loaded .*; RAYLOOM_VLLM_PYTHON is '/bin/true': expected the Python of"),
    ],
)
def test_an_environment_without_vllm_is_refused(
    given: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    if given:
        monkeypatch.setenv(VLLM_PYTHON, given)
    with pytest.raises(EngineError, match=words):
        asyncio.run(open_generation("vllm", tmp_path).start())


_IMPORT_ALONE = """
import sys, types
app = sys.modules["app"] = types.ModuleType("app")
app.__path__ = [sys.argv[1]]
import app.engines.generation.service
"""


def test_the_module_for_vllm_needs_no_package_of_rayloom() -> None:
    # -S: without installed packages
    subprocess.run([sys.executable, "-S", "-c", _IMPORT_ALONE, ROOT / "app"], check=True)
    tree = ast.parse((ROOT / "app/engines/generation/vllm.py").read_text())
    ours = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    shared = {f"app.engines.generation.{name}" for name in ("base", "channel", "service")}
    assert {name for name in ours if name.startswith("app")} == shared
