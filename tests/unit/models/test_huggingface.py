"""Models of transformers, built from a recipe's arguments."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from transformers import AutoModelForCausalLM
from upath import UPath

from app.checksums import write_checksums
from app.config import ModelConfig, load_recipe
from app.models.factory import build_model, logits_of
from app.models.splitting import cuts_of, layers_of
from app.models.staged import run_layers
from app.models.traits import traits_of
from app.published.weights import publish_weights
from app.tasks import prepare
from app.training.checkpoints.names import WEIGHT, parameter
from app.training.checkpoints.reader import export_weights
from app.training.checkpoints.state import Position, TrainState
from app.training.checkpoints.writer import STATE_FILE
from tests.helpers import write_sums
from tests.wording import refused

FACTS = {"vocab_size": 60, "max_length": 16, "num_labels": 3, "unknown_id": 1}
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "num_attention_heads": 4}
BERT = LLAMA | {"model_type": "bert"}


def build(kind: str, **args: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(factory=f"app.models.huggingface:{kind}", args=args), FACTS).eval()


@pytest.mark.parametrize("args", [LLAMA | {"model_type": "llama"}, GPT2 | {"model_type": "gpt2"}])
def test_a_causal_model_answers_the_next_token(args: dict[str, Any], tmp_path: Path) -> None:
    model = build("causal_lm", **args, tie_word_embeddings=True)
    ids = torch.randint(0, 60, (2, 16))
    logits = logits_of(model(input_ids=ids))
    assert logits.shape == (2, 16, 60)
    changed = ids.clone()
    changed[:, 9] = (ids[:, 9] + 1) % 60
    assert torch.allclose(logits[:, :9], logits_of(model(input_ids=changed))[:, :9], atol=1e-6)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.max_position_embeddings == 16
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    other = build("causal_lm", **args, tie_word_embeddings=True)
    torch.nn.init.zeros_(other.get_input_embeddings().weight)
    safetensors.torch.load_model(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(logits_of(other(input_ids=ids)), logits)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_layers_of_a_decoder_are_the_model_bit_for_bit(model_type: str, tied: bool, attention: str) -> None:
    grouped = LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": tied}
    model = build("causal_lm", model_type=model_type, **grouped)
    model.set_attn_implementation(attention)
    ids = torch.randint(0, 60, (2, 16))
    assert torch.equal(run_layers(layers_of(model), ids), logits_of(model(input_ids=ids)))
    cuts = cuts_of(model)
    assert len(cuts) == 2 * 7
    assert cuts["model.layers.1.self_attn.k_proj"] == "colwise"
    assert cuts["model.layers.1.mlp.down_proj"] == "rowwise"
    traits = traits_of(model)
    assert (traits.layers, traits.tensor_divisor) == (5, 2)


@pytest.mark.parametrize(
    "args", [LLAMA | {"model_type": "mistral", "sliding_window": 8}, LLAMA | {"model_type": "qwen3"}]
)
def test_a_decoder_that_is_more_than_such_layers_is_not_cut_into_stages(args: dict[str, Any]) -> None:
    assert traits_of(build("causal_lm", **args)).layers is None


def test_transformers_reads_the_weights_that_training_keeps(tmp_path: Path) -> None:
    corpus = [f"data.source={write_sums(tmp_path / 'corpus')}", "data.tokenizer={kind: bytes}", "data.block_length=16"]
    keys = ["model.factory=app.models.huggingface:causal_lm", f"model.args={GPT2 | {'model_type': 'gpt2'}}"]
    recipe = load_recipe("recipes/stdlib_gpt.yaml", [*corpus, *keys])
    data, checkpoint, weights = prepare(recipe), tmp_path / "checkpoint", tmp_path / "weights"
    model = build_model(recipe.model, data.facts).eval()
    content = {parameter(name, WEIGHT): tensor for name, tensor in model.named_parameters()}
    save(content, storage_writer=FileSystemWriter(checkpoint), no_dist=True)
    state = TrainState(
        position=Position(), epoch_order="windows-2", records=[], workers=1, tensor=1, pipeline=1, optimizer_steps=0,
        schedule_steps=0, loss_scale=None, precision="fp32", shapes={},
    )  # fmt: skip
    (checkpoint / STATE_FILE).write_text(state.model_dump_json(), encoding="utf-8")
    write_checksums(UPath(checkpoint))
    publish_weights(partial(export_weights, UPath(checkpoint)), data, recipe, UPath(weights))
    ids = torch.randint(0, 256, (2, 16))
    read = AutoModelForCausalLM.from_pretrained(weights)
    assert torch.equal(read(input_ids=ids).logits, logits_of(model(input_ids=ids)))


@pytest.mark.parametrize("args", [BERT, LLAMA | {"model_type": "llama"}])
def test_a_classifier_does_not_see_padding(args: dict[str, Any]) -> None:
    model = build("sequence_classifier", **args)
    ids = torch.randint(3, 60, (2, 16))
    ids[:, 10:] = 0
    mask = (ids != 0).long()
    logits = logits_of(model(input_ids=ids, attention_mask=mask))
    assert logits.shape == (2, 3)
    assert torch.allclose(logits, logits_of(model(input_ids=ids[:, :10], attention_mask=mask[:, :10])), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "args", "rule", "key"),
    [
        ("causal_lm", {"model_type": "lama"}, "model.type_unknown", "model.args.model_type"),
        ("causal_lm", {"model_type": "zzz"}, "model.type_unknown", "model.args.model_type"),
        ("causal_lm", {"model_type": "llama", "hiden_size": 64}, "recipe.extra_forbidden", "model.args"),
        (
            "causal_lm",
            {"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4},
            "model.args_refused",
            "model.args",
        ),
        ("causal_lm", {}, "recipe.missing", "model.args.model_type"),
        ("sequence_classifier", {"model_type": "resnet"}, "model.type_unknown", "model.args.model_type"),
    ],
)
def test_wrong_arguments_are_refused(kind: str, args: dict[str, Any], rule: str, key: str) -> None:
    with refused(rule, key) as error:
        build(kind, **args)
    assert len(str(error.value)) < 1000
