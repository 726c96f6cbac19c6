"""Folders of language models that cannot become a version: each is refused before anything is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig

from app.compile.generation.architectures import require_exportable
from app.compile.generation.export import export_model, load_causal_lm
from app.compile.generation.source import end_ids_of, imported_source
from app.compile.imported.run import Given, import_model
from app.config import recipe_of_model
from app.runs import Run
from tests.generating import END_ID
from tests.wording import refused


@pytest.fixture
def folder(language_model: Path, tmp_path: Path) -> Path:
    """A copy of the small GPT's folder."""
    shutil.copytree(language_model, tmp_path / "model")
    return tmp_path / "model"


def run_of(tmp_path: Path, *keys: str) -> Run:
    return Run.start("compile", recipe_of_model("writer", "compile", [f"storage={tmp_path / 'storage'}", *keys]))


def change_json(file: Path, **values: Any) -> None:
    content = json.loads(file.read_bytes()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), encoding="utf-8")


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")


def with_a_larger_vocabulary(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content["model"]["vocab"]["unheard"] = 4711
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def without_an_end(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change_json(folder / "tokenizer_config.json", eos_token=None)
    change_json(folder / "generation_config.json", eos_token_id=None)
    change_json(folder / "config.json", eos_token_id=None)


def with_settings_that_change_tokens(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", tokenizer_class="GPT2TokenizerFast", add_prefix_space=True)


def with_an_end_outside(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id=[0, 99999])


def without_a_weight(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors.pop("gpt_neox.final_layer_norm.weight")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def with_a_weight_too_many(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.gate.weight"] = torch.ones(8)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def with_a_decoder_that_cannot_be_streamed(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def with_a_broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for", encoding="utf-8")


def with_a_broken_configuration(folder: Path) -> None:
    change_json(folder / "config.json", num_attention_heads="many")


def of_another_architecture(folder: Path) -> None:
    change_json(folder / "config.json", model_type="bloom", architectures=["BloomForCausalLM"])


def with_an_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")


def of_an_adapter_alone(folder: Path) -> None:
    with_an_adapter(folder)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("harm", "rule"),
    [
        (without_tokenizer, "generation.no_tokenizer"),
        (with_a_broken_tokenizer, "generation.no_tokenizer"),
        (with_a_larger_vocabulary, "generation.vocabulary"),
        (without_an_end, "generation.no_end"),
        (with_an_end_outside, "generation.no_end"),
        (with_settings_that_change_tokens, "generation.tokenizer"),
        (without_a_weight, "generation.unreadable"),
        (with_a_weight_too_many, "generation.unreadable"),
        (with_a_decoder_that_cannot_be_streamed, "generation.tokenizer"),
        (with_a_broken_template, "generation.tokenizer"),
        (with_a_broken_configuration, "generation.unreadable"),
        (of_another_architecture, "generation.architecture"),
        (with_an_adapter, "import.adapter"),
        (of_an_adapter_alone, "import.adapter"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_folder_that_lacks_something_leaves_no_run(
    harm: Callable[[Path], None], rule: str, folder: Path, tmp_path: Path
) -> None:
    harm(folder)
    with refused(rule):
        import_model(run_of(tmp_path), Given(folder))
    assert not (tmp_path / "storage").exists()


def test_a_template_that_an_endpoint_does_not_read_is_none(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    for template in ("null", '[{"name": "tool_use", "template": "{{ messages }}"}]'):
        settings = json.loads((folder / "tokenizer_config.json").read_bytes()) | {"chat_template": json.loads(template)}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        source = imported_source(folder, None, recipe_of_model("writer", "compile", []), threads=1)
        assert not source.has_chat


def test_weights_that_are_not_finite_are_refused(folder: Path, tmp_path: Path) -> None:
    model = load_causal_lm(folder)
    with torch.no_grad():
        next(model.parameters())[3, 1] = float("nan")
    with refused("generation.not_finite"):
        export_model(model, tmp_path / "exported")


@pytest.mark.parametrize(
    ("kind", "config", "rule"),
    [
        ("mistral", {"sliding_window": 16}, "generation.window"),
        ("gemma3_text", {"sliding_window": 64}, "generation.window"),
        ("gemma2", {}, "generation.architecture"),
        ("qwen3_moe", {}, "generation.architecture"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "generation.rotation"),
    ],
)
def test_an_architecture_that_cannot_be_proved_equal_is_refused_by_name(
    kind: str, config: dict[str, Any], rule: str
) -> None:
    with refused(rule):
        require_exportable(AutoConfig.for_model(kind, **{"max_position_embeddings": 128, **config}))


def test_a_window_of_the_whole_length_is_none() -> None:
    require_exportable(AutoConfig.for_model("mistral", max_position_embeddings=128, sliding_window=128))
    require_exportable(AutoConfig.for_model("qwen2", max_position_embeddings=128))


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("compile.precisions=[bf16]", "generation.precision"),
        ("compile.engines=[onnxruntime]", "generation.engine"),
        ("compile.gates.min_cosine=0.9", "generation.key"),
    ],
)
def test_keys_of_other_models_are_refused(key: str, rule: str, folder: Path, tmp_path: Path) -> None:
    with refused(rule, key.partition("=")[0]):
        import_model(run_of(tmp_path, key), Given(folder))


def test_texts_that_are_empty_are_refused(folder: Path, tmp_path: Path) -> None:
    samples = tmp_path / "texts.jsonl"
    samples.write_text('{"text": ""}\n', encoding="utf-8")
    with refused("generation.samples"):
        import_model(run_of(tmp_path), Given(folder, samples=samples))


def test_every_end_token_of_a_chat_model_ends_an_answer(folder: Path) -> None:
    assert end_ids_of(folder) == (END_ID,)
    change_json(folder / "generation_config.json", eos_token_id=[7, 9])
    assert end_ids_of(folder) == (END_ID, 7, 9)
    # That of config.json is a default of the architecture.
    change_json(folder / "config.json", eos_token_id=2)
    assert end_ids_of(folder) == (END_ID, 7, 9)
