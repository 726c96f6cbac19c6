"""A served language model, with the engine in a process of its own."""

import asyncio
import functools
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from upath import UPath

from app.engines.generation.base import GenerationSettings, Grammar, Sampling
from app.engines.generation.process import SupervisedGeneration
from app.engines.generation.program import openvino
from app.errors import DeadlineError, EngineError, OverloadError, RequestError
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.serving.batching.statistics import FailureReason
from app.serving.generation.policy import GenerationPolicy
from app.serving.generation.request import Delta, GenerationRequest
from app.serving.generation.served import ServedGenerator
from app.serving.generation.stream import AnswerStream
from app.serving.generation.tokenizer import GenerationTokenizer

RUNNER = asyncio.Runner()
"""The loop of this file's tests, which share an engine."""


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the shared loop."""

    @functools.wraps(test)
    def run_test(**fixtures: Any) -> None:
        RUNNER.run(test(**fixtures))

    return run_test


class Loader:
    """Makes served models of the same version, by default with the same engine."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        assert manifest.generation is not None
        # Without end tokens each answer has its maximum length.
        endless = manifest.generation.model_copy(update={"end_ids": ()})
        self._folder, self._manifest = folder, manifest.model_copy(update={"generation": endless})
        self._tokenizer = GenerationTokenizer.load(folder, 128)
        self.engine = SupervisedGeneration(openvino(), folder, GenerationSettings())

    @asynccontextmanager
    async def serve(self, cache_bytes: int = 2**30, **bounds: Any) -> AsyncIterator[ServedGenerator]:
        """Serve the model, and require that nothing of it goes on afterwards."""
        served = ServedGenerator(self._manifest, self.engine, self._tokenizer, GenerationPolicy(**bounds), cache_bytes)
        yield served
        assert served.in_flight == served.admission.running == served.admission.waiting == 0
        assert served.engine_statistics.running == 0

    async def start(self) -> ServedGenerator:
        """Serve the model with an engine that the test closes."""
        engine = SupervisedGeneration(openvino(), self._folder, GenerationSettings())
        await engine.start()
        return ServedGenerator(self._manifest, engine, self._tokenizer, GenerationPolicy(max_streams=1))


@pytest.fixture(scope="module")
def loader(exported_model: Path, generating_storage: UPath) -> Iterator[Loader]:
    loader = Loader(exported_model, Repository(generating_storage).manifest("writer", 1))
    RUNNER.run(loader.engine.start())
    yield loader
    RUNNER.run(loader.engine.close())
    RUNNER.close()


def request_for(prompt: Sequence[int] = (40, 41, 42), max_tokens: int = 8, **more: Any) -> GenerationRequest:
    fields = {name: more.pop(name) for name in ("stop", "num_answers", "priority", "timeout_s") if name in more}
    return GenerationRequest(tuple(prompt), Sampling(max_tokens, **more), **fields)


