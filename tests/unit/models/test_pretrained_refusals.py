"""Refused folders in Hugging Face's layout, and folders from other places."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from upath import UPath

from app.config import load_recipe
from app.models.pretrained import read_configuration
from app.pretrained import open_pretrained
from app.runs import Run
from app.training.run import prepare_run
from tests.helpers import ROOT
from tests.pretrained import (
    BERT,
    recipe_of,
    write_encoder,
    write_tokenizer,
)
from tests.wording import refused


def _without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")

    return change


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _foreign(folder: Path) -> None:
    safetensors.torch.save_file({"h.0.weight": torch.zeros(2)}, folder / "model.safetensors")


def _layer_lost(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["bert.encoder.layer.1.output.dense.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "overrides", "rule", "key"),
    [
        (_without("tokenizer.json"), [], "tokenizer.missing", "model.pretrained"),
        (_without("config.json"), [], "pretrained.no_config", "model.pretrained"),
        (_without("model.safetensors"), [], "pretrained.no_weights", "model.pretrained"),
        (_pickled, [], "pretrained.no_weights", "model.pretrained"),
        (_foreign, [], "pretrained.other_weights", "model.pretrained"),
        (_layer_lost, [], "pretrained.other_weights", "model.pretrained"),
        (_config(hidden_size=16), [], "pretrained.other_weights", "model.pretrained"),
        (_config(hidden_size="wide"), [], "file.unreadable", "model.pretrained"),
        (_config(), ["model.args={hidden_size: wide}"], "pretrained.no_such_head", "model.pretrained"),
        (_config(hidden_act="fun"), [], "pretrained.no_such_head", "model.pretrained"),
        (_config(model_type="bart-like"), [], "model.type_unknown", "model.pretrained"),
        (_config(vocab_size=10), [], "pretrained.mixed", "model.pretrained"),
        (_config(), ["data.buckets=[128]"], "length.too_long", "data.buckets"),
        (_config(), ["model.args={hiden_size: 4}"], "recipe.extra_forbidden", "model.args"),
        (lambda folder: shutil.rmtree(folder), [], "file.missing", "model.pretrained"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), [], "file.unreadable", "model.pretrained"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"1"), [], "file.unreadable", "model.pretrained"),
        (lambda folder: (folder / "adapter_config.json").touch(), [], "pretrained.adapter", "model.pretrained"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    damage: Callable[[Path], object], overrides: list[str], rule: str, key: str, tmp_path: Path
) -> None:
    folder = write_encoder(tmp_path / "bert")
    recipe = recipe_of(tmp_path, folder, *overrides)
    damage(folder)
    with refused(rule, key):
        prepare_run(Run.start("train", recipe))
    assert not (tmp_path / "storage" / "runs").exists()


@pytest.mark.parametrize("kind", ["EsmTokenizer", "CanineTokenizer", "ByT5Tokenizer"])
def test_a_tokenizer_without_a_fast_version_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert")
    recipe = recipe_of(tmp_path, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}), encoding="utf-8")
    if kind == "EsmTokenizer":
        (folder / "vocab.txt").write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", *"ACDE"]))
    with refused("tokenizer.slow", "model.pretrained"):
        prepare_run(Run.start("train", recipe))


def test_positions_that_roberta_keeps_for_padding_are_no_room_for_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, max_length=1000)
    config = AutoConfig.for_model("roberta", vocab_size=30, pad_token_id=1, max_position_embeddings=34, **BERT)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    folder = open_pretrained(str(tmp_path))
    assert folder.max_tokens == 32
    with refused("length.too_long", "data.buckets"):
        folder.require_length(33, "data.buckets")


@pytest.mark.parametrize(
    ("overrides", "rule", "key"),
    [
        (["model.pretrained=null"], "model.missing", "model"),
        (["data.tokenizer.vocab_size=300"], "keys.contradict", None),
    ],
)
def test_keys_that_contradict_the_folder_are_refused(
    overrides: list[str], rule: str, key: str | None, tmp_path: Path
) -> None:
    with refused(rule, key):
        recipe_of(tmp_path, tmp_path, *overrides)


def test_the_folder_of_a_pretrained_model_says_what_images_it_takes() -> None:
    with refused("keys.contradict"):
        load_recipe(ROOT / "recipes/gpu_resnet50.yaml", ["data.image.size=8"])


def test_a_name_of_the_hub_without_a_network_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused("hub.no_answer", "model.pretrained"):
        open_pretrained("nobody/nothing")


def test_a_remote_folder_is_copied_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.pretrained.HOME", tmp_path / "home")
    folder = write_encoder(tmp_path / "bert")
    memory = UPath("memory://models/bert")
    for file in UPath(folder).iterdir():
        (memory / file.name).write_bytes(file.read_bytes())
    first, second = (open_pretrained(str(memory)) for _ in range(2))
    assert first == second
    assert read_configuration(str(memory))["hidden_size"] == BERT["hidden_size"]
    assert len([path for path in (tmp_path / "home/pretrained").iterdir() if path.is_dir()]) == 1


def test_a_package_holds_a_folder(tmp_path: Path) -> None:
    assert open_pretrained("package:app/project").path.name == "project"
    with refused("import.fails", "model.pretrained"):
        open_pretrained("package:no_such_package/model")
