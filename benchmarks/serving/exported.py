"""Exported versions of each kind, loaded and asked by a real Triton: python -m benchmarks.serving.exported

The server of the wheel ``nvidia-pytriton`` reads the folder that ``rayloom models export`` wrote, as it is. The wheel
has no backend for ONNX files. ``peers/triton/onnx_backend.py`` stands in for ``onnxruntime`` and ``openvino``.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tritonclient import http as client
from upath import UPath

from app.compile.imported.run import Given, import_model
from app.config import recipe_of_model
from app.ports import unused
from app.published.loaded import load_model
from app.repository.known_answers import KnownAnswers
from app.repository.repository import Repository
from app.runs import Run, execute
from app.serving.protocol.tensors import DATATYPES
from app.storage import to_path
from app.tensors import Tensors
from benchmarks.compile.models import Model, train
from benchmarks.launch import python
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import table, verdict
from benchmarks.serving.environments import DEFAULT_FOLDER, PEERS, interpreter, version_of
from benchmarks.serving.processes import running
from benchmarks.serving.servers import SERVERS

RESULTS = Path(__file__).with_name("TRITON_EXPORT.md")
TOLERANCE = 1e-4
"""Largest difference of a float output from the version's own engine."""

_SHORT = ("train.workers=1", "train.early_stopping=null")
_COMPILE = ("compile.batch_sizes=[1,8]", "compile.gates={max_accuracy_drop: 0.5, min_cosine: 0.5}")


@dataclass(frozen=True)
class Answer:
    """A version as Triton answered it, beside its own engine."""

    name: str
    kind: str
    engine: str
    difference: float
    """Largest difference of a float output."""
    equal: bool
    """Whether all other outputs are equal."""

    @property
    def holds(self) -> bool:
        """Whether Triton answered as the engine does."""
        return self.equal and self.difference <= TOLERANCE


