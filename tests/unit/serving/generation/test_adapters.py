"""A base model and two adapters of it, served beside each other as three models."""

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from upath import UPath

from app.compile.generation.compilation import GenerationCompilation
from app.compile.generation.export import load_causal_lm
from app.compile.generation.source import imported_source
from app.compile.generation.variants import requested_precisions
from app.config import LoraConfig, ModelConfig, recipe_of_model
from app.engines.generation.base import Sampling
from app.models.adapter import TrainedAdapter, adapt, is_of_adapter
from app.serving.config import DeployedGenerator, EndpointConfig
from app.serving.endpoint import Endpoint
from app.serving.generation.request import GenerationRequest
from tests.generating import (
    END_ID,
    TEXTS,
    export_language_model,
    generator_config,
    make_language_model,
    publish_language_model,
)

NAMES, TOKENS = ("base", "first", "second"), 24
PROMPTS = [[random.Random(number).randrange(1, 250) for _ in range(12)] for number in range(4)]


def write_merged(base: Path, folder: Path, apart: Path, seed: int) -> Path:
    """Write the weights folder of an adapter with random weights as a run does, and the adapter itself to ``apart``."""
    config = LoraConfig(rank=4, alpha=16)
    torch.manual_seed(seed)
    model = adapt(load_causal_lm(base), config, trains_head=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_of_adapter(name):
                parameter.normal_(std=0.2)
    shutil.copytree(base, folder)
    safetensors.torch.save_file(model.state_dict(), folder / "adapted.safetensors")
    apart.mkdir()
    with TrainedAdapter.of(folder / "adapted.safetensors", config, model) as trained:
        trained.write_merged(folder / "model.safetensors")
        trained.write_apart(apart, ModelConfig(pretrained=str(base)))
    (folder / "adapted.safetensors").unlink()
    return folder


def greedy(model: Any, prompt: list[int]) -> tuple[int, ...]:
    model.generation_config.eos_token_id = END_ID
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :].tolist()
    return tuple(tokens[: tokens.index(END_ID)] if END_ID in tokens else tokens)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the models, and of the adapters as ``first-adapter`` and ``second-adapter``."""
    root = tmp_path_factory.mktemp("adapters")
    base = make_language_model(root / "base", "llama")
    merged = {
        name: write_merged(base, root / name, root / f"{name}-adapter", seed) for seed, name in enumerate(NAMES[1:])
    }
    return {"base": base, **merged, **{f"{name}-adapter": root / f"{name}-adapter" for name in merged}}


@pytest.mark.parametrize("names", [NAMES[:2], pytest.param(NAMES, marks=pytest.mark.slow)], ids=len)
def test_each_adapter_answers_as_peft_beside_its_base_and_another(
    names: Sequence[str], folders: dict[str, Path], tmp_path: Path
) -> None:
    storage = UPath(tmp_path)
    for name in names:
        publish_language_model(storage, name, folders[name], export_language_model(folders[name], tmp_path / name))
    models: dict[str, Any] = {"base": load_causal_lm(folders["base"])}
    for name in names[1:]:
        models[name] = PeftModel.from_pretrained(load_causal_lm(folders["base"]), folders[f"{name}-adapter"])
    expected = {(name, place): greedy(models[name], prompt) for name in names for place, prompt in enumerate(PROMPTS)}
    for place in range(len(PROMPTS)):
        assert len({expected[name, place] for name in names}) == len(names)

    async def scenario() -> None:
        endpoint = Endpoint()
        deployed = {name: DeployedGenerator(production=generator_config(storage, 1, name)) for name in names}
        await endpoint.update(EndpointConfig(generators=deployed))

        async def ask(name: str, place: int) -> tuple[int, ...]:
            request = GenerationRequest(tuple(PROMPTS[place]), Sampling(TOKENS))
            answers = await endpoint.generator(name).generate(request)
            return tuple([token.id async for delta in answers for token in delta.tokens])

        asked = [key for _ in range(4) for key in expected]
        assert await asyncio.gather(*(ask(*key) for key in asked)) == [expected[key] for key in asked]
        await endpoint.update(EndpointConfig())
        await endpoint.wait_closed()

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_each_adapter_passes_the_gates_by_itself(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    samples, words = tmp_path / "texts.jsonl", [word for text in TEXTS for word in text.split()]
    rows = [json.dumps({"text": " ".join(random.Random(number).choices(words, k=40))}) for number in range(8)]
    samples.write_text("\n".join(rows), encoding="utf-8")
    recipe = recipe_of_model(name, "compile", ["compile.precisions=[fp32,int8]"])
    source = imported_source(folders[name], samples, recipe, threads=1)
    compilation = GenerationCompilation(source, recipe.compile, requested_precisions(recipe), tmp_path / name, print)
    compilation.evaluate()
    fp32, int8 = compilation.records
    assert fp32.passed
    assert int8.passed
    assert int8.rise is not None
