"""Heads of Hugging Face's models: kept as their class has them and answered as they were trained, or refused."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from upath import UPath

from app.compile.imported.natural import read_natural, read_processor
from app.data.targets import Classes, LabelSets, Numbers, Scale, Targets
from app.errors import DataError
from app.published.loaded import LoadedModel, load_model
from app.repository.repository import Repository
from tests.importing import EXACT, imported
from tests.pretrained import BERT, TEXTS, write_tokenizer

SMALL = {**BERT, "num_hidden_layers": 1, "max_position_embeddings": 64}
SIZES: dict[str, dict[str, Any]] = {
    "DistilBertForTokenClassification": {"dim": 32, "n_heads": 4, "n_layers": 1},
    "BigBirdForQuestionAnswering": {"attention_type": "original_full"},
    "MptForTokenClassification": {"d_model": 32, "n_heads": 4, "n_layers": 1},
    "BertForSequenceClassification": {"num_labels": 3, "problem_type": "regression"},
}
LABELS = {
    "ErnieForTokenClassification": {"0": "O", "1": "B-PER"},
    "BertForSequenceClassification": {"0": "price", "1": "rooms", "2": "age"},
}


def written(folder: Path, name: str, **config: Any) -> Any:
    """A small model of a class of transformers with fresh weights, saved with a tokenizer of words."""
    size = write_tokenizer(folder)
    kind = getattr(transformers, name)
    torch.manual_seed(3)
    given = {"vocab_size": size, **SMALL, **config}
    model = kind(kind.config_class(**given)).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(5.0)  # answers that differ between inputs
    model.save_pretrained(folder)
    return model


def published(storage: Path, folder: Path, *options: str) -> LoadedModel:
    imported(storage, "model", folder, *EXACT, *options)
    return load_model(UPath(storage), "model", 1, 1)


def answers(model: LoadedModel, inputs: Any) -> list[Mapping[str, Any]]:
    found: dict[int, Mapping[str, Any]] = {}
    for group in model.encode(inputs):
        for index, answer in zip(group.indices, model.decode(model.engine.run(group.tensors), group), strict=True):
            found[index] = answer.model_dump(exclude_none=True)
    return [found[index] for index in range(len(inputs))]


def logits_of(model: Any, folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        # One by one, as a person who tries the model: without padding.
        rows = [model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits for text in TEXTS]
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("BertModel", ["last_hidden_state", "pooler_output"]),
        # It answers several numbers.
        ("BertForSequenceClassification", ["logits"]),
        pytest.param("BertForTokenClassification", ["logits"], marks=pytest.mark.slow),
        pytest.param("BertForQuestionAnswering", ["start_logits", "end_logits"], marks=pytest.mark.slow),
        pytest.param("BertForMaskedLM", ["logits"], marks=pytest.mark.slow),
        pytest.param("BertForPreTraining", ["prediction_logits", "seq_relationship_logits"], marks=pytest.mark.slow),
        pytest.param("DistilBertForTokenClassification", ["logits"], marks=pytest.mark.slow),
        # Each of these has inputs that the model makes itself.
        ("ErnieForTokenClassification", ["logits"]),
        pytest.param("BigBirdForQuestionAnswering", ["start_logits", "end_logits"], marks=pytest.mark.slow),
        pytest.param("MptForTokenClassification", ["logits"], marks=pytest.mark.slow),
    ],
)
def test_a_head_is_kept_as_its_class_has_it_without_its_labels(name: str, outputs: list[str], tmp_path: Path) -> None:
    model = written(tmp_path / "model", name, **SIZES.get(name, {}))
    # Labels that are left out may have any numbers.
    _config(id2label=LABELS.get(name, {"1": "B", "2": "I"}))(tmp_path / "model")
    told = imported(tmp_path / "storage", "model", tmp_path / "model", *EXACT)
    assert f"is a {name}, which takes and gives tensors only: its labels are left out" in told
    loaded = load_model(UPath(tmp_path / "storage"), "model", 1, 1)
    assert (loaded.manifest.task, loaded.labels, loaded.processor) == ("tensors", [], None)
    inputs = {"input_ids": np.arange(14).reshape(2, 7), "attention_mask": np.ones((2, 7), np.int64)}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = np.array([[0, 0, 0, 1, 1, 1, 1]] * 2)  # of a pair
    given = loaded.engine.run(inputs)
    loaded.engine.close()
    assert [spec.name for spec in loaded.engine.signature.outputs] == outputs
    with torch.no_grad():
        expected = model(**{key: torch.from_numpy(value) for key, value in inputs.items()})
    for output in outputs:
        np.testing.assert_allclose(given[output], getattr(expected, output), atol=1e-4, rtol=1e-4)


def test_weights_of_a_pooler_are_not_made_up_and_pooling_is_left_out(tmp_path: Path) -> None:
    """The encoder is one of sentence-transformers, which applies the pooling."""
    written(tmp_path / "model", "BertModel", num_hidden_layers=0)
    without(tmp_path / "model", "pooler")
    (tmp_path / "model/modules.json").write_text("[]", encoding="utf-8")
    told = imported(tmp_path / "storage", "model", tmp_path / "model", *EXACT)
    assert "lacks the weights of the pooler, so the output pooler_output is left out" in told
    assert "the pooling of modules.json is left out" in told
    (output,) = Repository(UPath(tmp_path / "storage")).manifest("model", 1).outputs
    assert output.name == "last_hidden_state"


def without(folder: Path, part: str) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    safetensors.torch.save_file(kept, file, {"format": "pt"})


def test_any_number_of_labels_are_answered_each_by_its_own_probability(tmp_path: Path) -> None:
    labels = {"id2label": {0: "toxic", 1: "insult", 2: "threat"}, "problem_type": "multi_label_classification"}
    model = written(tmp_path / "model", "BertForSequenceClassification", **labels)
    expected = logits_of(model, tmp_path / "model").sigmoid()
    names = list(labels["id2label"].values())  # type: ignore[attr-defined]
    rows = [
        {"text": text, "label": [name for name, score in zip(names, row, strict=True) if score >= 0.5]}
        for text, row in zip(TEXTS, expected, strict=True)
    ]
    samples = tmp_path / "rows.jsonl"
    samples.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    loaded = published(tmp_path / "storage", tmp_path / "model", f"--samples={samples}")
    given = answers(loaded, TEXTS)
    loaded.engine.close()
    np.testing.assert_allclose([[answer["scores"][name] for name in names] for answer in given], expected, atol=1e-5)
    assert [answer["labels"] for answer in given] == [row["label"] for row in rows]
    manifest = loaded.manifest
    assert (manifest.task, manifest.score.metric, manifest.score.value) == ("text-multilabel", "f1", 1.0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("targets", "row", "words"),
    [
        (Numbers(Scale()), {"text": "bad", "label": None}, "line 2 has no label"),
        (Numbers(Scale()), {"text": "bad", "label": "poor"}, "the label 'poor', and the model answers a number"),
        (Classes(["bad", "fine", "good"]), {"text": "bad", "label": None}, "line 2 has no label"),
        (
            LabelSets(["bad", "good"]),
            {"text": "bad", "label": ["bad", "odd"]},
            """has the label '["bad","odd"]', and the labels are bad, good""",
        ),
        (LabelSets(["bad", "good"]), {"text": "bad", "label": None}, "line 2 has no label"),
    ],
)
def test_samples_with_labels_that_the_head_does_not_answer_are_refused(
    targets: Targets, row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "max_position_embeddings": 64}', encoding="utf-8")
    first = {"text": "good", "label": "good" if targets.labels else "1.5"}
    samples = tmp_path / "rows.jsonl"
    samples.write_text("\n".join(map(json.dumps, [first, row])), encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(words)):
        read_natural(samples, read_processor(tmp_path).processor, targets)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("BertForSequenceClassification", 32),
        # It keeps two positions for padding.
        ("RobertaForSequenceClassification", 34),
    ],
)
def test_a_head_of_one_label_answers_a_number(name: str, positions: int, tmp_path: Path) -> None:
    """The model is a reranker of sentence-transformers, whose configuration asks for tuples."""
    activation = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"}
    config = {"num_labels": 1, "pad_token_id": 1, "sentence_transformers": activation}
    model = written(tmp_path / "model", name, max_position_embeddings=positions, **config)
    expected = logits_of(model, tmp_path / "model")[:, 0].tolist()
    _config(return_dict=False)(tmp_path / "model")
    samples = tmp_path / "rows.csv"
    rows = [f'"{text}",{number}' for text, number in zip(TEXTS, expected, strict=True)]
    samples.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    told = imported(tmp_path / "storage", "model", tmp_path / "model", *EXACT, f"--samples={samples}")
    assert "the Sigmoid of config.json is left out, which sentence-transformers applies" in told
    assert "If it judges pairs of texts, as a reranker does, import the folder without its tokenizer" in told
    assert "pad_token_id" not in told
    loaded = load_model(UPath(tmp_path / "storage"), "model", 1, 1)
    given = answers(loaded, TEXTS)
    ones = np.full((1, 32), 5)
    assert loaded.engine.infer({"input_ids": ones, "attention_mask": np.ones_like(ones)})["logits"].shape == (1, 1)
    loaded.engine.close()
    assert [tensor.max_length for tensor in loaded.manifest.inputs] == [32, 32]
    assert [answer["value"] for answer in given] == pytest.approx(expected, abs=1e-4)
    assert len({round(value, 3) for value in expected}) == len(TEXTS)
    manifest = loaded.manifest
    assert (manifest.task, manifest.score.metric) == ("text-regression", "mae")  # type: ignore[union-attr]
    assert manifest.score.value == pytest.approx(0.0, abs=1e-4)  # type: ignore[union-attr]


def test_a_tokenizer_that_cannot_be_read_leaves_a_model_of_tensors(tmp_path: Path) -> None:
    written(tmp_path / "model", "BertForSequenceClassification", num_hidden_layers=0)
    (tmp_path / "model/tokenizer.json").unlink()
    (tmp_path / "model/tokenizer_config.json").write_text('{"tokenizer_class": "CanineTokenizer"}', encoding="utf-8")
    told = imported(tmp_path / "storage", "model", tmp_path / "model", *EXACT)
    assert "its tokenizer, CanineTokenizer, has no fast version in transformers" in told
    assert "the model is imported without it, and takes tensors only" in told
    assert Repository(UPath(tmp_path / "storage")).manifest("model", 1).task == "tensors"


@pytest.mark.parametrize("pad", [None, 7])
def test_a_decoder_finds_the_end_of_a_text_by_the_token_that_its_tokenizer_pads_with(
    pad: int | None, tmp_path: Path
) -> None:
    # Without layers, an answer depends on the last token and its position alone.
    sizes = {"n_embd": 32, "n_layer": 0, "n_head": 4, "n_positions": 64}
    model = written(tmp_path / "model", "GPT2ForSequenceClassification", pad_token_id=pad, num_labels=3, **sizes)
    model.config.pad_token_id = 1
    expected = logits_of(model, tmp_path / "model").softmax(1)
    loaded = published(tmp_path / "storage", tmp_path / "model")
    given = answers(loaded, TEXTS)
    loaded.engine.close()
    np.testing.assert_allclose([list(answer["scores"].values()) for answer in given], expected, atol=1e-5)


def image_model(folder: Path, name: str, processor: str, sizes: Mapping[str, Any], **config: Any) -> Any:
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config)).eval()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": processor, **sizes}))
    return model


@pytest.mark.parametrize(
    ("name", "processor", "sizes", "config"),
    [
        (
            "SiglipForImageClassification",
            "SiglipImageProcessor",
            {"size": {"height": 32, "width": 32}},
            {"text_config": {**SMALL, "vocab_size": 64}, "vision_config": {**SMALL, "image_size": 32, "patch_size": 8}},
        ),
        # It has no size of its own.
        (
            "ResNetForImageClassification",
            "ConvNextImageProcessor",
            {"size": {"shortest_edge": 64}, "crop_pct": 0.875},
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        ),
    ],
)
def test_images_have_the_size_that_the_tower_or_the_processor_names(
    name: str, processor: str, sizes: Mapping[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    model = image_model(folder, name, processor, sizes, num_labels=3, **config)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8))
    picture.save(tmp_path / "picture.png")
    pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")(picture, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        expected = model(pixels).logits.softmax(1)[0]
    loaded = published(tmp_path / "storage", folder)
    (given,) = answers(loaded, [(tmp_path / "picture.png").read_bytes()])
    loaded.engine.close()
    np.testing.assert_allclose(list(given["scores"].values()), expected, atol=1e-5)


def test_pictures_with_any_number_of_labels_are_not_answered_as_if_they_had_one(tmp_path: Path) -> None:
    sizes = {"size": {"height": 16, "width": 16}}
    config = {**BERT, "num_hidden_layers": 0, "image_size": 16, "patch_size": 8}
    config |= {"problem_type": "multi_label_classification"}
    image_model(tmp_path / "model", "ViTForImageClassification", "ViTImageProcessor", sizes, **config)
    told = imported(tmp_path / "storage", "model", tmp_path / "model", *EXACT)
    assert "there is no task image-multilabel, so the model will not answer images: send it tensors" in told
    assert Repository(UPath(tmp_path / "storage")).manifest("model", 1).task == "tensors"


def _config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")

    return change


def _truncation(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation_side": "left"}), encoding="utf-8")


def _nothing(_: Path) -> None:
    pass


TOWERS = {
    "text_config": {**SMALL, "vocab_size": 64},
    "vision_config": {**BERT, "image_size": 32, "patch_size": 8},
}
SEQUENCE = "BertForSequenceClassification"
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}  # fmt: skip
XLM = {"emb_dim": 32, "n_layers": 1, "n_heads": 2, "n_langs": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("name", "config", "damage", "words"),
    [
        (SEQUENCE, {}, lambda folder: without(folder, "classifier"), "lacks 2 of the weights of a BertForSequenceCla"),
        (SEQUENCE, {"num_hidden_layers": 2}, lambda folder: without(folder, "layer.1."), "which would be random: give"),
        (SEQUENCE, {}, _config(architectures=None), "which a BertModel does not have, and no architectures"),
        (SEQUENCE, {}, _config(architectures=["BertForFun"]), "is a BertForFun, which transformers"),
        (SEQUENCE, {}, _config(architectures=["Trainer"]), "is a Trainer, which transformers"),
        (SEQUENCE, {}, _config(architectures=["ViTModel"]), "has the architecture ViTModel and the model_type 'bert'"),
        (SEQUENCE, {}, _config(hidden_size=16), "cannot be read by transformers"),
        (SEQUENCE, {}, _config(id2label={"1": "bad", "2": "good"}), "has the numbers 1, 2: expected 0 to 1"),
        (SEQUENCE, {}, _config(id2label={"0": "bad", "2": "good"}), "has the numbers 0, 2: expected 0 to 1"),
        (SEQUENCE, {}, lambda folder: (folder / "adapter_config.json").write_text("{}"), "merge_and_unload()"),
        (SEQUENCE, {}, _config(problem_type="ranking"), "problem_type in config.json is 'ranking': expected"),
        (SEQUENCE, {}, _truncation, "has the truncation_side left, which keeps the end of a long text"),
        (SEQUENCE, {}, _config(num_attention_heads=5), "cannot be read by transformers"),
        (SEQUENCE, {}, lambda folder: (folder / "model.safetensors").write_bytes(b"1"), "cannot be read by transf"),
        ("FNetForSequenceClassification", {}, _nothing, "takes no attention_mask, so the padding of a text"),
        ("LayoutLMForTokenClassification", {}, _nothing, "also takes bbox, and Rayloom cannot make that"),
        ("MarkupLMForTokenClassification", {}, _nothing, "also takes xpath_tags_seq, and Rayloom cannot make that"),
        ("TapasForSequenceClassification", {}, _nothing, "also takes token_type_ids, and Rayloom cannot make that"),
        ("TapasForQuestionAnswering", {}, _nothing, "also takes token_type_ids, and Rayloom cannot make that"),
        ("ErnieForTokenClassification", {"use_task_id": True}, _nothing, "also takes task_type_ids, and Rayloom"),
        ("XLMForSequenceClassification", XLM, _nothing, "also takes langs, and Rayloom cannot make that"),
        ("BertForMultipleChoice", {}, _nothing, "cannot be run on input_ids and attention_mask"),
        ("CLIPModel", TOWERS, _nothing, "is a CLIPModel, which takes texts and images together"),
        ("SiglipModel", TOWERS, _nothing, "is a SiglipModel, which takes texts and images together"),
        ("BartForSequenceClassification", BART, _nothing, "cannot be run on input_ids and attention_mask"),
        ("BartModel", BART, _nothing, "BartModel cannot be exported"),
        pytest.param("T5ForSequenceClassification", T5, _nothing, "T5ForSequenceClassification cannot be exported to",
                     marks=pytest.mark.slow),
        ("T5Model", T5, _nothing, "cannot be run on input_ids and attention_mask"),
        ("T5ForConditionalGeneration", T5, _nothing, "which generates text"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_in_a_sentence(
    name: str, config: dict[str, Any], damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    written(tmp_path / "model", name, **config)
    damage(tmp_path / "model")
    told = imported(tmp_path / "storage", "model", tmp_path / "model", *EXACT, succeeds=False)
    assert words in told
    assert "Traceback" not in told
    assert not (tmp_path / "storage").exists()
