"""Models imported from programs of torch.export, Hugging Face's layout, Triton and external data."""

import base64
import json
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as Type
from onnx import helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)
from upath import UPath

from app.checksums import sha256_of_file
from app.data.images import encode_png
from app.published.loaded import load_model
from app.repository.repository import Repository
from tests.importing import (
    EXACT,
    WIDTH,
    WORDS,
    dense,
    external,
    imported,
    labelled_rows,
    right,
    served,
    triton_model,
    write,
)
from tests.serving import serving


def test_a_program_of_torch_export_keeps_its_names_and_is_compared_with_pytorch(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 4)

        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"values": self.layer(x) * mask, "hidden": mask > 0}

    rows = torch.export.Dim("rows")
    shapes = {"x": {0: rows}, "mask": {0: rows}}
    inputs = {"mask": torch.ones(2, 1)}
    torch.export.save(
        torch.export.export(Model(), (torch.ones(2, 3),), inputs, dynamic_shapes=shapes), tmp_path / "m.pt2"
    )
    imported(tmp_path, "program", tmp_path / "m.pt2", *EXACT)
    manifest = Repository(UPath(tmp_path)).manifest("program", 1)
    assert [tensor.name for tensor in manifest.inputs] == ["x", "mask"]
    assert [str(tensor) for tensor in manifest.outputs] == ["values float32 [-1, 4]", "hidden bool [-1, 1]"]
    assert manifest.lineage.baseline == "PyTorch"
    assert manifest.max_difference < 1e-6


def test_a_program_with_constant_arguments_is_run_with_them(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None, factor: int, kind: str) -> torch.Tensor:
            return x * factor if mask is None and kind == "plain" else x

    shapes = ({0: torch.export.Dim("rows")}, None, None, None)
    program = torch.export.export(Model(), (torch.ones(2, 3), None, 2, "plain"), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "m.pt2")
    imported(tmp_path, "program", tmp_path / "m.pt2", *EXACT)
    manifest = Repository(UPath(tmp_path)).manifest("program", 1)
    assert ([tensor.name for tensor in manifest.inputs], manifest.max_difference) == (["x"], 0.0)


def test_a_classifier_in_hugging_faces_layout_brings_its_labels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=70, id2label={0: "bad", 1: "neither", 2: "good"},
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "bert")
    imported(tmp_path, "bert", tmp_path / "bert", *EXACT)
    loaded = load_model(UPath(tmp_path), "bert", 1, 1)
    assert loaded.labels_by_output == {"logits": ["bad", "neither", "good"]}
    assert [(spec.name, spec.max_length, spec.values_below) for spec in loaded.inputs] == [
        ("input_ids", 70, WORDS),
        ("attention_mask", 70, None),
        ("token_type_ids", 70, 2),
    ]
    ids, mask = torch.arange(14).reshape(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
    given = loaded.engine.run({name: tensor.numpy() for name, tensor in tensors.items()})["logits"]
    with torch.no_grad():
        np.testing.assert_allclose(given, model(**tensors).logits, atol=1e-5)
    assert set(loaded.manifest.lineage.imported.files) == {"config.json", "model.safetensors"}  # type: ignore[union-attr]
    loaded.engine.close()


def text_classifier(folder: Path) -> tuple[BertForSequenceClassification, PreTrainedTokenizerFast]:
    """A tiny classifier of texts with its tokenizer, as ``save_pretrained`` writes them."""
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "a", "good", "bad", "book"]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, id2label={0: "negative", 1: "positive"},
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return model, fast


TEXTS = ["a good book", "a bad book", "good", "an odd book"]


