"""Models imported from ONNX files: their answers, rows and variants."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pandas as pd
import pytest
from numpy.typing import NDArray
from onnx import TensorProto as Type
from onnx import helper, numpy_helper
from tritonclient import http as client
from tritonclient.utils import InferenceServerException
from upath import UPath

from app.checksums import sha256_of_file
from app.compile.imported.formats import open_model
from app.compile.imported.samples import TensorRows
from app.compile.imported.source import own_rows
from app.compile.parity import compare, failures
from app.compile.reference import Judge, Reference
from app.config import BatchingConfig, GatesConfig, ServeConfig
from app.engines.onnxruntime import open_oracle
from app.published.loaded import load_model
from app.repository.known_answers import KnownAnswers
from app.repository.repository import Repository
from app.tensors import magnitudes, slice_rows
from tests.helpers import result_of
from tests.importing import (
    CLASSES,
    EXACT,
    WIDTH,
    WORDS,
    dense,
    imported,
    labelled_rows,
    lengthwise,
    right,
    rows,
    served,
    write,
)
from tests.serving import serving
from tests.wording import refused


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
        known = KnownAnswers(inputs, outputs, magnitudes([outputs]))
        assert replace(known, outputs=right(two_towers, inputs)).difference(engine) == 0.0
        assert known.difference(engine) == np.inf
        assert known.difference(engine, 0.25) == 0.0


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
        assert httpx.get(f"http://{server.http}/v1/predict").json() == []
        assert ask(server.http, "towers", rows(2), True).as_numpy("scores").shape == (2, CLASSES)


@pytest.mark.parametrize("kind", ["npz", "jsonl", "parquet"])
def test_rows_of_ones_own_give_an_accuracy_and_int8(tmp_path: Path, kind: str) -> None:
    path, samples = dense(tmp_path / "model.onnx"), tmp_path / f"rows.{kind}"
    pixels, classes = labelled_rows(128)
    if kind == "npz":
        np.savez(samples, pixels=pixels, labels=classes)
    else:
        table = pd.DataFrame({"pixels": [row.tolist() for row in pixels], "label": classes})
        table.to_parquet(samples) if kind == "parquet" else table.to_json(samples, orient="records", lines=True)
    few = ["compile.engines=[onnxruntime]", "compile.batch_sizes=[1]"]
    output = imported(tmp_path, "dense", path, f"--samples={samples}", *few, "--json")
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
        assert parity.unjudged_error == parity.relative_error == pytest.approx(error, rel=1e-4)
        assert parity.cosine == 1.0
        assert bool(failures(parity, "int8", None, Judge(None), GatesConfig())) is (error == 0.5)


@pytest.mark.parametrize("magnitude", [3e5, 1.0, 1e-6])
def test_fp32_is_held_to_a_share_of_the_outputs_magnitude(magnitude: float, tmp_path: Path) -> None:
    path, (pixels, _) = dense(tmp_path / "model.onnx"), labelled_rows(128)
    model = onnx.load(path)
    weight = numpy_helper.to_array(model.graph.initializer[0])

    def scaled(error: float) -> Path:
        changed = (weight * magnitude * (1 + error)).astype(np.float32)
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(changed, "weight"))
        onnx.save(model, tmp_path / "scaled.onnx")
        return tmp_path / "scaled.onnx"

    rows = TensorRows({"pixels": list(pixels)}, [0] * len(pixels))
    with closing(open_oracle(scaled(0.0))) as engine:
        reference = Reference.of(engine, rows, Judge(None))
    for error in (1e-6, 1e-3):
        with closing(open_oracle(scaled(error))) as engine:
            refused = failures(compare(engine, reference), "fp32", None, Judge(None), GatesConfig())
        assert bool(refused) is (error == 1e-3), refused


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("output", ["large", "small"])
def test_a_small_output_or_column_may_be_no_more_wrong_than_a_large_one(
    output: str, precision: str, axis: int, tmp_path: Path
) -> None:
    """Two outputs have columns of two magnitudes, on the last axis or before it. One column is wrong."""
    weights = {"large": np.array([1e6, 1e-3], np.float32), "small": np.array([1e-6, 3e-9], np.float32)}
    shapes = {1: (1, 2, 1), 2: (1, 1, 2)}

    def model(name: str, errors: Mapping[str, float]) -> Path:
        nodes = [helper.make_node("Mul", ["pixels", f"{name}_weight"], [name]) for name in weights]
        constants = {
            f"{name}_weight": (weight * [1, 1 + errors.get(name, 0.0)]).astype(np.float32).reshape(shapes[axis])
            for name, weight in weights.items()
        }
        outputs = {name: (Type.FLOAT, ["n", None, None]) for name in weights}
        return write(tmp_path / name, nodes, {"pixels": (Type.FLOAT, ["n", 1, 1])}, outputs, constants)

    pixels = np.random.default_rng(3).standard_normal((64, 1, 1)).astype(np.float32)
    rows = TensorRows({"pixels": list(pixels)}, [0] * len(pixels))
    with closing(open_oracle(model("right.onnx", {}))) as engine:
        reference = Reference.of(engine, rows, Judge(None))
    known = KnownAnswers({"pixels": pixels[:4]}, slice_rows(reference.outputs[0], 0, 4), reference.magnitudes)
    for error in (1e-6, 1.0):
        with closing(open_oracle(model("wrong.onnx", {output: error}))) as engine:
            refused = failures(compare(engine, reference), precision, None, Judge(None), GatesConfig())
            assert bool(refused) is (error == 1.0), refused
            assert (known.difference(engine) > 1e-4) is (error == 1.0)


@pytest.mark.parametrize("columns", [384, 2048])
def test_features_that_are_nearly_always_0_may_be_rounded_like_the_others(columns: int, tmp_path: Path) -> None:
    """The other model sums the same products in another order. Wrong features are refused as before."""
    draw = np.random.default_rng(3).standard_normal
    pixels = draw((512, 64)).astype(np.float32)
    first, second = draw((64, 256)).astype(np.float32), draw((256, columns)).astype(np.float32)
    sums = np.maximum(pixels @ first, 0.0) @ second
    # Later features are above 0 in fewer rows, the last ones in hardly any.
    rarity = -sums.mean(axis=0) - sums.std(axis=0) * np.linspace(0.0, 3.2, columns)
    nodes = [
        helper.make_node("MatMul", ["pixels", "first"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["positive"]),
        helper.make_node("MatMul", ["positive", "second"], ["sums"]),
        helper.make_node("Add", ["sums", "rarity"], ["shifted"]),
        helper.make_node("Relu", ["shifted"], ["features"]),
    ]

    def model(order: NDArray[np.intp], error: float = 0.0) -> Path:
        given = second[order]
        given[:, 0] *= 1 + error
        constants = {"first": first[:, order], "second": given, "rarity": rarity.astype(np.float32)}
        takes, gives = {"pixels": (Type.FLOAT, ["n", 64])}, {"features": (Type.FLOAT, ["n", columns])}
        return write(tmp_path / "model.onnx", nodes, takes, gives, constants)

    as_written, shuffled = np.arange(256), np.random.default_rng(4).permutation(256)
    with closing(open_oracle(model(as_written))) as engine:
        reference = Reference.of(engine, TensorRows({"pixels": list(pixels)}, [0] * len(pixels)), Judge(None))
    for error in (0.0, 1e-3):
        with closing(open_oracle(model(shuffled, error))) as engine:
            parity = compare(engine, reference)
        assert parity.max_difference > 0.0
        assert bool(failures(parity, "fp32", None, Judge(None), GatesConfig())) is (error > 0.0), parity


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
    with refused("batching.sizes", "serve.batching.max_batch_size"):
        manifest.served(ServeConfig(batching=BatchingConfig(max_batch_size=8)))


def test_the_rows_for_int8_are_of_every_class(tmp_path: Path) -> None:
    classes = np.arange(64) % 4
    np.savez(tmp_path / "rows.npz", pixels=np.zeros((64, WIDTH), np.float32), labels=classes)
    model = open_model(dense(tmp_path / "model.onnx"), tmp_path)
    chosen = own_rows(tmp_path / "rows.npz", model)
    assert isinstance(chosen.calibration, TensorRows)
    assert chosen.calibration.classes is not None
    assert (len(chosen.calibration), len(chosen.compared)) == (16, 48)
    assert set(chosen.calibration.classes) == set(range(4))


@pytest.mark.parametrize(
    "end", ["Identity", "Dropout", *(pytest.param(end, marks=pytest.mark.slow) for end in ("Add", "Reshape", "Cast"))]
)
def test_openvino_runs_models_that_begin_and_end_in_nothing(end: str, tmp_path: Path) -> None:
    begin = "Identity" if end == "Dropout" else end
    more = {"Add": ["zero"], "Reshape": ["shape"]}
    kept = {"Cast": {"to": Type.FLOAT}}
    nodes = [
        helper.make_node(begin, ["pixels", *more.get(begin, [])], ["a"], **kept.get(begin, {})),
        helper.make_node("MatMul", ["a", "weight"], ["b"]),
        helper.make_node(end, ["b", *more.get(end, [])], ["logits"], **kept.get(end, {})),
    ]
    info = (Type.FLOAT, ["n", WIDTH])
    constants = {"zero": np.zeros(1, np.float32), "shape": np.array([-1, WIDTH])}
    used = {name: constants[name] for name in more.get(end, [])} | {"weight": np.eye(WIDTH, dtype=np.float32)}
    path = write(tmp_path / "model.onnx", nodes, {"pixels": info}, {"logits": info}, used)
    np.savez(tmp_path / "rows.npz", pixels=labelled_rows(128)[0])
    few = ["compile.engines=[openvino]", "compile.precisions=[fp32,int8]", "compile.batch_sizes=[1]", "--json"]
    result = result_of(imported(tmp_path, "model", path, f"--samples={tmp_path / 'rows.npz'}", *few))
    variants = {variant["precision"]: variant["passed"] for variant in result["metrics"]["variants"]}
    assert variants == {"fp32": True, "int8": True}
    loaded = load_model(UPath(tmp_path), "model", 1, 1)
    assert set(loaded.engine.infer({"pixels": np.ones((2, WIDTH), np.float32)})) == {"logits"}
    loaded.engine.close()


def test_int8_is_made_for_the_engines_that_run_the_model(tmp_path: Path) -> None:
    # OpenVINO loses the name of an input that a Dropout reads.
    nodes = [helper.make_node("Dropout", ["pixels"], ["a"]), helper.make_node("MatMul", ["a", "weight"], ["logits"])]
    info = (Type.FLOAT, ["n", WIDTH])
    weight = {"weight": np.eye(WIDTH, dtype=np.float32)}
    path = write(tmp_path / "model.onnx", nodes, {"pixels": info}, {"logits": info}, weight)
    np.savez(tmp_path / "rows.npz", pixels=labelled_rows(128)[0])
    few = ["compile.precisions=[fp32,int8]", "compile.batch_sizes=[1]", "--json"]
    result = result_of(imported(tmp_path, "model", path, f"--samples={tmp_path / 'rows.npz'}", *few))
    passed = {(record["engine"], record["precision"]) for record in result["metrics"]["variants"] if record["passed"]}
    assert ("openvino", "fp32") not in passed
    assert ("onnxruntime", "int8") in passed


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_texts_of_a_table_stay_as_they_are_written(kind: str, tmp_path: Path) -> None:
    codes = ["00501", "501", "NA", "null", "2024-01-05", "1e3", "True", " x"]
    node = helper.make_node(
        "LabelEncoder", ["code"], ["class"], domain="ai.onnx.ml",
        keys_strings=codes, values_int64s=list(range(len(codes))), default_int64=99,
    )  # fmt: skip
    names = {"depth": np.array(len(codes)), "on_off": np.array([0.0, 1.0], np.float32)}
    scores = helper.make_node("OneHot", ["class", "depth", "on_off"], ["scores"], axis=-1)
    info = {"code": (Type.STRING, ["n"])}
    path = write(tmp_path / "m.onnx", [node, scores], info, {"scores": (Type.FLOAT, ["n", len(codes)])}, names)
    (tmp_path / "labels.txt").write_text("\n".join(codes), encoding="utf-8")
    table = pd.DataFrame({"code": codes, "label": codes})
    samples = tmp_path / f"rows.{kind}"
    if kind == "csv":
        table.to_csv(samples, index=False)
    else:
        table.to_parquet(samples) if kind == "parquet" else table.to_json(samples, orient="records", lines=True)
    imported(tmp_path, "codes", path, *EXACT, f"--samples={samples}", f"--labels={tmp_path / 'labels.txt'}")
    manifest = Repository(UPath(tmp_path)).manifest("codes", 1)
    assert (manifest.accuracy, manifest.accuracy_rows) == (1.0, len(codes))


def test_one_row_of_few_does_not_refuse_int8(tmp_path: Path) -> None:
    classes = np.arange(64) % WIDTH
    pixels = np.eye(WIDTH, dtype=np.float32)[classes]
    # One of the 48 rows that are compared is nearly a tie, which 8 bits cannot tell apart.
    odd = int(np.random.default_rng(0).permutation(64)[-1])
    pixels[odd], classes[odd] = [0.5, 0.5001, *[0.0] * (WIDTH - 2)], 1
    np.savez(tmp_path / "rows.npz", pixels=pixels, labels=classes)
    few = [f"--samples={tmp_path / 'rows.npz'}", "compile.precisions=[fp32,int8]", "compile.batch_sizes=[1]"]
    told = imported(tmp_path, "dense", dense(tmp_path / "model.onnx"), *few, "--json")
    accuracies = {
        (record["precision"], record["accuracy"], record["passed"]) for record in result_of(told)["metrics"]["variants"]
    }
    assert accuracies == {("fp32", 1.0, True), ("int8", 47 / 48, True)}
    assert "warning: 48 rows are few for gates: one of them is 2.1% of the accuracy; give 100 or more" in told
