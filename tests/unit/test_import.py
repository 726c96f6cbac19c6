"""Importing models that another exporter wrote: what is published, and what is refused."""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto as Type
from onnx import helper, numpy_helper
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
from tritonclient import http as client
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner
from upath import UPath

from app.checksums import sha256_of_file
from app.cli.main import app
from app.compile.imported.formats import open_model
from app.compile.imported.samples import TensorRows, read_rows
from app.compile.imported.source import own_rows
from app.compile.parity import compare, failures
from app.compile.reference import Judge, Reference
from app.config import BatchingConfig, GatesConfig, ServeConfig
from app.data.images import encode_png
from app.engines.base import Signature
from app.engines.onnxruntime import open_oracle
from app.errors import DataError, RecipeError
from app.repository.known_answers import KnownAnswers
from app.repository.repository import Repository
from app.serving.batching.groups import BatchingPolicy
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.serving.model.loaded import load_model
from app.tensors import Tensors, TensorSpec
from tests.helpers import result_of
from tests.serving import serving

EXACT = ["compile.engines=[onnxruntime]", "compile.precisions=[fp32]", "compile.batch_sizes=[1,4]"]
WIDTH, CLASSES, WORDS = 8, 3, 50


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[int | str | None] | None]],
    outputs: Mapping[str, tuple[int, Sequence[int | str | None] | None]],
    constants: Mapping[str, NDArray[Any]],
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, *info) for name, info in inputs.items()],
        [helper.make_tensor_value_info(name, *info) for name, info in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def two_towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several inputs and outputs of all kinds, with two sizes that vary apart."""
    generator = np.random.default_rng(1)
    table = generator.standard_normal((WORDS, WIDTH)).astype(np.float32)
    weight = generator.standard_normal((WIDTH, CLASSES)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["embedded"]),
        helper.make_node("ReduceMean", ["embedded"], ["pooled"], axes=[1], keepdims=0),
        helper.make_node("ReduceMax", ["waves"], ["loudest"], axes=[1], keepdims=0),
        helper.make_node("Mul", ["pooled", "loudest"], ["joined"]),
        helper.make_node("MatMul", ["joined", "weight"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
        helper.make_node("Not", ["is_new"], ["is_old"]),
        helper.make_node(
            "LabelEncoder", ["country"], ["zone"], domain="ai.onnx.ml",
            keys_strings=["de", "cn"], values_strings=["west", "östlich"], default_string="?",
        ),
    ]  # fmt: skip
    return write(
        tmp_path_factory.mktemp("two_towers") / "model.onnx",
        nodes,
        {
            "tokens": (Type.INT64, ["n", "words"]),
            "waves": (Type.FLOAT, ["n", "time", 1]),
            "is_new": (Type.BOOL, ["n"]),
            "country": (Type.STRING, ["n", 1]),
        },
        {
            "scores": (Type.FLOAT, ["n", CLASSES]),
            "best": (Type.INT64, ["n"]),
            "is_old": (Type.BOOL, ["n"]),
            "zone": (Type.STRING, ["n", 1]),
        },
        {"table": table, "weight": weight},
    )


def rows(count: int, words: int = 5, time: int = 7) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(2)
    return {
        "tokens": generator.integers(0, WORDS, (count, words)),
        "waves": generator.standard_normal((count, time, 1)).astype(np.float32),
        "is_new": generator.integers(0, 2, count).astype(bool),
        "country": np.array([["de"], ["cn"], ["fr"]] * count, object)[:count],
    }


def right(path: Path, tensors: Tensors) -> dict[str, NDArray[Any]]:
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(tensors)), strict=True))


def imported(storage: Path, *arguments: object, succeeds: bool = True) -> str:
    command = ["models", "import", *map(str, arguments), f"--storage={storage}"]
    done = CliRunner().invoke(app, command, catch_exceptions=True)
    assert (done.exit_code == 0) is succeeds, done.output
    return str(done.exception) if done.exception and not isinstance(done.exception, SystemExit) else done.output


def served(storage: Path, name: str) -> EndpointConfig:
    policy = BatchingPolicy(max_batch_size=4, queue_limit=64)
    version = VersionConfig(storage=str(storage), name=name, version=1, threads=1, policy=policy)
    return EndpointConfig(models={name: DeployedModel(production=version)})


DATATYPES = {"tokens": "INT64", "waves": "FP32", "is_new": "BOOL", "country": "BYTES"}


def ask(url: str, name: str, tensors: Mapping[str, NDArray[Any]], binary: bool) -> Any:
    inputs = [client.InferInput(key, list(tensor.shape), DATATYPES[key]) for key, tensor in tensors.items()]
    for sent in inputs:
        sent.set_data_from_numpy(tensors[sent.name()], binary_data=binary)
    outputs = [client.InferRequestedOutput(key, binary_data=binary) for key in ("scores", "best", "is_old", "zone")]
    return client.InferenceServerClient(url).infer(name, inputs, outputs=outputs)


@pytest.mark.parametrize("binary", [True, False])
def test_an_imported_onnx_file_answers_bit_for_bit_as_onnx_runtime(
    two_towers: Path, tmp_path: Path, binary: bool
) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("low\nmiddle\nhigh\n", encoding="utf-8")
    imported(tmp_path, "towers", two_towers, *EXACT, "--size=words=5", "--size=time=7", f"--labels={labels}")
    manifest = Repository(UPath(tmp_path)).manifest("towers", 1)
    assert manifest.lineage.imported is not None
    assert manifest.lineage.imported.files == {"model.onnx": sha256_of_file(two_towers)}
    assert manifest.files["model.onnx"] == sha256_of_file(two_towers)
    assert manifest.lineage.train_run is None
    assert (manifest.accuracy, manifest.max_difference, manifest.scores) == (None, 0.0, "scores")
    with serving() as server:
        server.run(server.endpoint.update(served(tmp_path, "towers")))
        for count in (1, 3):
            tensors = rows(count)
            answer = ask(server.http, "towers", tensors, binary)
            for name, expected in right(two_towers, tensors).items():
                given = answer.as_numpy(name)
                if expected.dtype.hasobject:
                    given = np.array([[item.decode() if isinstance(item, bytes) else item] for item in given.ravel()])
                np.testing.assert_array_equal(given, expected)


def test_known_answers_of_whole_numbers_and_strings_may_differ_in_the_measured_share(two_towers: Path) -> None:
    inputs = rows(4)
    outputs = right(two_towers, inputs)
    outputs["best"] = (outputs["best"] + [1, 0, 0, 0]) % CLASSES
    with closing(open_oracle(two_towers)) as engine:
        assert KnownAnswers(inputs, right(two_towers, inputs)).difference(engine) == 0.0
        assert KnownAnswers(inputs, outputs).difference(engine) == np.inf
        assert KnownAnswers(inputs, outputs).difference(engine, 0.25) == 0.0


def test_the_rows_of_all_inputs_are_checked_and_natural_input_is_refused(two_towers: Path, tmp_path: Path) -> None:
    imported(tmp_path, "towers", two_towers, *EXACT)
    with serving() as server:
        server.run(server.endpoint.update(served(tmp_path, "towers")))
        with pytest.raises(InferenceServerException, match="expected the same rows"):
            ask(server.http, "towers", rows(2) | {"is_new": np.array([True])}, True)
        with pytest.raises(InferenceServerException, match="not UTF-8"):
            ask(server.http, "towers", rows(1) | {"country": np.array([[b"\xff"]], object)}, True)
        with pytest.raises(InferenceServerException, match="has values from 50 to 50: expected 0 to 49"):
            ask(server.http, "towers", rows(1) | {"tokens": np.array([[WORDS]])}, True)
        answer = httpx.post(f"http://{server.http}/v1/models/towers/predict", json={"inputs": "a text"})
        assert answer.status_code == 400
        assert "imported without a tokenizer" in answer.text
        assert httpx.get(f"http://{server.http}/v1/models").json() == []
        assert ask(server.http, "towers", rows(2), True).as_numpy("scores").shape == (2, CLASSES)


def dense(
    path: Path, shape: Sequence[int | str | None] | None = ("n", WIDTH), operator: str = "MatMul", width: int = WIDTH
) -> Path:
    """A linear model that separates rows by their largest number, or returns the first ``width`` numbers."""
    node = helper.make_node(operator, ["pixels", "weight"], ["logits"], name="last")
    weight = np.eye(WIDTH, width, dtype=np.float32)
    out: list[int | str | None] | None = [shape[0], width] if shape else None
    return write(path, [node], {"pixels": (Type.FLOAT, shape)}, {"logits": (Type.FLOAT, out)}, {"weight": weight})


def labelled_rows(count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    pixels = np.random.default_rng(3).standard_normal((count, WIDTH)).astype(np.float32)
    classes = pixels.argmax(1)
    classes[0] = (classes[0] + 1) % WIDTH  # one is wrong
    return pixels, classes


@pytest.mark.parametrize("kind", ["npz", "jsonl", "parquet"])
def test_rows_of_ones_own_give_an_accuracy_and_int8(tmp_path: Path, kind: str) -> None:
    path, samples = dense(tmp_path / "model.onnx"), tmp_path / f"rows.{kind}"
    pixels, classes = labelled_rows(128)
    if kind == "npz":
        np.savez(samples, pixels=pixels, labels=classes)
    else:
        table = pd.DataFrame({"pixels": [row.tolist() for row in pixels], "label": classes})
        table.to_parquet(samples) if kind == "parquet" else table.to_json(samples, orient="records", lines=True)
    output = imported(tmp_path, "dense", path, f"--samples={samples}", "compile.batch_sizes=[1]", "--json")
    result = result_of(output)
    precisions = {variant["precision"] for variant in result["metrics"]["variants"]}
    assert "int8" in precisions
    manifest = Repository(UPath(tmp_path)).manifest("dense", 1)
    assert (manifest.accuracy_split, manifest.accuracy_rows) == ("samples", 96), "a quarter calibrated int8"
    assert manifest.accuracy is not None
    assert manifest.accuracy > 0.95
    assert manifest.lineage.imported is not None
    assert manifest.lineage.imported.samples == str(samples)


def test_outputs_of_one_number_are_compared_by_relative_error(tmp_path: Path) -> None:
    right, wrong, scaled = (dense(tmp_path / f"{name}.onnx", width=1) for name in ("right", "wrong", "scaled"))
    for path, factor in ((wrong, 1.5), (scaled, 1.01)):
        model = onnx.load(path)
        weight = numpy_helper.to_array(model.graph.initializer[0])
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight * np.float32(factor), "weight"))
        onnx.save(model, path)
    pixels, _ = labelled_rows(128)
    rows = TensorRows({"pixels": list(pixels)}, [0] * len(pixels))
    with closing(open_oracle(right)) as engine:
        reference = Reference.of(engine, rows, Judge(None))
    for path, error in ((right, 0.0), (wrong, 0.5), (scaled, 0.01)):
        with closing(open_oracle(path)) as engine:
            parity = compare(engine, reference, max_rows=10)
        assert parity.single_error == parity.relative_error == pytest.approx(error, rel=1e-4)
        assert parity.cosine == 1.0
        assert bool(failures(parity, "int8", None, Judge(None), GatesConfig())) is (error == 0.5)


def lengthwise(path: Path, operator: str = "Relu", **attributes: object) -> Path:
    """A model of rows of any length, whose file calls that length ``rows``."""
    info = {name: (Type.FLOAT, ["n", "rows", WIDTH]) for name in ("values", "hidden")}
    nodes = [
        helper.make_node("MatMul", ["values", "weight"], ["mixed"]),
        helper.make_node(operator, ["mixed"], ["hidden"], **attributes),
    ]
    weight = np.random.default_rng(5).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    return write(path, nodes, {"values": info["values"]}, {"hidden": info["hidden"]}, {"weight": weight})


def test_int8_takes_its_ranges_from_rows_of_several_lengths(tmp_path: Path) -> None:
    generator = np.random.default_rng(6)
    table = [{"values": generator.standard_normal((3 + index % 3, WIDTH)).tolist()} for index in range(66)]
    pd.DataFrame(table).to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    model = lengthwise(tmp_path / "model.onnx")
    few = ["compile.engines=[onnxruntime]", "compile.precisions=[fp32,int8]", "compile.batch_sizes=[1]"]
    output = imported(tmp_path, "lengths", model, f"--samples={tmp_path / 'rows.jsonl'}", *few, "--json")
    assert "int8" in {variant["precision"] for variant in result_of(output)["metrics"]["variants"]}
    (values,) = Repository(UPath(tmp_path)).manifest("lengths", 1).inputs
    assert values.sizes == ("rows", "values.1"), "a later size is not the number of rows"


def test_int8_of_a_model_of_one_row_a_call(tmp_path: Path) -> None:
    path, samples = dense(tmp_path / "model.onnx", (1, WIDTH)), tmp_path / "rows.npz"
    np.savez(samples, pixels=labelled_rows(64)[0])
    output = imported(tmp_path, "dense", path, f"--samples={samples}", "--json")
    assert "int8" in {variant["precision"] for variant in result_of(output)["metrics"]["variants"]}


def test_whole_numbers_without_another_axis_can_be_random(tmp_path: Path) -> None:
    node = helper.make_node("Neg", ["given"], ["taken"])
    path = write(tmp_path / "m.onnx", [node], {"given": (Type.INT64, ["n"])}, {"taken": (Type.INT64, ["n"])}, {})
    imported(tmp_path, "scalar", path, *EXACT)
    assert Repository(UPath(tmp_path)).versions("scalar") == [1]


def test_int8_is_not_made_of_random_rows(tmp_path: Path) -> None:
    path = dense(tmp_path / "model.onnx")
    result = result_of(imported(tmp_path, "dense", path, "compile.batch_sizes=[1]", "--json"))
    assert {variant["precision"] for variant in result["metrics"]["variants"]} <= {"fp32", "bf16"}
    words = imported(tmp_path, "dense", path, "compile.precisions=[int8]", succeeds=False)
    assert "int8 needs real rows" in words


def quantized(path: Path) -> Path:
    """A model in int8 already: QuantizeLinear and DequantizeLinear around each product."""
    generator = np.random.default_rng(7)
    nodes, name = [], "pixels"
    constants = {
        "zero": np.array(128, np.uint8), "scale": np.array(0.05, np.float32),
        "middle": np.array(0, np.int8), "step": np.array(0.01, np.float32),
    }  # fmt: skip
    for layer in range(3):
        constants[f"w{layer}"] = generator.integers(-100, 100, (WIDTH, WIDTH)).astype(np.int8)
        nodes += [
            helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"q{layer}"]),
            helper.make_node("DequantizeLinear", [f"q{layer}", "scale", "zero"], [f"d{layer}"]),
            helper.make_node("DequantizeLinear", [f"w{layer}", "step", "middle"], [f"wd{layer}"]),
            helper.make_node("MatMul", [f"d{layer}", f"wd{layer}"], [f"product{layer}"]),
        ]
        name = f"product{layer}"
    nodes += [
        helper.make_node("QuantizeLinear", [name, "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["logits"]),
    ]
    info = (Type.FLOAT, ["n", WIDTH])
    return write(path, nodes, {"pixels": info}, {"logits": info}, constants)


def test_a_file_that_is_quantized_already_is_compared_as_it_is_served(tmp_path: Path) -> None:
    path = quantized(tmp_path / "model.onnx")
    pixels = {"pixels": labelled_rows(64)[0]}
    with closing(open_oracle(path)) as oracle:
        assert (oracle.run(pixels)["logits"] != right(path, pixels)["logits"]).any(), "fused nodes round otherwise"
    imported(tmp_path, "quantized", path, *EXACT)
    assert Repository(UPath(tmp_path)).manifest("quantized", 1).max_difference == 0.0


def test_a_model_of_one_row_a_call_is_served_row_by_row(tmp_path: Path) -> None:
    imported(tmp_path, "dense", dense(tmp_path / "model.onnx", (1, WIDTH)))
    manifest = Repository(UPath(tmp_path)).manifest("dense", 1)
    assert manifest.serving.max_batch_size == 1
    with pytest.raises(RecipeError, match="takes one row a call"):
        manifest.served(ServeConfig(batching=BatchingConfig(max_batch_size=8)))


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


def test_the_rows_for_int8_are_of_every_class(tmp_path: Path) -> None:
    classes = np.arange(64) % 4
    np.savez(tmp_path / "rows.npz", pixels=np.zeros((64, WIDTH), np.float32), labels=classes)
    model = open_model(dense(tmp_path / "model.onnx"), tmp_path)
    chosen = own_rows(tmp_path / "rows.npz", model)
    assert isinstance(chosen.calibration, TensorRows)
    assert chosen.calibration.classes is not None
    assert (len(chosen.calibration), len(chosen.compared)) == (16, 48)
    assert set(chosen.calibration.classes) == set(range(4))


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
    ]
    ids, mask = torch.arange(14).reshape(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    given = loaded.engine.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})["logits"]
    with torch.no_grad():
        np.testing.assert_allclose(given, model(input_ids=ids, attention_mask=mask).logits, atol=1e-5)
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


def test_a_processor_that_makes_other_tensors_is_refused(tmp_path: Path) -> None:
    text_classifier(tmp_path / "bert")
    options = [f"--processor={tmp_path / 'bert'}"]
    told = imported(tmp_path / "storage", "dense", dense(tmp_path / "model.onnx"), *options, succeeds=False)
    assert "the model takes pixels float32 [-1, 8], expected input_ids int64 [-1, -1], attention_mask" in told
    (tmp_path / "bert/tokenizer.json").unlink()
    told = imported(tmp_path / "storage", "dense", dense(tmp_path / "model.onnx"), *options, succeeds=False)
    assert "has no tokenizer: expected tokenizer.json" in told


def triton_model(folder: Path, config: str = "") -> Path:
    for version in (2, 10):
        dense(folder / str(version) / "model.onnx")
    (folder / "config.pbtxt").write_text(config or TRITON, encoding="utf-8")
    (folder / "names.txt").write_text("\n".join("abcdefgh"), encoding="utf-8")
    return folder


TRITON = """
backend: "onnxruntime" max_batch_size: 8
input { name: "pixels" data_type: TYPE_FP32 dims: 8 }
output { name: "logits" data_type: TYPE_FP32 dims: 8 label_filename: "names.txt" }
"""


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


def external(folder: Path) -> Path:
    path = dense(folder / "model.onnx")
    onnx.save_model(
        onnx.load(path),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
        convert_attribute=True,
    )
    return path


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


def with_cut_weights(folder: Path) -> Path:
    path = external(folder)
    (folder / "weights.bin").write_bytes(b"few")
    return path


def without_weights(folder: Path) -> Path:
    path = external(folder)
    (folder / "weights.bin").unlink()
    return path


def two_models(folder: Path) -> Path:
    dense(folder / "one.onnx")
    dense(folder / "two.onnx")
    return folder


def two_triton_models(folder: Path) -> Path:
    triton_model(folder / "one")
    triton_model(folder / "two")
    return folder


def text_file(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.onnx").write_text("no model", encoding="utf-8")
    return folder / "model.onnx"


REFUSED: list[tuple[Callable[[Path], Path], str]] = [
    (lambda folder: dense(folder / "m.onnx", operator="Frob"), "operator 'Frob' at node 'last', which is unknown"),
    (lambda folder: dense(folder / "m.onnx", None), "'pixels' has a rank that varies: export it with a fixed rank"),
    (
        lambda folder: dense(folder / "m.onnx", (4, WIDTH)),
        r"pixels float32 \[4, 8\]: expected the number of rows as the",
    ),
    (without_weights, "has weights in 'weights.bin', which is missing: put that file into"),
    (with_cut_weights, "has weights that cannot be read .*: copy the file and those beside it again"),
    (two_models, "has 2 models, one.onnx, two.onnx: give the path of one"),
    (two_triton_models, "has 2 models, one, two: give the path of one"),
    (lambda folder: triton_model(folder, 'backend: "python"'), "Triton's backend 'python': expected one with an ONNX"),
    (lambda folder: triton_model(folder, 'input { name: "x" }'), "has the input 'x', and its ONNX file pixels"),
    (
        lambda folder: triton_model(folder / "m", TRITON.replace("names.txt", "../names.txt")),
        "has labels in '../names.txt', outside its folder",
    ),
    (
        lambda folder: triton_model(folder / "m", TRITON.replace("names.txt", "/names.txt")),
        "has labels in '/names.txt', outside its folder",
    ),
    (
        lambda folder: triton_model(folder / "m", TRITON + 'default_model_filename: "other.onnx"'),
        "are model.onnx: expected one, VERSION/other.onnx",
    ),
    (text_file, "is not an ONNX file"),
    (
        lambda folder: lengthwise(folder / "m.onnx", "Softmax", axis=0),
        "output 'hidden' of a row depends on the other rows .*: rows influence each other; put the batch first",
    ),
    (lambda folder: folder / "none.onnx", "does not exist: give a .onnx file"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_cannot_be_imported_is_refused_before_anything_is_written(
    tmp_path: Path, make: Callable[[Path], Path], words: str
) -> None:
    assert re.search(words, imported(tmp_path / "storage", "model", make(tmp_path / "given"), succeeds=False))
    assert not (tmp_path / "storage").exists()


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        (
            {"other": np.ones((2, WIDTH), np.float32)},
            [],
            "has no 'pixels': expected pixels, and 'labels' for an accuracy",
        ),
        ({"pixels": np.ones((2, 3), np.float32)}, [], r"a row of 'pixels' has shape \[3\]: expected \[8\]"),
        ({"pixels": np.ones((2, WIDTH), np.float32), "labels": np.array(["x", "y"])}, [], "give them with --labels"),
        ({"pixels": np.ones((2, WIDTH), np.float32), "labels": np.array([1])}, [], "the same number of rows in each"),
        (
            {"pixels": np.ones((2, WIDTH), np.float32)},
            ["--scores=other"],
            "output 'other' cannot have the scores: expected a float output",
        ),
        ({"pixels": np.ones((2, WIDTH), np.float32)}, ["train.epochs=3"], "has only compile and storage"),
        ({"pixels": np.full((2, WIDTH), np.nan, np.float32)}, [], "is not finite on the first rows"),
        *[
            ({"pixels": np.ones((2, WIDTH), np.float32), "labels": np.array([0, label])}, [], words)
            for label, words in [
                (WIDTH, "has the class 8, and the output 'logits' has 8 columns"),
                (-1, r"has the label .*-1.*: expected the number of a column"),
                (1.7, r"has the label .*1\.7.*: expected the number of a column"),
                (np.nan, r"has the label .*nan.*: expected the number of a column"),
                (b"x", r"has the label .*b'0'.*: expected the number of a column"),
            ]
        ],
    ],
)
def test_rows_that_do_not_fit_are_refused(
    tmp_path: Path, columns: dict[str, NDArray[Any]], options: list[str], words: str
) -> None:
    np.savez(tmp_path / "rows.npz", **columns)  # type: ignore[arg-type]
    path = dense(tmp_path / "model.onnx")
    assert re.search(
        words, imported(tmp_path, "dense", path, f"--samples={tmp_path / 'rows.npz'}", *options, succeeds=False)
    )


@pytest.mark.parametrize(
    ("dtype", "cells", "words"),
    [
        (Type.INT8, "300", "has the value 300, expected whole numbers from -128 to 127"),
        (Type.UINT8, "-1", "has the value -1, expected whole numbers from 0 to 255"),
        (Type.BOOL, "2", "has the value 2, expected whole numbers from 0 to 1"),
        (Type.INT64, "1.5", "has the value 1.5, expected whole numbers from"),
        (Type.INT64, "[1 2 3]", "cannot be read: Expecting ',' delimiter"),
        (Type.FLOAT, "word", "it holds <U4, expected float32"),
        (Type.UINT16, "7\n9.0", None),
    ],
)
def test_numbers_that_a_type_lacks_are_refused(tmp_path: Path, dtype: int, cells: str, words: str | None) -> None:
    (tmp_path / "rows.csv").write_text(f"given\n{cells}\n", encoding="utf-8")
    spec = TensorSpec("given", np.dtype(helper.tensor_dtype_to_np_dtype(dtype)), (-1,))
    if words is None:
        assert [int(row) for row in read_rows(tmp_path / "rows.csv", Signature((spec,), ()), []).rows["given"]] == [
            7,
            9,
        ]
        return
    with pytest.raises(DataError, match=re.escape(words)):
        read_rows(tmp_path / "rows.csv", Signature((spec,), ()), [])


@pytest.mark.parametrize("is_single", [False, True])
def test_an_npz_file_that_was_cut_off_or_is_an_array_is_refused(tmp_path: Path, is_single: bool) -> None:
    path = tmp_path / "rows.npz"
    np.savez_compressed(path, pixels=labelled_rows(64)[0])
    if is_single:
        with path.open("wb") as file:
            np.save(file, labelled_rows(64)[0])
    else:
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"cannot be read as npz"):
        read_rows(path, Signature((TensorSpec("pixels", np.dtype(np.float32), (-1, WIDTH)),), ()), [])
