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
from app.errors import RecipeError
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
    ("damage", "overrides", "words"),
    [
        (_without("tokenizer.json"), [], "has no tokenizer: expected tokenizer.json"),
        (_without("config.json"), [], "has no config.json with a model_type"),
        (_without("model.safetensors"), [], "has no model.safetensors (none of its weights)"),
        (_pickled, [], "only pytorch_model.bin, which can run code"),
        (_foreign, [], "has no tensor of a BertForSequenceClassification"),
        (_layer_lost, [], "there is no bert.encoder.layer.1.output.dense.weight (1 such tensors)"),
        (_config(hidden_size=16), [], "bert.embeddings.word_embeddings.weight has shape [21, 32], the model [21, 16]"),
        (_config(hidden_size="wide"), [], "config.json cannot be read by transformers"),
        (_config(), ["model.args={hidden_size: wide}"], "of which transformers makes no SequenceClassification"),
        (_config(hidden_act="fun"), [], "of which transformers makes no SequenceClassification"),
        (_config(model_type="bart-like"), [], "is a 'bart-like', which transformers does not have"),
        (_config(vocab_size=10), [], "the tokenizer has 21 tokens, the model 10"),
        (_config(), ["data.buckets=[128]"], "data.buckets is 128, but model.pretrained"),
        (
            _config(),
            ["model.args={hiden_size: 4}"],
            "unknown key model.args.hiden_size of a bert; did you mean",
        ),
        (lambda folder: shutil.rmtree(folder), [], "does not exist: give a folder, a URI or a hub name"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), [], "tokenizer.json cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"1"), [], "model.safetensors cannot be read"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    damage: Callable[[Path], object], overrides: list[str], words: str, tmp_path: Path
) -> None:
    folder = write_encoder(tmp_path / "bert")
    recipe = recipe_of(tmp_path, folder, *overrides)
    damage(folder)
    with pytest.raises(RecipeError) as refused:
        prepare_run(Run.start("train", recipe))
    assert words in str(refused.value)
    assert not (tmp_path / "storage" / "runs").exists()


@pytest.mark.parametrize("kind", ["EsmTokenizer", "CanineTokenizer", "ByT5Tokenizer"])
def test_a_tokenizer_without_a_fast_version_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert")
    recipe = recipe_of(tmp_path, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}), encoding="utf-8")
    if kind == "EsmTokenizer":
        (folder / "vocab.txt").write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", *"ACDE"]))
    with pytest.raises(RecipeError, match=f"its tokenizer, {kind}, has no fast version in transformers"):
        prepare_run(Run.start("train", recipe))


def test_positions_that_roberta_keeps_for_padding_are_no_room_for_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, max_length=1000)
    config = AutoConfig.for_model("roberta", vocab_size=30, pad_token_id=1, max_position_embeddings=34, **BERT)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    folder = open_pretrained(str(tmp_path))
    assert folder.max_tokens == 32
    with pytest.raises(RecipeError, match="reads 32 tokens at most"):
        folder.require_length(33, "data.buckets")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.pretrained=null"], "factory is missing"),
        (["data.tokenizer.vocab_size=300"], "data.tokenizer is what model.pretrained brings"),
    ],
)
def test_keys_that_contradict_the_folder_are_refused(overrides: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=words):
        recipe_of(tmp_path, tmp_path, *overrides)


def test_the_folder_of_a_pretrained_model_says_what_images_it_takes() -> None:
    with pytest.raises(RecipeError, match=r"data\.image is what model\.pretrained brings"):
        load_recipe(ROOT / "recipes/gpu_resnet50.yaml", ["data.image.size=8"])


def test_a_name_of_the_hub_without_a_network_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match="'nobody/nothing' is no folder here, and the hub did not answer with it"):
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
    with pytest.raises(RecipeError, match="No module named 'no_such_package'; install the package"):
        open_pretrained("package:no_such_package/model")
