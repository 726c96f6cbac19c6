"""What cannot be imported is refused before anything is written."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto as Type
from onnx import helper

from app.compile.imported.samples import read_rows
from app.engines.base import Signature
from app.errors import DataError
from app.tensors import TensorSpec
from tests.importing import (
    EXACT,
    TRITON,
    WIDTH,
    dense,
    external,
    imported,
    labelled_rows,
    lengthwise,
    triton_model,
    write,
)
from tests.wording import refused


def with_cut_weights(folder: Path) -> Path:
    path = external(folder)
    (folder / "weights.bin").write_bytes(b"few")
    return path


def with_weights_at(location: str, *rest: tuple[str, str]) -> Callable[[Path], Path]:
    """Return a maker of a model whose file says that its weights are there."""

    def make(folder: Path) -> Path:
        path = external(folder)
        (folder.parent / "secret.bin").write_bytes((folder / "weights.bin").read_bytes())
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            del tensor.external_data[:]
            for key, value in (("location", location), *rest):
                tensor.external_data.add(key=key, value=value)
        onnx.save(model, path)
        return path

    return make


def with_linked_weights(link: Callable[[Path, Path], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = with_weights_at("weights.bin")(folder)
        (folder / "weights.bin").unlink()
        link(folder.parent / "secret.bin", folder / "weights.bin")
        return path

    return make


def with_weights_of_a_function(folder: Path) -> Path:
    path = external(folder)
    model = onnx.load(path, load_external_data=False)
    constant = helper.make_node("Constant", [], ["c"], value=model.graph.initializer[0])
    product = helper.make_node("MatMul", ["x", "c"], ["y"])
    opsets = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("own", "Linear", ["x"], ["y"], [constant, product], opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node[0].CopyFrom(helper.make_node("Linear", ["pixels"], ["logits"], domain="own"))
    onnx.save(model, path)
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


def with_a_range_for_each_batch(folder: Path) -> Path:
    """A file with dynamic int8, which quantizes a batch by its largest number."""
    # 7 bits: without VNNI, ONNX Runtime's sums of larger products saturate, and so rows differ before any is large.
    weight = np.random.default_rng(5).integers(-64, 64, (WIDTH, WIDTH), np.int8)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["pixels"], ["rounded", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["rounded", "weight", "zero"], ["whole"]),
        helper.make_node("Cast", ["whole"], ["product"], to=Type.FLOAT),
        helper.make_node("Mul", ["product", "scale"], ["logits"]),
    ]
    info = (Type.FLOAT, ["n", WIDTH])
    return write(folder / "m.onnx", nodes, {"pixels": info}, {"logits": info}, {"weight": weight})


def text_file(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.onnx").write_text("no model", encoding="utf-8")
    return folder / "model.onnx"


def of_a_later_format(folder: Path) -> Path:
    """A model of a format that ONNX Runtime does not read yet."""
    path = dense(folder / "later.onnx")
    model = onnx.load(path)
    model.ir_version = 99
    path.write_bytes(model.SerializeToString())
    return path


def with_a_map_for_each_row(folder: Path) -> Path:
    """What skl2onnx writes by default."""
    path = dense(folder / "m.onnx")
    model = onnx.load(path)
    zipped = helper.make_node(
        "ZipMap", ["logits"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=list(range(WIDTH))
    )
    model.graph.node.append(zipped)
    row = helper.make_map_type_proto(Type.INT64, helper.make_tensor_type_proto(Type.FLOAT, []))
    model.graph.output.append(helper.make_value_info("maps", helper.make_sequence_type_proto(row)))
    onnx.save(model, path)
    return path


def a_pipe(folder: Path) -> Path:
    folder.mkdir()
    os.mkfifo(folder / "pipe.onnx")
    return folder / "pipe.onnx"


REFUSED: list[tuple[Callable[[Path], Path], str]] = [
    (lambda folder: dense(folder / "m.onnx", operator="Frob"), "operator 'Frob' at node 'last', which is unknown"),
    (lambda folder: dense(folder / "m.onnx", None), "'pixels' has a rank that varies: export it with a fixed rank"),
    (
        lambda folder: dense(folder / "m.onnx", (4, WIDTH)),
        r"pixels float32 \[4, 8\]: expected the number of rows as the",
    ),
    (without_weights, "has weights in 'weights.bin', which is missing: put that file into"),
    (
        with_cut_weights,
        r"cannot be read \(tensor 'weight' takes 256 bytes from 0 on, and has a file of 3 bytes\)",
    ),
    (with_weights_at("../secret.bin"), "has weights in '../secret.bin', outside its folder: put that file beside it"),
    (with_weights_at("/etc/passwd"), "has weights in '/etc/passwd', outside its folder: put that file beside it"),
    (with_weights_at("weights.bin", ("offset", "8")), "takes 256 bytes from 8 on, and has a file of 256 bytes"),
    (with_weights_at("weights.bin", ("length", "8")), "takes 256 bytes from 0 on, and has 8 bytes"),
    (with_weights_at("weights.bin", ("offset", "-8")), "tensor 'weight': External data offset must be non-negative"),
    (with_weights_at("weights.bin", ("offset", "x")), "tensor 'weight': invalid literal for int"),
    (with_linked_weights(lambda secret, link: link.symlink_to(secret)), "a link that leads outside its folder: put"),
    (with_linked_weights(lambda secret, link: link.hardlink_to(secret)), "a hard link, as one of 2: put a copy in"),
    (with_weights_of_a_function, "has weights of node '', Constant, in another file: export them as initializers of"),
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
    (of_a_later_format, "ONNX Runtime cannot load '[^']*/later.onnx': .*IR version"),
    (text_file, "is not an ONNX file"),
    (
        with_a_map_for_each_row,
        "'maps' is a sequence, .*: export it with the probabilities as a tensor, in skl2onnx by options={'zipmap': Fa",
    ),
    (
        lambda folder: lengthwise(folder / "m.onnx", "Softmax", axis=0),
        "output 'hidden' of a row depends on the other rows .*: export it with the batch first or",
    ),
    (
        with_a_range_for_each_batch,
        "output 'logits' of a row depends on the numbers of other rows, .*: quantize the file with fixed ranges, or",
    ),
    (lambda folder: folder / "none.onnx", "does not exist: give a .onnx file"),
    (a_pipe, "is neither a file nor a folder: give a .onnx file"),
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
                (b"x", r"has the label .*b'x'.*: expected the number of a column"),
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
        (Type.FLOAT, "word", "could not convert string to float: 'word'"),
        (Type.FLOAT, '""', "could not convert string to float: ''"),
        (Type.FLOAT, "NA", "could not convert string to float: 'NA'"),
        (Type.INT64, "1_000", "it holds '1_000', expected a number"),
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


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ("a\nb\n\nc\nd\ne\nf\ng\n", "label 3 of 8 is blank: expected a name of its own for each column"),
        ("a\nb\nc\nb\nd\ne\nf\ng", "label 4 of 8 is 'b', as number 2: expected a name of its own"),
        ("a\nb\nc\nd\ne\nf\ng", "0 of the outputs logits float32 [-1, 8] can have a score for each of 7 labels: give"),
    ],
)
def test_labels_that_do_not_name_each_column_are_refused(labels: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text(labels, encoding="utf-8")
    options = [*EXACT, f"--labels={tmp_path / 'labels.txt'}"]
    assert words in imported(tmp_path / "storage", "dense", dense(tmp_path / "model.onnx"), *options, succeeds=False)


def test_a_label_that_means_two_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("given,label\n1,1\n", encoding="utf-8")
    signature = Signature((TensorSpec("given", np.dtype(np.float32), (-1,)),), ())
    with refused("labels.unknown"):
        read_rows(tmp_path / "rows.csv", signature, ["1", "0"])
