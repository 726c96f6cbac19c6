"""A language model compiled for vLLM, whose environment ``RAYLOOM_TEST_VLLM_PYTHON`` names."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from upath import UPath

from app.engines.generation.base import Sampling
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.serving.generation.loading import load_generator
from tests.generating import END_ID, TEXTS, generator_config, make_language_model
from tests.generation_contract import ask
from tests.importing import imported
from tests.vllm_python import WIDTH, name_vllm, needs_vllm

pytestmark = [needs_vllm(), pytest.mark.slow]


def _samples(folder: Path) -> Path:
    draw, words = random.Random(0), " ".join(TEXTS).split()
    rows = [json.dumps({"text": " ".join(draw.choices(words, k=20))}) for _ in range(6)]
    (folder / "texts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder / "texts.jsonl"


def test_a_model_is_published_for_vllm_with_the_perplexity_of_openvino(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_vllm(monkeypatch)
    source, samples, storage = (
        make_language_model(tmp_path / "source", width=WIDTH),
        _samples(tmp_path),
        tmp_path / "storage",
    )
    keys = (f"--samples={samples}", "compile.precisions=[fp32]")
    imported(storage, "writer", source, *keys)
    output = imported(storage, "writer", source, *keys, "compile.engines=[vllm]")
    assert "vllm fp32: perplexity" in output
    ours, theirs = (Repository(UPath(storage)).manifest("writer", version) for version in (1, 2))
    assert (theirs.engine_key.engine, theirs.engine_key.device, theirs.engine_key.precision) == ("vllm", "cpu", "fp32")
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(theirs.files)
    assert theirs.generation is not None
    assert theirs.generation.greedy.equal_prompts == theirs.generation.greedy.prompts
    assert theirs.scaled_difference < 1e-5
    assert _perplexity(theirs) == pytest.approx(_perplexity(ours), rel=1e-5)
    asyncio.run(_serve(UPath(storage)))


def _perplexity(manifest: Manifest) -> float:
    assert manifest.generation is not None
    assert manifest.generation.perplexity is not None
    return manifest.generation.perplexity.value


async def _serve(storage: UPath) -> None:
    """Load both versions as an endpoint does, and compare their answers."""
    answers = []
    for version in (1, 2):
        served = await load_generator(generator_config(storage, version))
        sampling = Sampling(16, end_ids=frozenset({END_ID}))
        answers.append(await ask(served.engine, list(await served.encode("def area(")), sampling))
        await served.close()
    assert answers[0] == answers[1]
