"""Fill storage with many runs, versions and models, in the layout that the jobs write."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from upath import UPath

from app.checksums import sha256_of
from app.config import Recipe, dump_recipe, load_recipe
from app.config.data import ImageConfig
from app.data.images import ImageProcessor
from app.data.targets import save_labels
from app.engines.architecture import architecture_of
from app.engines.base import ShapeProfile, Signature
from app.repository.manifest import MODEL_FILE, EngineKey, Lineage, Manifest, ModelCard, ServingDefaults
from app.repository.repository import Repository
from app.repository.score import Score
from app.repository.version import MANIFEST_FILE, SEAL_FILE
from app.runs import CONFIG_FILE, RESULT_FILE, Result, runs_folder
from app.storage import is_local, to_path
from app.tensors import OUTPUT, Tensor, TensorSpec

RECIPE = "recipes/digits.yaml"
_LABELS = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
_AT_ONCE = 5000
"""Files that are written to an object store in one call."""


def recipe_in(storage: UPath, name: str) -> Recipe:
    """Return the recipe of the digits under another name."""
    return load_recipe(
        RECIPE,
        [f"name={name}", f"storage={storage}", "serve.version=1", "serve.replicas=1", "serve.cpus_per_replica=0"],
    )


def write_runs(storage: UPath, count: int, recipe_name: str) -> None:
    """Write succeeded training runs: the oldest of ``recipe_name``, all others of another recipe."""
    other, chosen = recipe_in(storage, "other"), recipe_in(storage, recipe_name)

    def files() -> Iterator[tuple[UPath, bytes]]:
        for number in range(count):
            recipe = other if number else chosen
            run_id = f"20260101-{number:06}-{recipe.name}-0000"
            result = Result(job="train", run_id=run_id, recipe=recipe.name, status="succeeded", duration_s=1)
            folder = runs_folder(storage, "train") / run_id
            yield folder / CONFIG_FILE, configs[recipe.name]
            yield folder / RESULT_FILE, result.model_dump_json(indent=1).encode()

    configs = {recipe.name: dump_recipe(recipe).encode() for recipe in (other, chosen)}
    _write(files())


def write_versions(storage: UPath, models: int, versions: int) -> None:
    """Write models with ``versions`` versions each. None is in production; only version 1 has its files."""
    with a_model() as files, tempfile.TemporaryDirectory() as elsewhere:
        template = Repository(to_path(elsewhere)).publish("template", to_path(files), card())
        contents = {name: (files / name).read_bytes() for name in template.files}
    _write(_versions(storage, models, versions, template, contents))


def name_of(model: int) -> str:
    """Return the name of a model by its number."""
    return f"model-{model}"


def card() -> ModelCard:
    """Return the card of the model."""
    return ModelCard(
        task="image-classification",
        engine_key=EngineKey(
            onnx_sha256="0",
            precision="fp32",
            engine="onnxruntime",
            engine_version="-",
            device="cpu",
            architecture=architecture_of("cpu", "fp32"),
            profile=ShapeProfile(batch_sizes=(1, 32), lengths=()),
        ),
        lineage=Lineage(train_run="t", compile_run="c", recipe="r", data_fingerprint="d", code="s"),
        inputs=tuple(map(Tensor.of, _signature().inputs)),
        outputs=tuple(map(Tensor.of, _signature().outputs)),
        serving=ServingDefaults(max_batch_size=32, timeout_us=0, replicas=1, threads=1),
        score=Score(value=0.9),
        max_difference=1e-6,
        cosine=1.0,
    )


@contextmanager
def a_model() -> Iterator[Path]:
    """Yield a folder with the files of a small model that ONNX Runtime serves."""
    with tempfile.TemporaryDirectory(prefix="rayloom-many-") as temporary:
        folder = Path(temporary)
        ImageProcessor(ImageConfig(size=8, channels=1)).save(to_path(folder))
        save_labels(_LABELS, to_path(folder))
        (folder / MODEL_FILE).write_bytes(_onnx_file())
        yield folder


def _signature() -> Signature:
    pixels = ImageProcessor(ImageConfig(size=8, channels=1)).inputs
    return Signature(pixels, (TensorSpec(OUTPUT, np.dtype(np.float32), (-1, len(_LABELS))),))


def _onnx_file() -> bytes:
    """Return an ONNX model that multiplies the pixels by a matrix."""
    (pixels,) = _signature().inputs
    weights = np.random.default_rng(0).normal(size=(64, len(_LABELS))).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Flatten", [pixels.name], ["flat"]), helper.make_node("MatMul", ["flat", "w"], [OUTPUT])],
        "digits",
        [helper.make_tensor_value_info(pixels.name, TensorProto.FLOAT, ["batch", *pixels.shape[1:]])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", len(_LABELS)])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _versions(
    storage: UPath, models: int, versions: int, template: Manifest, contents: Mapping[str, bytes]
) -> Iterator[tuple[UPath, bytes]]:
    for model in range(models):
        for version in range(1, versions + 1):
            folder = storage / "models" / name_of(model) / str(version)
            manifest = template.model_copy(update={"name": name_of(model), "version": version})
            content = manifest.model_dump_json(indent=1).encode()
            for name, data in contents.items() if version == 1 else ():
                yield folder / name, data
            yield folder / SEAL_FILE, f"{sha256_of(content)}  {MANIFEST_FILE}\n".encode()
            yield folder / MANIFEST_FILE, content


def _write(files: Iterator[tuple[UPath, bytes]]) -> None:
    """Write files; on an object store, many in one call."""
    while chunk := list(islice(files, _AT_ONCE)):
        if is_local(chunk[0][0]):
            for path, content in chunk:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        else:
            chunk[0][0].fs.pipe({path.path: content for path, content in chunk})
