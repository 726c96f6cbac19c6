"""Training that starts from the weights of a folder in Hugging Face's layout."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
)
from upath import UPath

from app.compile.run import compile_model
from app.config import Recipe, load_recipe
from app.data.images import ImageProcessor, encode_png
from app.data.processor import Processor
from app.data.text import TextProcessor
from app.models import factory
from app.models.factory import blueprint_of, logits_of
from app.models.pretrained import match_weights, with_pretrained_weights
from app.pretrained import open_pretrained
from app.published.weights import load_weights
from app.repository.repository import Repository
from app.runs import Run, execute
from app.serving.config import DeployedModel, EndpointConfig
from app.tasks import prepare
from app.training.publication import export_checkpoint, finish_run
from app.training.resume import start_or_resume
from app.training.run import open_run, prepare_run
from app.training.session import train
from app.training.worker import start_worker
from tests.pretrained import (
    LEARNING,
    TEXTS,
    recipe_of,
    write_decoder,
    write_encoder,
    write_image_model,
    write_opinions,
    write_resnet50,
)
from tests.serving import serving
from tests.toy import version_config
from tests.wording import refused


def made(recipe: Recipe) -> torch.nn.Module:
    assert recipe.model.pretrained is not None
    torch.manual_seed(0)
    blueprint = blueprint_of(recipe.model, prepare(recipe).facts)
    return with_pretrained_weights(blueprint, recipe.model).make().eval()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_classifier_has_the_encoder_of_the_folder_and_a_fresh_head(
    recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recorded:
        monkeypatch.setattr(factory, "SMALL_BYTES", 0)
    folder = write_encoder(tmp_path / "bert")
    model = made(recipe_of(tmp_path, folder))
    ids = torch.randint(4, 20, (2, 9))
    expected = AutoModel.from_pretrained(folder).eval()(input_ids=ids).last_hidden_state
    assert torch.equal(model.bert(input_ids=ids).last_hidden_state, expected)
    assert logits_of(model(input_ids=ids)).shape == (2, 2)
    assert 0 < model.classifier.weight.abs().mean() < 0.1
    match = match_weights(model, str(folder))
    assert match.fresh == ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"]
    assert all(name.startswith("cls.") for name in match.unused)
    assert "made anew: bert.pooler.dense.weight" in str(match)


def test_a_head_of_the_same_size_is_kept_and_another_is_made_anew(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "two", labels=2)
    kept = safetensors.torch.load_file(folder / "model.safetensors")["classifier.weight"]
    assert torch.equal(made(recipe_of(tmp_path, folder)).classifier.weight, kept)
    other = recipe_of(tmp_path, write_encoder(tmp_path / "five", labels=5))
    assert match_weights(made(other), str(other.model.pretrained)).fresh == ["classifier.weight", "classifier.bias"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_our_own_gpt_is_written_for_transformers(positions: str, tied: bool, tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(10):
        (documents / f"{number}.txt").write_text(f"{'the film was good ' * 40}{number}", encoding="utf-8")
    model = f"model.args={{layers: 2, width: 32, heads: 4, positions: {positions}, tied: {tied}}}"
    keys = [f"data.source={documents}", "data.block_length=32", "data.tokenizer.vocab_size=300", model, "tune=null"]
    steps = ["train.max_steps=2", "train.workers=1", "train.global_batch_size=8", f"storage={tmp_path / 'storage'}"]
    run = Run.start("train", load_recipe("recipes/stdlib_gpt.yaml", [*keys, *steps]))
    plan, data = prepare_run(run)
    open_run(run, plan, data)
    ending = train(plan, data, start_worker(run.recipe.train), run.folder)
    weights = finish_run(run, data, ending).artifacts["weights"]
    export_checkpoint(run.folder, UPath(tmp_path / "exported"), for_transformers=True)
    trained = blueprint_of(run.recipe.model, data.facts).load(
        safetensors.torch.load_file(f"{weights}/model.safetensors")
    )
    ids = torch.from_numpy(data.validation.batch([0, 1]).inputs["input_ids"])
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    assert torch.allclose(read(input_ids=ids).logits, logits_of(trained.eval()(ids)), atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer("the film")["input_ids"] == data.tokenizer.encode("the film")
    language = ["task=language-modeling", f"data.source={documents}", "data.buckets=[32, 64, 128, 256]"]
    tuned = recipe_of(tmp_path, tmp_path / "exported", *language, "data.block_length=32", "train.early_stopping=null")
    assert prepare(tuned).tokenizer.encode("the film") == data.tokenizer.encode("the film")
    assert torch.allclose(logits_of(made(tuned)(input_ids=ids)), read(input_ids=ids).logits, atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "gpt_neox"])
def test_a_causal_model_answers_as_transformers(model_type: str, tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "decoder", model_type, tie_word_embeddings=model_type == "qwen3")
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(10):
        (documents / f"{number}.txt").write_text(f"{'the film was good ' * 20}{number}", encoding="utf-8")
    language = ["task=language-modeling", f"data.source={documents}", "data.buckets=[32, 64, 128, 256]"]
    recipe = recipe_of(tmp_path, folder, *language, "data.block_length=32", "train.early_stopping=null")
    data, model = prepare(recipe), made(recipe)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.from_numpy(data.validation.batch([0]).inputs["input_ids"])
    assert torch.equal(logits_of(model(input_ids=ids)), reference(input_ids=ids).logits)
    assert ids[0, :6].tolist() == AutoTokenizer.from_pretrained(folder)("the film was good the")["input_ids"][:6]


def test_texts_become_what_the_folders_tokenizer_makes(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert")
    processor = prepare(recipe_of(tmp_path, folder)).train.processor
    assert isinstance(processor, TextProcessor)
    processor.save(UPath(tmp_path / "saved"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = tokenizer(TEXTS, padding="max_length", max_length=16, truncation=True, return_tensors="np")
    for one in (processor, TextProcessor.load(UPath(tmp_path / "saved"))):
        encoded = one.encode(TEXTS)
        for name in ("input_ids", "attention_mask"):
            assert np.array_equal(encoded[name], expected[name])
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token_id == 1


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}},
        {"size": {"shortest_edge": 16}, "crop_pct": 0.875, "image_processor_type": "ConvNextImageProcessor"},
        {"size": {"shortest_edge": 384}, "crop_pct": 0.875, "image_processor_type": "ConvNextImageProcessor"},
    ],
)
def test_images_become_what_the_folders_processor_makes(given: dict[str, Any], tmp_path: Path) -> None:
    from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    folder = write_image_model(tmp_path / "vit", **given)
    processor: Processor = ImageProcessor.from_pretrained(open_pretrained(str(folder)), load_recipe_data())
    processor.save(UPath(tmp_path / "saved"))
    pixels = np.random.default_rng(0).integers(0, 256, (30, 24), dtype=np.uint8)
    content = encode_png(pixels)
    settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    kind = ConvNextImageProcessorPil if "crop_pct" in given else ViTImageProcessorPil
    reference = kind(**settings)
    expected = reference(Image.fromarray(pixels).convert("RGB"), return_tensors="np")["pixel_values"]
    for one in (processor, ImageProcessor.load(UPath(tmp_path / "saved"))):
        assert np.allclose(one.encode([content])["pixel_values"], expected, atol=1e-5)


def load_recipe_data() -> Any:
    return load_recipe("recipes/digits.yaml").data


def test_an_image_classifier_starts_from_its_folder(tmp_path: Path) -> None:
    folder = write_image_model(tmp_path / "vit")
    images = ["task=image-classification", "data.source=builtin:digits", "data.buckets=[32, 64, 128, 256]"]
    recipe = recipe_of(tmp_path, folder, *images)
    data, model = prepare(recipe), made(recipe)
    assert data.facts == {"num_labels": 10, "channels": 3, "image_size": 16}
    data.save(UPath(tmp_path / "data"))
    kept = ImageProcessor.load(UPath(tmp_path / "data"))
    np.testing.assert_array_equal(
        kept.encode(data.train.split.inputs[:1])["pixel_values"][0], data.train.batch([0]).inputs["pixel_values"][0]
    )
    read = AutoImageProcessor.from_pretrained(tmp_path / "data")
    assert read.size["height"] == 16
    pixels = torch.from_numpy(data.train.batch([0, 1]).inputs["pixel_values"])
    reference = AutoModelForImageClassification.from_pretrained(folder).eval()
    assert torch.equal(model.vit(pixels).last_hidden_state, reference.vit(pixels).last_hidden_state)


def test_a_run_keeps_all_that_the_trained_model_needs_to_be_compiled_and_served(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_encoder(tmp_path / "bert")
    sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    keys = [*LEARNING, "compile.precisions=[fp32]", "compile.engines=[onnxruntime]", "compile.batch_sizes=[1]"]
    run = start_or_resume("train", recipe_of(tmp_path, folder, *keys))
    plan, data = prepare_run(run)
    open_run(run, plan, data)
    outcome = finish_run(run, data, train(plan, data, start_worker(run.recipe.train), run.folder))
    said = capfd.readouterr().out
    assert "made anew: bert.pooler.dense.weight, bert.pooler.dense.bias, classifier.weight, classifier.bias" in said
    assert outcome.metrics.model_dump()["val_accuracy"] > 0.9
    weights = UPath(outcome.artifacts["weights"])
    shutil.rmtree(folder)
    trained = load_weights(weights)
    config = json.loads((weights / "config.json").read_bytes())
    assert (config["id2label"], config["hidden_size"]) == ({"0": "negative", "1": "positive"}, 32)
    encoded = {name: torch.from_numpy(array) for name, array in trained.processor.encode(TEXTS[:2]).items()}
    with torch.no_grad():
        assert [trained.targets.labels[index] for index in logits_of(trained.model(**encoded)).argmax(-1)] == [
            "positive",
            "negative",
        ]
    run.until_result.close()
    resumed = recipe_of(tmp_path, folder, *keys, f"train.resume={run.run_id}")
    assert start_or_resume("train", resumed).run_id == run.run_id
    assert execute(run, lambda _: outcome).status == "succeeded"
    assert execute(Run.start("compile", run.recipe), compile_model).status == "succeeded"
    storage = UPath(tmp_path / "storage")
    manifest = Repository(storage).manifest("digits", 1)
    assert manifest.lineage.pretrained == f"{folder} sha256:{sha256}"
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(manifest.files)
    served = DeployedModel(production=version_config(storage, 1, "digits"))
    with serving() as server:
        server.run(server.endpoint.update(EndpointConfig(models={"digits": served})))
        answer = httpx.post(f"http://{server.http}/v1/models/digits/predict", json={"inputs": TEXTS[:2]}).json()
    assert [prediction["label"] for prediction in answer["predictions"]] == ["positive", "negative"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu_resnet50", "gpu_bert"])
def test_a_recipe_for_a_machine_with_gpus_trains_some_steps_on_a_cpu(name: str, tmp_path: Path) -> None:
    short = ["train.global_batch_size=4", "train.max_steps=4", "train.early_stopping=null"]
    if name == "gpu_bert":
        folder = write_encoder(
            tmp_path / "bert", hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
        )
        source, parameters = write_opinions(tmp_path / "texts.jsonl"), 85e6  # the vocabulary has 21 words
        short.append("data.buckets=[16, 32]")  # the small tokenizer reads no more than 64
    else:
        folder, source, parameters = write_resnet50(tmp_path / "resnet", 64), tmp_path / "photos", 23e6
        generator = np.random.default_rng(0)
        for number in range(40):
            (source / str(number % 2)).mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 128, (80, 96), dtype=np.uint8) + np.uint8(number % 2 * 127)
            (source / str(number % 2) / f"{number}.png").write_bytes(encode_png(pixels))
    keys = [f"model.pretrained={folder}", f"data.source={source}", f"storage={tmp_path / 'storage'}"]
    on_cpu = ["train.device=cpu", "train.precision=fp32", "train.cpus_per_worker=1", "train.loader.num_workers=0"]
    run = Run.start("train", load_recipe(f"recipes/{name}.yaml", [*keys, *on_cpu, *short]))
    plan, data = prepare_run(run)
    assert sum(parameter.numel() for parameter in blueprint_of(plan.recipe.model, data.facts).model.parameters()) > (
        parameters
    )
    open_run(run, plan, data)
    assert train(plan, data, start_worker(run.recipe.train), run.folder).step == 4
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) >= 4
    assert all(0 < loss < 5 for loss in losses)


@pytest.mark.parametrize("adapter", ["null", "{lora: {rank: 2}}"])
def test_only_a_run_without_a_checkpoint_needs_the_folder_again(adapter: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "bert")
    keys = [f"model.adapter={adapter}", "train.early_stopping=null", "train.checkpoint.every_steps=1"]
    first = Run.start("train", recipe_of(tmp_path, folder, *keys, "train.max_steps=1"))
    plan, data = prepare_run(first)
    open_run(first, plan, data)
    assert train(plan, data, start_worker(first.recipe.train), first.folder).step == 1
    first.until_result.close()
    folder.rename(tmp_path / "away")
    second = start_or_resume("train", recipe_of(tmp_path, folder, *keys, f"train.resume={first.run_id}"))
    plan, data = prepare_run(second)
    assert plan.recipe.model == first.recipe.model
    assert train(plan, data, start_worker(second.recipe.train), second.folder).step > 1
    shutil.rmtree(second.folder / "checkpoints")
    with refused("file.missing", "model.pretrained"):
        prepare_run(second)
    write_encoder(folder, labels=2)
    with refused("pretrained.changed", "model.pretrained"):
        prepare_run(second)


@pytest.mark.parametrize("task", ["text-classification", "language-modeling"])
def test_a_tokenizer_that_leaves_ids_out_counts_up_to_its_greatest(task: str, tmp_path: Path) -> None:
    """As those do from which tokens were removed. An embedding of as many rows as tokens would be too small."""
    folder = write_decoder(tmp_path / "gaps") if task[0] == "l" else write_encoder(tmp_path / "gaps")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["room"] = 60
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    (tmp_path / "documents").mkdir()
    for number in range(20):
        text = f"the film was good a room {number} " * 9
        (tmp_path / "documents" / f"{number}.txt").write_text(text, encoding="utf-8")
    keys = [
        f"task={task}",
        "data.block_length=32",
        "data.buckets=[32, 64, 128, 256]",
        f"data.source={tmp_path / 'documents'}",
        "data.columns={}",
    ]
    facts = prepare(recipe_of(tmp_path, folder, *(keys if task[0] == "l" else ()))).facts
    assert facts["vocab_size"] == 61
