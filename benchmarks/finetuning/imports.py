"""ONNX files of other exporters, imported, deployed and asked over HTTP beside ONNX Runtime."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from tritonclient import http as client

from app.compile.imported.run import Given, import_model
from app.config import recipe_of_model
from app.repository.repository import Repository
from app.runs import Run, execute
from app.serving.protocol.tensors import DATATYPES
from app.storage import to_path
from benchmarks.cluster import Cluster

ROWS = (1, 3, 8)
"""The rows of each request."""
_EXACT = ("compile.engines=[onnxruntime]", "compile.precisions=[fp32]")

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Foreign:
    """A model that another exporter wrote."""

    name: str
    what: str
    path: Path
    rows: Callable[[int], Tensors]
    """Returns so many rows of the inputs."""

    samples: Path | None = None
    """A file of rows that variants are compared on. None: random ones."""


@dataclass(frozen=True)
class Imported:
    """The answers of an imported version over HTTP, compared with those of ONNX Runtime."""

    name: str
    what: str
    exporter: str
    inputs: int
    outputs: int
    is_equal: bool
    """Whether every output of every request is equal, bit for bit, in type and shape, too."""


def foreign_models(folder: Path) -> list[Foreign]:
    """Write or find the models."""
    patients, samples = _patients(), folder / "patients.npz"
    columns = patients[0]
    np.savez(samples, allow_pickle=False, **(columns | {"sex": columns["sex"].astype(str)}))
    return [
        Foreign(
            "patients",
            "scikit-learn: scaling, one-hot letters, logistic regression",
            _write_pipeline(folder / "patients.onnx", patients),
            lambda count: {name: column[:count] for name, column in columns.items()},
            samples,
        ),
        Foreign(
            "magika",
            "Google's Magika: the kind of a file by its bytes, from Keras",
            Path(str(files("magika"))) / "models/standard_v3_3/model.onnx",
            lambda count: {"bytes": np.random.default_rng(0).integers(0, 256, (count, 2048)).astype(np.int32)},
        ),
    ]


def _patients() -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    """Return the columns of scikit-learn's diabetes data, the sex in letters, and whether the disease went far."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    columns: dict[str, NDArray[Any]] = {
        name: data.data[:, [index]].astype(np.float32) for index, name in enumerate(data.feature_names)
    }
    columns["sex"] = np.where(columns["sex"] == 1, "f", "m").astype(object)
    return columns, np.where(data.target > np.median(data.target), "far", "near")


def _write_pipeline(path: Path, patients: tuple[dict[str, NDArray[Any]], NDArray[Any]]) -> Path:
    """Fit a pipeline of scikit-learn, and write it with one input for each column."""
    import pandas as pd
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import make_column_transformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    columns, labels = patients
    numbers = [name for name in columns if name != "sex"]
    prepared = make_column_transformer((StandardScaler(), numbers), (OneHotEncoder(), ["sex"]))
    pipeline = make_pipeline(prepared, LogisticRegression())
    pipeline.fit(pd.DataFrame({name: column[:, 0] for name, column in columns.items()}), labels)
    types = [(name, StringTensorType([None, 1]) if name == "sex" else FloatTensorType([None, 1])) for name in columns]
    model = to_onnx(pipeline, initial_types=types, options={"zipmap": False}, target_opset=18)
    path.write_bytes(model.SerializeToString())
    return path


def measure_import(model: Foreign, cluster: Cluster, storage: Path) -> Imported:
    """Import a model, deploy it by its name, and ask it. Raises RuntimeError if one of these fails."""
    recipe = recipe_of_model(model.name, "compile", [*_EXACT, f"storage={storage}"])
    result = execute(Run.start("compile", recipe), partial(import_model, given=Given(model.path, model.samples)))
    if result.status != "succeeded":
        raise RuntimeError(f"{model.name} was not imported: {result.error}")
    address = cluster.submit("deploy", model.name, f"storage={storage}", "serve.threads=1").result.artifacts["http"]
    asked = client.InferenceServerClient(address.removeprefix("http://"))
    session = onnxruntime.InferenceSession(model.path)
    names = [output.name for output in session.get_outputs()]
    requests = [model.rows(count) for count in ROWS]
    is_equal = all(
        _equal(_ask(asked, model.name, rows, names), dict(zip(names, session.run(names, dict(rows)), strict=True)))
        for rows in requests
    )
    signature = Repository(to_path(storage)).manifest(model.name, 1).signature
    proto = onnx.load(model.path, load_external_data=False)
    exporter = f"{proto.producer_name} {proto.producer_version.partition(' ')[0]}"
    return Imported(model.name, model.what, exporter, len(signature.inputs), len(signature.outputs), is_equal)


def _ask(server: client.InferenceServerClient, name: str, rows: Tensors, outputs: list[str]) -> Tensors:
    inputs = [client.InferInput(key, list(tensor.shape), DATATYPES[tensor.dtype]) for key, tensor in rows.items()]
    for sent in inputs:
        sent.set_data_from_numpy(rows[sent.name()])
    answer = server.infer(name, inputs)
    return {output: answer.as_numpy(output) for output in outputs}


def _equal(given: Tensors, expected: Tensors) -> bool:
    return all(
        given[name].dtype == right.dtype and given[name].shape == right.shape and _plain(given[name]) == _plain(right)
        for name, right in expected.items()
    )


def _plain(array: NDArray[Any]) -> list[Any]:
    """Return the elements. Strings are texts."""
    return [item.decode() if isinstance(item, bytes) else item for item in array.ravel().tolist()]
