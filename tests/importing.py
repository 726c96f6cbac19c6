"""Models and rows that tests import."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto as Type
from onnx import helper, numpy_helper
from typer.testing import CliRunner
from upath import UPath

from app.cli.main import app
from app.repository.repository import Repository
from app.serving.batching.scheduler import BatchingPolicy
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.tensors import Tensors

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
    seal = Repository(UPath(storage)).manifest(name, 1).seal
    version = VersionConfig(storage=str(storage), name=name, version=1, seal=seal, threads=1, policy=policy)
    return EndpointConfig(models={name: DeployedModel(production=version)})


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


def lengthwise(path: Path, operator: str = "Relu", **attributes: object) -> Path:
    """A model of rows of any length, whose file calls that length ``rows``."""
    info = {name: (Type.FLOAT, ["n", "rows", WIDTH]) for name in ("values", "hidden")}
    nodes = [
        helper.make_node("MatMul", ["values", "weight"], ["mixed"]),
        helper.make_node(operator, ["mixed"], ["hidden"], **attributes),
    ]
    weight = np.random.default_rng(5).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    return write(path, nodes, {"values": info["values"]}, {"hidden": info["hidden"]}, {"weight": weight})


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


def external(folder: Path, width: int = WIDTH) -> Path:
    """A linear model whose weights are in a file beside it."""
    path = dense(folder / "model.onnx", width=width)
    onnx.save_model(
        onnx.load(path),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
        convert_attribute=True,
    )
    return path