def main(argv: Sequence[str] | None = None) -> None:
    """Publish, export, ask, print the report, and write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.exported", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="file to write")
    parser.add_argument("--environments", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments")
    arguments = parser.parse_args(argv)
    conditions = Conditions()
    with tempfile.TemporaryDirectory(prefix="bench-exported-") as temporary:
        folder = Path(temporary)
        kinds = publish(folder)
        storage = to_path(folder / "storage")
        for name in kinds:
            Repository(storage).export_to_triton(name, 1, to_path(folder / "triton"))
        with triton(folder, arguments.environments, list(kinds)) as url:
            answers = [ask(url, storage, name, kind) for name, kind in kinds.items()]
    text = report(answers, version_of(SERVERS["triton"], arguments.environments), conditions)
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


def publish(folder: Path) -> dict[str, str]:
    """Publish a version of each kind. Return what each is, by its name."""
    digits = train(Model("digits", "recipes/digits.yaml", train, overrides=(*_SHORT, "train.epochs=3")), folder)
    overrides = (*_SHORT, "train.epochs=1", "train.max_steps=40", "train.linear_baseline=false")
    reviews = train(Model("reviews", "recipes/reviews.yaml", train, overrides=overrides), folder)
    for name, weights, engine, precision in (
        ("digits", digits, "onnxruntime", "fp32"),
        ("digits-int8", digits, "onnxruntime", "int8"),
        ("reviews", reviews, "onnxruntime", "fp32"),
        ("reviews-openvino", reviews, "openvino", "fp32"),
    ):
        settings = (f"name={name}", f"compile.engines=[{engine}]", f"compile.precisions=[{precision}]")
        recipe = f"recipes/{name.partition('-')[0]}.yaml"
        python(
            "app.compile", recipe, f"storage={folder / 'storage'}", f"compile.weights={weights}", *settings, *_COMPILE
        )
    given = Given(write_towers(folder / "towers.onnx"), sizes={"words": [5]})
    recipe_ = recipe_of_model("towers", "compile", ["compile.engines=[onnxruntime]", f"storage={folder / 'storage'}"])
    imported = execute(Run.start("compile", recipe_), partial(import_model, given=given))
    assert imported.status == "succeeded", imported.error
    return {
        "digits": "images",
        "digits-int8": "images, Q/DQ nodes",
        "reviews": "texts, a length that varies",
        "reviews-openvino": "texts, a length that varies",
        "towers": "imported: several inputs and outputs, INT64, BOOL and BYTES among them",
    }


def write_towers(path: Path) -> Path:
    """Write an ONNX file with inputs and outputs of all kinds."""
    generator = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["embedded"]),
        helper.make_node("ReduceMean", ["embedded"], ["pooled"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["pooled", "weight"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
        helper.make_node("Not", ["is_new"], ["is_old"]),
        helper.make_node("Identity", ["country"], ["zone"]),
    ]
    inputs: list[tuple[str, int, list[int | str]]] = [
        ("tokens", TensorProto.INT64, ["rows", "words"]),
        ("is_new", TensorProto.BOOL, ["rows", 1]),
        ("country", TensorProto.STRING, ["rows", 1]),
    ]
    outputs: list[tuple[str, int, list[int | str]]] = [
        ("scores", TensorProto.FLOAT, ["rows", 3]),
        ("best", TensorProto.INT64, ["rows"]),
        ("is_old", TensorProto.BOOL, ["rows", 1]),
        ("zone", TensorProto.STRING, ["rows", 1]),
    ]
    constants = {"table": generator.standard_normal((50, 8)), "weight": generator.standard_normal((8, 3))}
    graph = helper.make_graph(
        nodes,
        "towers",
        [helper.make_tensor_value_info(*info) for info in inputs],
        [helper.make_tensor_value_info(*info) for info in outputs],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@contextmanager
def triton(folder: Path, environments: Path, names: Sequence[str]) -> Iterator[str]:
    """Run Triton on the exported folder until the end of the block. Yield its address."""
    command, (port,) = interpreter(SERVERS["triton"], environments), unused(1)
    environment = {
        "PORT": str(port),
        "MODEL_REPOSITORY": str(folder / "triton"),
        "PYTHONPATH": "",
        "PATH": os.pathsep.join([str(command.parent), os.environ.get("PATH", os.defpath)]),
    }
    (folder / "server").mkdir()
    url = f"127.0.0.1:{port}"

    def is_ready() -> bool:
        server = client.InferenceServerClient(url)
        try:
            return all(server.is_model_ready(name) for name in names)
        except (OSError, client.InferenceServerException):
            return False

    script = PEERS / "triton/repository_server.py"
    with running([str(command), str(script)], environment, folder / "server", is_ready):
        yield url


def ask(url: str, storage: UPath, name: str, kind: str) -> Answer:
    """Send a version's known rows to Triton, and compare its answer with that of the version's own engine."""
    rows = KnownAnswers.load(Path(str(Repository(storage).folder(name, 1)))).inputs
    model = load_model(storage, name, 1, 1)
    own = model.engine.run(rows)
    model.engine.close()
    given = infer(url, name, rows, list(own))
    floats = [output for output, right in own.items() if right.dtype.kind == "f"]
    return Answer(
        name,
        kind,
        f"{model.engine.name} {model.manifest.engine_key.precision}",
        max(float(np.abs(given[output] - own[output]).max()) for output in floats),
        all(_plain(given[output]) == _plain(right) for output, right in own.items() if output not in floats),
    )


def infer(url: str, name: str, rows: Tensors, outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return Triton's outputs by name."""
    inputs = [client.InferInput(key, list(rows_.shape), DATATYPES[rows_.dtype]) for key, rows_ in rows.items()]
    for sent in inputs:
        sent.set_data_from_numpy(rows[sent.name()])
    answer = client.InferenceServerClient(url).infer(name, inputs)
    return {output: answer.as_numpy(output) for output in outputs}


def _plain(array: NDArray[Any]) -> list[Any]:
    """Return the elements. Strings are texts, and Triton's axis of size 1 for a number does not count."""
    return [item.decode() if isinstance(item, bytes) else item for item in array.ravel().tolist()]


def report(answers: Sequence[Answer], server: str, conditions: Conditions) -> str:
    """Return the page."""
    rows = [
        (
            answer.name,
            answer.kind,
            answer.engine,
            f"{answer.difference:.1e}",
            "yes" if answer.equal else "no",
            verdict(answer.holds),
        )
        for answer in answers
    ]
    return f"""# Exported versions in a real Triton

`python -m benchmarks.serving.exported` wrote this. {machine()}.
{versions(("rayloom", "onnxruntime", "openvino", "tritonclient"))}, {server}.
{conditions}

Each version was published and exported by `rayloom models export`. Triton loaded the exported folder without changes.
The goal: floats within {TOLERANCE:.0e} of the version's own engine, and all other outputs equal.

{table(("version", "kind", "engine", "largest difference", "other outputs equal", ""), rows)}

The wheel `nvidia-pytriton` contains Triton with its Python backend only. A Python backend stands in for
`onnxruntime` and `openvino`, and runs the file in ONNX Runtime. So this benchmark shows that Triton reads the
folder, the configuration and the tensors. Triton's own C++ backends have not been run. TensorRT versions need a GPU.
"""


if __name__ == "__main__":
    main()
