"""Models with more weights than one file holds: their ONNX files have shards, from the export to the endpoint."""

import hashlib
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from upath import UPath

from app.compile.export import export_onnx
from app.compile.onnx_files import files_of
from app.compile.run import compile_model
from app.config import load_recipe
from app.engines.base import Engine, EngineSettings
from app.engines.onnxruntime import OnnxRuntimeEngine, open_oracle
from app.engines.openvino import OpenVinoEngine
from app.errors import StorageError
from app.published.loaded import load_model
from app.repository.known_answers import KnownAnswers
from app.repository.repository import Repository
from app.runs import Result, Run, execute
from app.storage import cache_folder
from app.tensors import OUTPUT, Tensors, TensorSpec
from tests.compiling import DIGITS, digits_in, report_in
from tests.helpers import train_alone
from tests.importing import EXACT, WIDTH, external, imported, right
from tests.large_models import shaped

MIB = 2**20
GIVEN: Tensors = {"given": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)}


class Tower(torch.nn.Module):
    """Two layers of 600 x 600, which make more than 1 MiB each, and a vector that stays in the ONNX file."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = (
            torch.nn.Linear(64, 600),
            torch.nn.Linear(600, 600),
            torch.nn.Linear(600, 600),
            torch.nn.Linear(600, 5),
        )
        self.layers = torch.nn.Sequential(*parts)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(given)
        return logits


def exported(model: torch.nn.Module, path: Path, shard_mb: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    export_onnx(model.eval(), (TensorSpec("given", np.dtype(np.float32), (-1, 64)),), GIVEN, path, "fp32", shard_mb)
    return path


def on(open_engine: Callable[[Path], Engine], path: Path) -> np.ndarray:
    with closing(open_engine(path)) as engine:
        return engine.infer(GIVEN)[OUTPUT]


def test_engines_read_weights_beside_the_file_as_those_inside(tmp_path: Path) -> None:
    model = Tower()
    whole, large = exported(model, tmp_path / "whole/model.onnx", 1536), exported(model, tmp_path / "large/model.onnx")
    assert [file.name for file in files_of(whole)] == ["model.onnx"]
    _, *shards = files_of(large)
    assert len(shards) > 2
    assert large.stat().st_size < 20_000
    # Two tensors of 1.4 MB have no room beside another.
    assert all(shard.stat().st_size <= 4 * 600 * 600 for shard in shards)
    served = [partial(kind, settings=EngineSettings()) for kind in (OnnxRuntimeEngine, OpenVinoEngine)]
    for open_engine in (open_oracle, *served):
        np.testing.assert_array_equal(on(open_engine, large), on(open_engine, whole), str(open_engine))
    # A shard's name is the sum of its content, so the ONNX file alone tells one model from another.
    assert all(hashlib.sha256(shard.read_bytes()).hexdigest().startswith(shard.suffix[1:]) for shard in shards)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1.0
    assert exported(model, tmp_path / "other/model.onnx").read_bytes() != large.read_bytes()
    assert exported(Tower(), tmp_path / "same/model.onnx").read_bytes() == large.read_bytes()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    storage = tmp_path_factory.mktemp("storage")
    train_alone(f"storage={storage}", "train.epochs=3", *shaped(512, 5))
    return digits_in(UPath(storage))


def compiled(weights: UPath, storage: Path, *overrides: str) -> tuple[Run, Result]:
    settings = [f"storage={storage}", f"compile.weights={weights}", "compile.batch_sizes=[1,4]", "compile.shard_mb=1"]
    run = Run.start("compile", load_recipe(DIGITS, [*settings, *overrides]))
    return run, execute(run, compile_model)


@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        ("openvino", "int8"),
        ("onnxruntime", "fp32"),
        pytest.param("openvino", "fp32", marks=pytest.mark.slow),
        pytest.param("onnxruntime", "int8", marks=pytest.mark.slow),
    ],
)
def test_a_large_model_is_compiled_published_and_served_from_its_shards(
    weights: UPath, tmp_path: Path, engine: str, precision: str
) -> None:
    run, result = compiled(weights, tmp_path, f"compile.engines=[{engine}]", f"compile.precisions=[{precision}]")
    assert result.status == "succeeded", result.error
    repository = Repository(UPath(tmp_path))
    manifest = repository.verify("digits", 1)
    shards = [name for name in manifest.files if name.startswith("model.onnx.")]
    folder = repository.folder("digits", 1)
    sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    assert shards
    assert max(sizes.values()) <= MIB
    chosen = report_in(run).variants[0]
    assert chosen.size_bytes == sizes["model.onnx"] + sum(sizes[name] for name in shards)

    model = load_model(UPath(tmp_path), "digits", 1, threads=1)
    known = KnownAnswers.load(Path(str(folder)))
    assert known.difference(model.engine) <= max(2 * manifest.scaled_difference, 1e-5)
    model.engine.close()
    # What OpenVINO makes of it would be as large again.
    assert not list(cache_folder("engines").glob("*"))

    triton = repository.export_to_triton("digits", 1, UPath(tmp_path / "triton"))
    assert {file.name for file in (triton / "1").iterdir()} == set(manifest.files)
    with (folder / shards[0]).open("r+b") as file:
        file.seek(5000)
        file.write(b"odd!")
    with pytest.raises(StorageError, match=rf"{shards[0]}' was changed: its sha256 is"):
        load_model(UPath(tmp_path), "digits", 1, threads=1)


def test_a_large_model_is_not_timed_while_another_is_open(
    weights: UPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, result = compiled(weights, tmp_path, "compile.precisions=[fp32]", "compile.engines=[openvino,onnxruntime]")
    assert result.status == "succeeded", result.error
    words = "not timed in turns, but chosen by the earlier measurements: 5 MiB is more than compile.shard_mb, 1"
    assert words in capsys.readouterr().out


def test_large_imports_have_shards_of_their_own(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)
    path = external(tmp_path / "given", width=2**16)
    imported(tmp_path, "wide", path, *EXACT, "compile.shard_mb=1")
    manifest = Repository(UPath(tmp_path)).verify("wide", 1)
    assert manifest.lineage.imported is not None
    assert set(manifest.lineage.imported.files) == {"model.onnx", "weights.bin"}
    assert len([name for name in manifest.files if name.startswith("model.onnx.")]) == 1
    published = Path(str(tmp_path / "models/wide/1/model.onnx"))
    np.testing.assert_array_equal(right(published, {"pixels": rows})["logits"], right(path, {"pixels": rows})["logits"])
