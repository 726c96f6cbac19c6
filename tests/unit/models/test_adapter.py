"""Adapters: what is trained, how it is merged and what is kept apart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from upath import UPath

from app.checksums import VerifiedFolder, verify_checksums
from app.models import factory
from app.models.factory import blueprint_of, logits_of
from app.models.pretrained import with_pretrained_weights
from app.published.weights import load_weights
from app.runs import Run
from app.tasks import prepare
from app.training.checkpoints.parts import SavedParts
from app.training.run import prepare_run
from tests.fresh_adapter import fresh_adapter
from tests.helpers import ROOT
from tests.pretrained import TEXTS, recipe_of, train_alone, write_decoder, write_encoder
from tests.wording import refused

LANGUAGE = ["task=language-modeling", "data.buckets=[32, 64, 128, 256]", "data.block_length=32"]


def documents(folder: Path) -> str:
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"{'the film was good ' * 20}{number}", encoding="utf-8")
    return f"data.source={folder}"


@pytest.mark.parametrize("dora", [False, True])
def test_a_classifiers_adapter_and_its_head_learn_and_the_rest_stays(
    dora: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_encoder(tmp_path / "bert")
    adapter = f"model.adapter={{lora: {{rank: 4, alpha: 8, dora: {dora}}}}}"
    run = Run.start("train", recipe_of(tmp_path, folder, adapter, "train.optimizer.lr=0.01"))
    outcome = train_alone(run)
    assert "parameters are trained, the others frozen" in capfd.readouterr().out
    weights, kept = UPath(outcome.artifacts["weights"]), Path(outcome.artifacts["adapter"])
    merged = load_weights(weights)
    frozen = safetensors.torch.load_file(folder / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(merged.model.bert.embeddings.word_embeddings.weight, frozen)
    tensors = safetensors.torch.load_file(kept / "adapter_model.safetensors")
    assert max(tensor.abs().max() for name, tensor in tensors.items() if "lora_B" in name) > 1e-3
    assert json.loads((kept / "adapter_config.json").read_bytes())["base_model_name_or_path"] == str(folder)
    reference = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(folder), kept).eval()
    encoded = {name: torch.from_numpy(array) for name, array in merged.processor.encode(TEXTS).items()}
    with torch.no_grad():
        assert torch.allclose(logits_of(merged.model(**encoded)), reference(**encoded).logits, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_merged_causal_model_answers_as_peft(model_type: str, dora: bool, tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "decoder", model_type)
    keys = [*LANGUAGE, documents(tmp_path / "documents"), "train.early_stopping=null", "train.optimizer.lr=0.01"]
    adapter = f"model.adapter={{lora: {{rank: 4, alpha: 8, dora: {dora}}}}}"
    run = Run.start("train", recipe_of(tmp_path, folder, *keys, adapter, "train.global_batch_size=4"))
    outcome = train_alone(run)
    ids = torch.randint(5, 20, (2, 9))
    merged = AutoModelForCausalLM.from_pretrained(outcome.artifacts["weights"]).eval()
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        untouched = base(input_ids=ids).logits
        reference = PeftModel.from_pretrained(base, outcome.artifacts["adapter"]).eval()(input_ids=ids).logits
        assert torch.allclose(merged(input_ids=ids).logits, reference, atol=1e-5)
    assert (reference - untouched).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("adapter", "stages"),
    [
        ("null", [0, 3]),
        ("{lora: {rank: 4}}", [0, 3]),
        pytest.param("null", [0, 1, 2], marks=pytest.mark.slow),
        pytest.param("{lora: {rank: 4}}", [0, 1, 2], marks=pytest.mark.slow),
        pytest.param("{lora: {rank: 4, dora: true}}", [0, 1, 2, 3], marks=pytest.mark.slow),
    ],
)
def test_every_zero_stage_starts_from_the_folder_and_trains_the_same(
    adapter: str, stages: list[int], tmp_path: Path
) -> None:
    """In one process. tests/parity compares two with PEFT's own model."""
    folder, source = write_decoder(tmp_path / "decoder"), documents(tmp_path / "documents")
    small = "train.deepspeed={zero_optimization: {stage3_param_persistence_threshold: 0}}"
    losses = {}
    linear = functional.linear
    for stage in stages:
        keys = [*LANGUAGE, source, "train.early_stopping=null", "train.global_batch_size=4", "train.optimizer.lr=0.01"]
        plan = [f"train.plan={{zero_stage: {stage}}}", small, f"model.adapter={adapter}", f"storage={tmp_path / 's'}"]
        run = Run.start("train", recipe_of(tmp_path, folder, *keys, *plan))
        train_alone(run)
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        losses[stage] = [line[name] for name in ("loss", "val_loss") for line in lines if name in line]
    assert len(losses[0]) > 4
    assert losses[0][-1] < losses[0][0]
    for stage in stages[1:]:
        assert losses[stage] == pytest.approx(losses[0], rel=1e-4)
    assert functional.linear is linear  # DeepSpeed replaces it for the process