async def read(stream: AnswerStream) -> dict[int, list[Delta]]:
    answers: dict[int, list[Delta]] = {}
    async for delta in stream:
        answers.setdefault(delta.index, []).append(delta)
    return answers


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@on_loop
async def test_an_answer_is_the_models_own_text(loader: Loader, language_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(language_model)
    model.generation_config.eos_token_id = None
    async with loader.serve() as served:
        prompt = await served.encode("def area(width, height):\n")
        stream = await served.generate(request_for(prompt, max_tokens=20, has_logprobs=True))
        (deltas,) = (await read(stream)).values()
        tokens = [token for delta in deltas for token in delta.tokens]
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        assert [token.id for token in tokens] == expected[0, len(prompt) :].tolist()
        assert all(token.logprob is not None and token.logprob <= 0 for token in tokens)
        assert text_of(deltas) == served.tokenizer.decode(token.id for token in tokens)
        assert stream.usage.completion_tokens == len(tokens)
        assert stream.usage.prompt_tokens == len(prompt)
        assert deltas[-1].finish == "length"
        counted = served.statistics
        assert (counted.success.count, counted.generated_tokens, counted.prompt_tokens) == (1, len(tokens), len(prompt))


@on_loop
async def test_an_end_token_ends_an_answer_and_is_no_part_of_it(loader: Loader) -> None:
    async with loader.serve() as served:
        (deltas,) = (await read(await served.generate(request_for(max_tokens=20)))).values()
        tokens = [token.id for delta in deltas for token in delta.tokens]
        ending = request_for(max_tokens=20, end_ids=frozenset({tokens[9]}))
        (deltas,) = (await read(await served.generate(ending))).values()
        assert [token.id for delta in deltas for token in delta.tokens] == tokens[: tokens.index(tokens[9])]
        assert deltas[-1].finish == "stop"


@on_loop
async def test_several_answers_have_seeds_of_their_own(loader: Loader) -> None:
    async with loader.serve() as served:
        many = request_for(num_answers=3, temperature=2.0, seed=7)
        first = await read(await served.generate(many))
        again = await read(await served.generate(many))
        alone = await read(await served.generate(replace(many, num_answers=1)))
        texts = {index: text_of(deltas) for index, deltas in first.items()}
        assert sorted(texts) == [0, 1, 2]
        assert len(set(texts.values())) == 3
        assert texts == {index: text_of(deltas) for index, deltas in again.items()}
        assert text_of(alone[0]) == texts[0]


@on_loop
async def test_several_answers_read_their_prompt_once(loader: Loader) -> None:
    async with loader.serve() as served:
        starting = asyncio.create_task(served.generate(request_for(range(100), max_tokens=2, num_answers=64)))
        while not served.engine_statistics.running:
            await asyncio.sleep(0)
        # The others wait until its keys and values are in the cache.
        assert served.engine_statistics.running == 1
        assert len(await read(await starting)) == 64


@on_loop
async def test_a_stop_text_ends_an_answer_and_frees_the_engine(loader: Loader) -> None:
    async with loader.serve() as served:
        whole = text_of((await read(await served.generate(request_for(max_tokens=100))))[0])
        stop = whole[10:13]
        stream = await served.generate(request_for(max_tokens=100, stop=(stop, "never said")))
        (deltas,) = (await read(stream)).values()
        assert text_of(deltas) == whole[: whole.index(stop)]
        assert deltas[-1].finish == "stop"
        assert stream.usage.completion_tokens < 100


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (request_for([]), "the prompt is empty"),
        (request_for([1, 300]), "the prompt has token 300: expected 0 to 299"),
        (request_for([-1]), "the prompt has token -1"),
        (request_for([10**4000]), r"the prompt has token 10+\.\.\.0+: expected"),
        (request_for(max_tokens=0), "max_tokens is 0: expected 1 or more"),
        (request_for([1] * 128, max_tokens=1), "has 128 tokens and max_tokens is 1, together 129: the model reads 128"),
        (request_for([1] * 100, max_tokens=29), "set max_tokens to 28 at most"),
        (request_for(stop=("",)), "stop has a text of 0 characters"),
        (request_for(stop=("a\ud800",)), "half of a character"),
        (request_for(stop=("a",) * 10_000), "stop has 10000 texts: expected 16 at most"),
        (request_for(num_answers=1000), "n is 1000: expected 1 to 128"),
        (request_for(priority=2), "priority is 2: expected 1 to 1"),
    ],
)
@on_loop
async def test_what_the_model_cannot_answer_is_refused(
    loader: Loader, request_: GenerationRequest, sentence: str
) -> None:
    async with loader.serve() as served:
        with pytest.raises(RequestError, match=sentence):
            await served.generate(request_)
        assert served.statistics.invalid == 1
        assert served.statistics.prompt_tokens == 0


@on_loop
async def test_an_answer_that_the_cache_cannot_hold_is_refused(loader: Loader) -> None:
    async with loader.serve(cache_bytes=2**15) as served:
        tokens = served.limits.cache_tokens
        assert 0 < tokens < 128
        with pytest.raises(RequestError, match=f"the cache of the endpoint holds {tokens} tokens"):
            await served.generate(request_for(max_tokens=tokens))


@on_loop
async def test_closing_a_stream_cancels_its_answers(loader: Loader) -> None:
    async with loader.serve(max_streams=2) as served:
        # Many, because the engine may end some before this loop runs again.
        stream = await served.generate(request_for(max_tokens=120, num_answers=50))
        assert served.admission.running == 2
        assert 0 < served.admission.waiting <= 48
        await stream.aclose()
        assert loader.engine.statistics.running == served.admission.running == served.admission.waiting == 0
        assert served.statistics.failures[FailureReason.CANCELLED] == 1
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        # As does the client that goes while it waits for the first token.
        waiting = asyncio.create_task(served.generate(request_for(max_tokens=120)))
        await asyncio.sleep(0)
        assert served.in_flight == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def begun(served: ServedGenerator, request: GenerationRequest) -> AnswerStream | None:
    """Return the answers to a request; None if its deadline came before the first token."""
    try:
        return await served.generate(request)
    except DeadlineError:
        return None


@on_loop
async def test_a_deadline_ends_a_running_answer_and_one_that_waits(loader: Loader) -> None:
    async with loader.serve(max_streams=1, default_timeout_s=60) as served:
        many = request_for(max_tokens=120, num_answers=50, timeout_s=1)
        while (stream := await begun(served, many)) is None:  # its first token was late: this machine is busy
            many = replace(many, timeout_s=3 * (many.timeout_s or 0))
        engine = psutil.Process(loader.engine.pid)
        engine.suspend()  # so that the first answer is still incomplete at its deadline
        before = served.statistics.failures[FailureReason.DEADLINE]
        try:
            with pytest.raises(DeadlineError, match="waited"):
                await served.generate(request_for(timeout_s=0.02))
            with pytest.raises(DeadlineError, match=r"not complete at its deadline, after \d+ tokens|waited"):
                await read(stream)
        finally:
            engine.resume()
        assert served.statistics.failures[FailureReason.DEADLINE] == before + 2
        await read(await served.generate(request_for()))


