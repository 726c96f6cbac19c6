"""Training a language model: on blocks of tokens, the same for any number of workers."""

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from upath import UPath

from app.config import load_recipe
from app.data.tokenizer import LanguageTokenizer
from app.models.factory import build_model
from tests.helpers import SGD, losses, train_alone, write_sums

RECIPE = "recipes/stdlib_gpt.yaml"
SMALL = ["data.block_length=32", "data.tokenizer={kind: bytes}", "model.args={layers: 1, width: 32, heads: 2}"]


def plain(source: str) -> list[str]:
    return [source, *SMALL, *SGD, "train.precision=fp32"]


@pytest.fixture(scope="module")
def one(source: str, home: Path) -> dict[str, Any]:
    """The run of one process."""
    return train_alone(*plain(source), f"storage={home / 'storage'}", recipe=RECIPE)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"data.source={write_sums(tmp_path_factory.mktemp('corpus'))}"


@pytest.mark.parametrize(
    "plan", ["{pipeline: 2, micro_batch: 8}", "{tensor: 2}", pytest.param("{zero_stage: 3}", marks=pytest.mark.slow)]
)
def test_any_plan_keeps_the_weights_of_one_process(source: str, one: dict[str, Any], plan: str) -> None:
    cut = train_alone(*plain(source), f"train.plan={plan}", processes=2, recipe=RECIPE)
    assert losses(cut) == pytest.approx(losses(one), abs=1e-4)
    assert cut["metrics"]["val_perplexity"] == pytest.approx(one["metrics"]["val_perplexity"], rel=1e-4)
    assert losses(one)[-1] < 0.8 * losses(one)[0]
    expected, weights = (
        safetensors.torch.load_file(Path(result["artifacts"]["weights"]) / "model.safetensors") for result in (one, cut)
    )
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-5)


def test_it_learns_the_rule_and_keeps_what_it_takes_to_use_it(source: str) -> None:
    args = [source, *SMALL, "train.epochs=8", "train.global_batch_size=16", "train.optimizer.lr=1e-2"]
    result = train_alone(*args, recipe=RECIPE)
    metrics = result["metrics"]
    assert metrics["val_perplexity"] == pytest.approx(math.exp(metrics["val_loss"]))
    assert metrics["val_perplexity"] < 5
    assert metrics["val_accuracy"] > 0.5
    folder = UPath(Path(result["artifacts"]["weights"]))
    model = build_model(load_recipe(str(folder / "recipe.yaml")).model, LanguageTokenizer.load(folder).facts)
    safetensors.torch.load_model(model, str(folder / "model.safetensors"))