@pytest.mark.parametrize("stage", [1, 3])
def test_only_the_adapter_has_optimizer_state(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "SMALL_BYTES", 0)
    folder = write_decoder(tmp_path / "decoder")
    keys = [*LANGUAGE, documents(tmp_path / "documents"), "train.early_stopping=null", "train.max_steps=1"]
    keys.append(f"train.plan={{zero_stage: {stage}}}")
    adapter = "model.adapter={lora: {rank: 2, targets: [q_proj, v_proj]}}"
    run = Run.start("train", recipe_of(tmp_path, folder, *keys, adapter, "train.global_batch_size=4"))
    outcome = train_alone(run)
    saved = SavedParts(VerifiedFolder(UPath(outcome.artifacts["checkpoint"]))).names
    with_state = {name.split("/")[1] for name in saved if name.endswith(("/exp_avg", "/exp_avg_sq"))}
    blueprint = blueprint_of(run.recipe.model, prepare(run.recipe).facts, adapted=True)
    model = with_pretrained_weights(blueprint, run.recipe.model).make()
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[4] for name in names} == {"q_proj", "v_proj"}
    assert len(names) == 2 * 2 * 2
    assert with_state == names


@pytest.mark.parametrize("stage", [0, 3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))])
def test_frozen_weights_are_written_once_however_often_the_run_is_saved_and_goes_on(stage: int, tmp_path: Path) -> None:
    folder, source = write_decoder(tmp_path / "decoder"), documents(tmp_path / "documents")
    keys = [*LANGUAGE, source, "train.early_stopping=null", "train.global_batch_size=4", "train.epochs=9"]
    keys += ["train.checkpoint={every_steps: 1, num_to_keep: 99}", f"train.plan={{zero_stage: {stage}}}"]
    keys += ["model.adapter={lora: {rank: 2, targets: [q_proj]}}", "train.optimizer.lr=0.01"]
    runs = {name: Run.start("train", recipe_of(tmp_path, folder, *keys, "train.max_steps=4")) for name in ("a", "b")}
    whole = train_alone(runs["a"])
    runs["b"].recipe = recipe_of(tmp_path, folder, *keys, "train.max_steps=2")
    train_alone(runs["b"])
    runs["b"].until_result.close()
    runs["b"].recipe = runs["a"].recipe
    resumed = train_alone(runs["b"])
    for run in runs.values():
        checkpoints = sorted((Path(run.folder.path) / "checkpoints").glob("step_*"))
        assert len(checkpoints) >= 4
        frozen = {file.stat().st_ino for step in checkpoints for file in step.glob("*frozen*.distcp")}
        trained = [file.stat().st_size for step in checkpoints for file in step.glob("__0_[0-9]*.distcp")]
        (step, *_) = checkpoints
        assert len(frozen) == len(list(step.glob("*frozen*.distcp"))) > 0
        assert max(trained) < sum(file.stat().st_size for file in step.glob("*frozen*.distcp"))
        # Each checkpoint is whole by itself.
        verify_checksums(UPath(step))
    given = safetensors.torch.load_file(folder / "model.safetensors")
    for ended in (whole, resumed):
        merged = safetensors.torch.load_file(Path(ended.artifacts["weights"]) / "model.safetensors")
        changed = {name for name in given if not torch.equal(merged[name], given[name])}
        assert {name.split(".")[-2] for name in changed} == {"q_proj"}


def test_every_build_draws_the_same_fresh_adapter(tmp_path: Path) -> None:
    """A build that is first in its process once was not recorded, and drew other values than the next."""
    folder = str(write_decoder(tmp_path / "decoder"))
    command = [sys.executable, "-m", "tests.fresh_adapter", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first == second == fresh_adapter(folder)


@pytest.mark.parametrize(
    ("overrides", "rule", "key"),
    [
        (["model.adapter={lora: {targets: [q_proj]}}"], "adapter.targets", "model.adapter.lora.targets"),
        (["model.adapter={lora: {targets: [classifier]}}"], "adapter.targets", "model.adapter.lora.targets"),
        (["model.adapter={lora: {rank: 0}}"], "recipe.greater_than", "model.adapter.lora.rank"),
        (
            ["model.pretrained=null", "model.factory=app.models.gpt:gpt", "model.adapter={}"],
            "adapter.no_weights",
            "model",
        ),
        (["model.adapter={}", "train.prune={weights: /w}"], "keys.contradict", "train.prune"),
        (["model.adapter={}", "train.workers=2", "train.plan={tensor: 2}"], "plan.cannot_run", "train.plan"),
    ],
)
def test_an_adapter_that_cannot_be_trained_is_refused(
    overrides: list[str], rule: str, key: str, tmp_path: Path
) -> None:
    folder = write_encoder(tmp_path / "bert")
    with refused(rule, key):
        prepare_run(Run.start("train", recipe_of(tmp_path, folder, *overrides)))