@on_loop
async def test_an_answer_goes_on_when_its_engine_dies(loader: Loader) -> None:
    async with loader.serve() as served:
        request = request_for(max_tokens=100, num_answers=4, stop=("never said",), temperature=1.5, seed=3)
        expected = {index: text_of(deltas) for index, deltas in (await read(await served.generate(request))).items()}
        stream, restarts = await served.generate(request), served.engine_statistics.restarts
        assert loader.engine.pid is not None
        os.kill(loader.engine.pid, signal.SIGKILL)
        assert {index: text_of(deltas) for index, deltas in (await read(stream)).items()} == expected
        assert served.engine_statistics.restarts == restarts + 1


@on_loop
async def test_a_request_that_the_engine_refuses_hurts_no_other(loader: Loader) -> None:
    async with loader.serve() as served:
        stream = await served.generate(request_for(max_tokens=100))
        with pytest.raises(RequestError, match="the model cannot answer this request"):
            await served.generate(request_for(grammar=Grammar("json_schema", '{"type": "nonsense"}')))
        (deltas,) = (await read(stream)).values()
        assert deltas[-1].finish
        assert served.statistics.invalid == 1
        assert not served.statistics.failures


@on_loop
async def test_closing_finishes_admitted_answers(loader: Loader) -> None:
    served = await loader.start()
    streams = [asyncio.create_task(served.generate(request_for(max_tokens=5))) for _ in range(3)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(served.close())
    await asyncio.sleep(0)
    with pytest.raises(OverloadError, match="being unloaded"):
        await served.generate(request_for())
    answers = [await read(await stream) for stream in streams]
    await closing
    assert [answer[0][-1].finish for answer in answers] == ["length"] * 3
    with pytest.raises(EngineError):
        await served.check()


@on_loop
async def test_an_answer_that_was_not_read_yet_survives_closing(loader: Loader) -> None:
    served = await loader.start()
    stream = await served.generate(request_for(max_tokens=5))
    await served.close()
    answers = await read(stream)
    assert answers[0][-1].finish == "length"
    assert not served.statistics.failures
    assert served.statistics.success.count == 1
    assert served.in_flight == 0


@on_loop
async def test_an_answer_does_not_hold_up_closing_for_ever(loader: Loader) -> None:
    served = await loader.start()
    stream = await served.generate(request_for(max_tokens=120, num_answers=100))
    async with asyncio.timeout(30):
        await served.close(drain_s=0.05)
    with pytest.raises(OverloadError, match="unloaded"):
        await read(stream)
    assert served.in_flight == 0


@on_loop
async def test_an_engine_that_fails_fails_its_answers(loader: Loader) -> None:
    served = await loader.start()
    stream = await served.generate(request_for(max_tokens=120, num_answers=2))
    await served.engine.close()
    with pytest.raises(EngineError):
        await read(stream)
    assert served.statistics.failures == {FailureReason.ENGINE: 1}
    assert served.in_flight == served.admission.running == served.admission.waiting == 0
    await served.close()


@on_loop
async def test_hostile_requests_hurt_nobody(loader: Loader) -> None:
    draw, odd = random.Random(5), ["", "a", "\0", "é", "\u200d", "\ud800", "x" * 1001, "🤦", "\n", " "]
    async with loader.serve(max_streams=8, queue_tokens=4000) as served:
        neighbour = request_for(max_tokens=100, temperature=1.0, seed=1)
        expected = text_of((await read(await served.generate(neighbour)))[0])
        outcomes: dict[str, int] = {}

        async def attack() -> None:
            request = request_for(
                draw.choices(
                    range(-1 if draw.random() < 0.1 else 0, 300), k=draw.choice([0, 1, 5, 60, 127, 128, 5000])
                ),
                max_tokens=draw.choice([-1, 0, 1, 3, 60, 10**9]),
                stop=tuple(draw.choices(odd, k=draw.choice([0, 0, 1, 3, 20]))),
                num_answers=draw.choice([0, 1, 1, 2, 5, 10**6]),
                timeout_s=draw.choice([None, None, -1.0, 0.0, 0.001, 1.0]),
                priority=draw.choice([0, 0, 1, -1, 7]),
                temperature=draw.choice([0.0, 1.0, 5.0]),
                seed=draw.choice([None, 0, 2**63, -1]),
            )
            try:
                stream = await served.generate(request)
                if draw.random() < 0.3:
                    await stream.aclose()
                await read(stream)
                outcome = "answered"
            except (RequestError, OverloadError, DeadlineError) as error:
                outcome = type(error).__name__
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

        restarts = served.engine_statistics.restarts
        for _ in range(20):
            stream = await served.generate(neighbour)
            answer, *_ = await asyncio.gather(read(stream), *(attack() for _ in range(50)))
            assert answer
            assert text_of(answer[0]) == expected
        assert sum(outcomes.values()) == 1000
        assert {*outcomes} >= {"answered", "RequestError"}
        assert served.engine_statistics.restarts == restarts