def test_a_folder_with_a_tokenizer_answers_texts(tmp_path: Path) -> None:
    model, tokenizer = text_classifier(tmp_path / "bert")
    with torch.no_grad():
        logits = model(**tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)).logits
    classes = [["negative", "positive"][index] for index in logits.argmax(1)]
    rows = [f"{text},{label}" for text, label in zip(TEXTS, classes, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    imported(tmp_path, "bert", tmp_path / "bert", *EXACT, f"--samples={tmp_path / 'rows.csv'}")
    manifest = Repository(UPath(tmp_path)).manifest("bert", 1)
    assert (manifest.task, manifest.accuracy, manifest.accuracy_rows) == ("text-classification", 1.0, 4)
    with serving() as server:
        server.run(server.endpoint.update(served(tmp_path, "bert")))
        answer = httpx.post(f"http://{server.http}/v1/models/bert/predict", json={"inputs": TEXTS}).json()
    assert [prediction["label"] for prediction in answer["predictions"]] == classes
    given = [
        [prediction["scores"][label] for label in ("negative", "positive")] for prediction in answer["predictions"]
    ]
    np.testing.assert_allclose(given, logits.softmax(1), atol=1e-5)


def test_a_folder_with_an_image_processor_answers_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        id2label={0: "cat", 1: "dog"},
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    settings = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True}
    (tmp_path / "vit/preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    imported(tmp_path, "vit", tmp_path / "vit", *EXACT)
    with serving() as server:
        server.run(server.endpoint.update(served(tmp_path, "vit")))
        image = base64.b64encode(encode_png(np.arange(256, dtype=np.uint8).reshape(16, 16))).decode()
        answer = httpx.post(f"http://{server.http}/v1/models/vit/predict", json={"inputs": image}).json()
    assert answer["predictions"][0]["label"] in ("cat", "dog")


@pytest.mark.parametrize("end", ["Softmax", "Sigmoid"])
def test_probabilities_are_not_taken_for_logits(end: str, tmp_path: Path) -> None:
    text_classifier(tmp_path / "bert")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["vectors"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=Type.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Mul", ["vectors", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "middle"], ["logits"], keepdims=0),
        helper.make_node(end, ["logits"], ["scores"]),
    ]
    ids = (Type.INT64, ["n", "length"])
    scores = (Type.FLOAT, ["n", 2])
    constants = {"table": np.eye(7, 2, dtype=np.float32), "last": np.array([2]), "middle": np.array([1])}
    inputs = {"input_ids": ids, "attention_mask": ids}
    path = write(tmp_path / "model.onnx", nodes, inputs, {"scores": scores, "logits": scores}, constants)
    (tmp_path / "labels.txt").write_text("good\nbad\n", encoding="utf-8")
    options = [*EXACT, f"--processor={tmp_path / 'bert'}", f"--labels={tmp_path / 'labels.txt'}"]
    told = imported(tmp_path / "storage", "model", path, *options, "--scores=scores", succeeds=False)
    assert f"output 'scores' is made by {end}, and predict makes probabilities of logits itself: export the" in told
    imported(tmp_path / "storage", "model", path, *options, "--scores=logits")


def test_a_processor_that_makes_other_tensors_is_refused(tmp_path: Path) -> None:
    text_classifier(tmp_path / "bert")
    options = [f"--processor={tmp_path / 'bert'}"]
    told = imported(tmp_path / "storage", "dense", dense(tmp_path / "model.onnx"), *options, succeeds=False)
    assert "the model takes pixels float32 [-1, 8], expected input_ids int64 [-1, -1], attention_mask" in told
    (tmp_path / "bert/tokenizer.json").unlink()
    told = imported(tmp_path / "storage", "dense", dense(tmp_path / "model.onnx"), *options, succeeds=False)
    assert "has no tokenizer: expected tokenizer.json" in told


def test_the_newest_version_of_a_triton_repository_is_imported_with_its_labels(tmp_path: Path) -> None:
    triton_model(tmp_path / "repository/dense")
    imported(tmp_path, "dense", tmp_path / "repository", *EXACT)
    model = load_model(UPath(tmp_path), "dense", 1, 1)
    assert model.labels_by_output == {"logits": list("abcdefgh")}
    assert model.manifest.lineage.imported is not None
    assert set(model.manifest.lineage.imported.files) == {"config.pbtxt", "names.txt", "10/model.onnx"}
    model.engine.close()


def test_labels_on_the_command_line_correct_those_of_a_triton_repository(tmp_path: Path) -> None:
    folder = triton_model(tmp_path / "dense")
    (folder / "names.txt").write_text("a\nb", encoding="utf-8")
    words = imported(tmp_path, "dense", folder, *EXACT, succeeds=False)
    assert "output 'logits', which has 8 columns, cannot have the scores: expected a float output with a" in words
    (tmp_path / "labels.txt").write_text("\n".join("stuvwxyz"), encoding="utf-8")
    dense(folder / "10/other.onnx")
    imported(tmp_path, "dense", folder, *EXACT, f"--labels={tmp_path / 'labels.txt'}")
    model = load_model(UPath(tmp_path), "dense", 1, 1)
    assert model.labels_by_output == {"logits": list("stuvwxyz")}
    model.engine.close()


def test_external_data_is_published_in_one_file(tmp_path: Path) -> None:
    path = external(tmp_path / "big")
    imported(tmp_path, "dense", tmp_path / "big", *EXACT)
    manifest = Repository(UPath(tmp_path)).manifest("dense", 1)
    assert manifest.lineage.imported is not None
    assert set(manifest.lineage.imported.files) == {"model.onnx", "weights.bin"}
    pixels, _ = labelled_rows(4)
    published = tmp_path / "models/dense/1/model.onnx"
    np.testing.assert_array_equal(
        right(published, {"pixels": pixels})["logits"], right(path, {"pixels": pixels})["logits"]
    )


def test_weights_of_one_name_in_two_folders_have_a_sum_each(tmp_path: Path) -> None:
    node = helper.make_node("Add", ["values", "a"], ["half"]), helper.make_node("Add", ["half", "b"], ["sum"])
    info = (Type.FLOAT, ["n", WIDTH])
    constants = {name: np.full(WIDTH, value, np.float32) for name, value in (("a", 1.0), ("b", 2.0))}
    path = write(tmp_path / "big/m.onnx", node, {"values": info}, {"sum": info}, constants)
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        (path.parent / tensor.name).mkdir()
        (path.parent / tensor.name / "w.bin").write_bytes(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, f"{tensor.name}/w.bin")
        tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    imported(tmp_path, "sum", path, *EXACT)
    lineage = Repository(UPath(tmp_path)).manifest("sum", 1).lineage
    assert lineage.imported is not None
    assert lineage.imported.files == {
        name: sha256_of_file(path.parent / name) for name in ("m.onnx", "a/w.bin", "b/w.bin")
    }
