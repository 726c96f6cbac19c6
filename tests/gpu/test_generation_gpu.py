"""vLLM on GPUs, in bf16 and split over two. Not run yet: it waits for a machine with GPUs and vLLM."""

import asyncio
from pathlib import Path

import pytest
import torch

from app.engines.generation.base import Sampling
from app.engines.generation.registry import open_generation
from tests.vllm_python import WIDTH, name_vllm, needs_vllm

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none"),
    needs_vllm(),
]


@pytest.mark.parametrize(("precision", "gpus"), [("fp32", 1), ("bf16", 1), ("bf16", 2)])
def test_greedy_tokens_are_those_of_transformers(
    precision: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They import OpenVINO, which such a machine may lack.
    from tests.generating import make_language_model
    from tests.generation_contract import LENGTH, PROMPTS, ask, ask_all, opened

    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, and this machine has {torch.cuda.device_count()}")
    name_vllm(monkeypatch)
    folder = make_language_model(tmp_path, "llama", WIDTH, LENGTH)

    async def both() -> None:
        reference = open_generation("transformers", folder)
        await reference.start()
        async with opened("vllm", folder, precision=precision, device="gpu", tensor_parallel=gpus) as engine:
            samplings = [Sampling(24)] * len(PROMPTS)
            expected, answers = await ask_all(reference, *samplings), await ask_all(engine, *samplings)
            equal = sum(answer.tokens == other.tokens for answer, other in zip(answers, expected, strict=True))
            # bfloat16 has 8 bits of mantissa, so near ties may fall the other way.
            assert equal == len(PROMPTS) if precision == "fp32" else equal >= len(PROMPTS) // 2
            again = [await ask(engine, prompt, Sampling(24)) for prompt in PROMPTS]
            assert [answer.finish for answer in again] == ["length"] * len(PROMPTS)

    asyncio.run(both())
