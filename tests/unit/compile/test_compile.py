"""Compiling the digits: what is published and reported, and what is refused."""

import json
import re
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from upath import UPath

from app.checksums import checksums_of, write_checksums
from app.compile.__main__ import main as compile_without_ray
from app.compile.compilation import Compilation
from app.compile.publication import publish
from app.compile.reference import BATCH, Reference
from app.compile.run import compile_model
from app.compile.source_model import SourceModel, load_source_model
from app.compile.variants import RequestedVariants
from app.config import CompileConfig, EngineName, load_recipe
from app.data.labelled import LabelledData, LabelledDataset
from app.data.prepared import Batch
from app.data.processor import Processor
from app.data.targets import Outputs
from app.engines.architecture import usable_cores
from app.engines.base import Engine, EngineSettings
from app.engines.onnxruntime import open_oracle
from app.engines.registry import installed_engines, open_engine, runs_plans
from app.engines.tensorrt.manifest import read_plan
from app.engines.torch import TorchEngine
from app.models.image import small_cnn
from app.published.loaded import load_model
from app.repository.repository import Repository
from app.runs import Result, Run, execute
from app.tensors import OUTPUT
from tests.compiling import DIGITS, compilation_of, on_cpu, on_gpu, report_in
from tests.helpers import result_of
from tests.preparing import in_shards, rows_in
from tests.wording import refused

FAST = ["compile.precisions=[fp32]", "compile.engines=[openvino]", "compile.batch_sizes=[1]"]


@pytest.fixture(scope="module")
def source_model(weights: UPath) -> SourceModel:
    return load_source_model(weights, load_recipe(DIGITS), threads=1)


def compiled(storage: UPath, *overrides: str) -> tuple[Run, Result]:
    run = Run.start("compile", load_recipe(DIGITS, [f"storage={storage}", *overrides]))
    return run, execute(run, compile_model)


@pytest.fixture(scope="module")
def published(storage: UPath) -> tuple[Run, Result]:
    run, result = compiled(storage, "compile.batch_sizes=[1,8]")
    assert result.status == "succeeded", result.error
    return run, result


def test_the_best_variant_is_published_with_all_that_is_known_of_it(
    published: tuple[Run, Result], storage: UPath, weights: UPath, source_model: SourceModel
) -> None:
    run, result = published
    name, _, version = result.artifacts["model"].partition("/")
    repository = Repository(storage)
    assert repository.aliases(name).production == int(version)
    repository.verify(name, int(version))
    manifest, chosen = repository.manifest(name, int(version)), result.metrics["chosen"]
    key = manifest.engine_key
    assert [key.engine, key.precision, key.device] == [chosen["engine"], chosen["precision"], "cpu"]
    assert key.engine_version == chosen["engine_version"]
    assert key.onnx_sha256 == checksums_of([repository.folder(name, int(version)) / "model.onnx"])["model.onnx"]
    assert (key.profile.batch_sizes, key.profile.lengths) == ((1, 8), ())
    assert (manifest.accuracy, manifest.cosine) == (chosen["accuracy"], chosen["cosine"])
    assert (manifest.accuracy_split, manifest.accuracy_rows) == ("validation", len(source_model.data.validation))
    assert (manifest.quantization is not None) == (key.precision == "int8")
    assert manifest.serving.replicas * manifest.serving.threads == usable_cores()
    assert (manifest.serving.max_batch_size, manifest.serving.timeout_us) == (8, 0)
    assert manifest.lineage.trial == "trial 3 of 20261123-search"
    assert manifest.lineage.train_run == str(weights.parent)
    assert manifest.lineage.compile_run == str(run.folder)
    assert manifest.lineage.data_fingerprint == source_model.data.fingerprint
    assert set(manifest.files) == {"model.onnx", "image.json", "labels.json", "answers.npz"}


def test_the_figure_of_a_version_is_of_the_test_split_which_chooses_nothing_and_is_read_once(
    storage: UPath, weights: UPath, source_model: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = UPath(tmp_path / "run")
    shutil.copytree(weights.parent.path, folder.path)
    data = source_model.data
    assert isinstance(data, LabelledData)
    rows = rows_in(data)
    wrong = [(item, str((int(label) + (row >= 40)) % 10)) for row, (item, label) in enumerate(rows["validation"][:100])]
    in_shards(UPath(tmp_path / "shards"), data.processor, data.targets, **rows | {"test": wrong}).save(folder / "data")
    reads: list[UPath] = []

    def counted(folder: UPath, processor: type[Processor], targets: type[Outputs]) -> LabelledDataset | None:
        reads.append(folder)
        return load_test(folder, processor, targets)

    load_test = LabelledData.load_test
    monkeypatch.setattr(LabelledData, "load_test", counted)
    run, result = compiled(storage, *FAST, f"compile.weights={folder / 'weights'}", "name=tested")
    assert result.status == "succeeded", result.error
    assert result.metrics["chosen"]["accuracy"] > 0.9
    accuracy, manifest = result.metrics["accuracy"], Repository(storage).manifest("tested", 1)
    assert (accuracy["split"], accuracy["rows"]) == ("test", 100)
    assert 0.3 < accuracy["accuracy"] <= 0.42
    assert (manifest.accuracy, manifest.accuracy_split, manifest.accuracy_rows) == (accuracy["accuracy"], "test", 100)
    assert "on the 100 rows of the test split" in (run.folder / "report.html").read_text(encoding="utf-8")
    assert len(reads) == 1


class Counted:
    """A split, repeated several times, that counts its encoded rows in memory."""

    def __init__(self, split: LabelledDataset, times: int) -> None:
        self._split, self._times = split, times
        self._alive = self.most = 0

    def __len__(self) -> int:
        return self._times * len(self._split)

    @property
    def lengths(self) -> list[int]:
        return self._times * list(self._split.lengths)

    def batch(self, indices: Sequence[int]) -> Batch:
        batch = self._split.batch([index % len(self._split) for index in indices])
        self._alive += len(indices)
        self.most = max(self.most, self._alive)
        weakref.finalize(next(iter(batch.inputs.values())), self._forget, len(indices))
        return batch

    def _forget(self, rows: int) -> None:
        self._alive -= rows


def test_memory_does_not_grow_with_the_split(source_model: SourceModel, tmp_path: Path) -> None:
    validation, train = Counted(source_model.data.validation, 3), Counted(source_model.data.train, 1)
    data = replace(source_model.data, validation=validation, train=train)
    settings = EngineSettings(threads=1)
    engine = TorchEngine(source_model.trained.model, source_model.signature, settings)
    long = replace(source_model, data=data, reference=Reference.of(engine, validation, source_model.reference.judge))
    compilation = compilation_of(long, tmp_path, on_cpu("onnxruntime", "fp32"), on_cpu("onnxruntime", "int8"))
    compilation.evaluate()
    assert all(record.passed for record in compilation.records)
    assert len(validation) > 15 * BATCH
    assert validation.most <= 3 * BATCH, "one that is answered, the one before, and one that is timed"
    assert train.most <= 2 * 16, "of the 512 that int8 is calibrated on"


def test_for_throughput_a_version_is_served_in_the_batches_that_were_fastest(storage: UPath, weights: UPath) -> None:
    objective = "compile.objective={goal: max_throughput, latency_ms: 60000}"
    overrides = [*FAST, "compile.batch_sizes=[1,8]", objective, f"compile.weights={weights}", "name=throughput"]
    run, result = compiled(storage, *overrides)
    assert result.status == "succeeded", result.error
    serving, point = Repository(storage).manifest("throughput", 1).serving, report_in(run).point
    assert point is not None
    fastest = max(report_in(run).points, key=lambda each: each.throughput if not each.variant.baseline else 0.0)
    assert point == fastest
    assert serving.max_batch_size == point.batch_size
    assert serving.preferred_batch_sizes == ((point.batch_size,) if point.batch_size > 1 else ())
    assert (serving.replicas, serving.threads) == (point.concurrency.streams, point.concurrency.threads)


def test_a_module_is_published_as_it_was_trained_where_pytorch_alone_is_named(
    storage: UPath, weights: UPath, source_model: SourceModel
) -> None:
    _, result = compiled(storage, "compile.engines=[torch]", f"compile.weights={weights}", "name=module")
    assert result.status == "succeeded", result.error
    assert [(metric["engine"], metric["precision"]) for metric in result.metrics["variants"]] == [("torch", "fp32")]
    manifest = Repository(storage).manifest("module", 1)
    assert {"model.safetensors", "recipe.yaml", "image.json", "labels.json"} <= set(manifest.files)
    assert manifest.engine_key.onnx_sha256 == manifest.files["model.safetensors"]
    model = load_model(storage, "module", 1, threads=1)
    assert model.platform == "torch_safetensors"
    rows = next(source_model.reference.rows.batches()).inputs
    np.testing.assert_allclose(
        model.engine.infer(rows)[OUTPUT], source_model.reference.outputs[0][OUTPUT][:64], atol=1e-5
    )


def test_it_compiles_on_this_machine_without_ray(
    storage: UPath, weights: UPath, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = [f"storage={storage}", "name=alone", f"compile.weights={weights}", *FAST]
    assert compile_without_ray([DIGITS, *alone]) == 0
    assert Repository(storage).production("alone") == 1
    assert result_of(capsys.readouterr().out)["artifacts"]["model"] == "alone/1"
    assert compile_without_ray([DIGITS, "compile.gpus=2"]) == 2


def test_every_variant_that_could_be_published_was_timed_with_one_row(published: tuple[Run, Result]) -> None:
    report = report_in(published[0])
    publishable = [variant.variant for variant in report.variants if variant.publishable]
    rivals = [point for point in report.points if point.variant in publishable and point.batch_size == 1]
    assert {rival.variant for rival in rivals} == set(publishable)
    assert report.point in rivals
    assert report.chosen is not None
    assert report.chosen.variant == report.point.variant


def test_the_result_and_the_report_hold_every_variant(published: tuple[Run, Result]) -> None:
    run, result = published
    variants = result.metrics["variants"]
    found = {(variant["engine"], variant["precision"]) for variant in variants}
    assert found >= {("openvino", "fp32"), ("onnxruntime", "fp32"), ("torch", "fp32"), ("onnxruntime", "int8")}
    for variant in variants:
        assert set(variant["latency_ms"]) == set(variant["throughput"]) == {"1", "8"}
        assert variant["max_difference"] <= 1e-4 or variant["precision"] != "fp32"
        assert variant["passed"], variant["reasons"]
    sizes = {(variant["engine"], variant["precision"]): variant["size_bytes"] for variant in variants}
    assert sizes["onnxruntime", "int8"] <= 0.3 * sizes["onnxruntime", "fp32"]
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    for engine, precision in found:
        assert f">{engine} {precision}</td>" in page
    assert "onnxruntime bf16" in page
    assert "not run: on the CPU it computes in fp32, fp16, int8" in page
    assert "<script" in page
    assert "<script src" not in page
    report = report_in(run)
    assert report.point in report.points
    assert re.fullmatch(r"\d+\.\d × PyTorch, accuracy (kept|0\.\d{4} worse)", str(report.headline))
    assert f"{report.headline}." in page
    assert {item.variant.engine for item in report.front} <= {"openvino", "onnxruntime"}
    assert {file.precision for file in report.files} == {"fp32", "int8"}
    assert result.artifacts["report"] == str(run.folder / "report.html")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("compile.gates.max_difference=1e-12", "compile.gates.max_difference is 1e-12"),
        pytest.param(
            "compile.objective={goal: max_throughput, latency_ms: 1e-6}",
            "compile.objective.latency_ms is 1e-06, and",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_does_not_hold_is_reported_with_numbers_and_not_published(
    storage: UPath, override: str, words: str
) -> None:
    before = sorted((storage / "models").rglob("*"))
    run, result = compiled(storage, *FAST, override)
    assert result.status == "failed"
    assert words in str(result.error)
    assert sorted((storage / "models").rglob("*")) == before
    report = report_in(run)
    assert report.error == result.error
    (variant,) = report.variants
    assert (variant.precision, variant.latency_ms[1] > 0) == ("fp32", True)
    assert "nothing: " in (run.folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["compile.calibration.samples=100000"], "compile.calibration.samples is 100000, and the training split has"),
        (["compile.engines=[openvino,tensorrt]"], "tensorrt is not installed"),
        (
            ["compile.precisions=[fp32,fp8]"],
            "compile.precisions name fp8, which only tensorrt and tensorrt_rtx support",
        ),
        (["compile.sparsity=2-of-4"], "compile.sparsity is 2-of-4, which only tensorrt and tensorrt_rtx"),
        (["compile.workspace_mb=64"], "compile.workspace_mb is 64, which only tensorrt and tensorrt_rtx"),
        (["compile.engines=[onnxruntime]", "compile.precisions=[bf16]"], "no variant that runs here"),
    ],
)
def test_what_cannot_work_here_is_refused_before_a_run_is_made(
    storage: UPath, overrides: list[str], words: str
) -> None:
    run, result = compiled(storage, *overrides)
    assert words in str(result.error)
    assert not run.folder.exists()


def test_a_model_with_other_tensors_is_refused_by_name(source_model: SourceModel, tmp_path: Path) -> None:
    narrow = replace(source_model, trained=replace(source_model.trained, model=Narrow()))
    with refused("file.other_tensors"):
        compilation_of(narrow, tmp_path, on_cpu("onnxruntime", "fp32")).evaluate()


class Narrow(torch.nn.Module):
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values.flatten(1)[:, :9]


def test_weights_whose_model_takes_other_inputs_are_refused(storage: UPath, weights: UPath, tmp_path: Path) -> None:
    run = UPath(tmp_path / "run")
    shutil.copytree(weights.parent.path, run.path)
    recipe = run / "weights/recipe.yaml"
    text = recipe.read_text().replace("app.models.image:small_cnn", "tests.unit.compile.test_compile:renamed")
    recipe.write_text(text, encoding="utf-8")
    write_checksums(run / "weights")
    result = compiled(storage, *FAST, f"compile.weights={run / 'weights'}")[1]
    assert "Renamed, does not take its processor's outputs pixel_values" in str(result.error)


class Renamed(torch.nn.Module):
    """The digits' network under another argument."""

    def __init__(self, width: int, num_labels: int, channels: int) -> None:
        super().__init__()
        for name, layer in small_cnn(width=width, num_labels=num_labels, channels=channels).named_children():
            self.add_module(name, layer)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image


renamed = Renamed


needs_rtx = pytest.mark.skipif("tensorrt_rtx" not in installed_engines(), reason="needs TensorRT for RTX")


@pytest.fixture
def gpu_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are built, for a GPU that is not here; ONNX Runtime answers for them, from what they are built of."""

    def open_instead(name: EngineName, path: Path, settings: EngineSettings) -> Engine:
        if not runs_plans(name):
            return open_engine(name, path, settings)
        return open_oracle(path.parent.parent / settings.precision / "model.onnx")

    monkeypatch.setattr("app.engines.architecture.compute_capability", lambda: "SM89")
    monkeypatch.setattr("app.engines.tensorrt.build.compute_capability", lambda: "SM89")
    monkeypatch.setattr("app.compile.files.open_engine", open_instead)


@needs_rtx
@pytest.mark.slow  # tests of the gates and of the source model are the faster ones of this promise
@pytest.mark.usefixtures("gpu_in_name")
def test_a_pruned_variant_below_the_gate_is_kept_out_and_the_others_are_of_the_whole_model(
    source_model: SourceModel, tmp_path: Path
) -> None:
    config = CompileConfig.model_validate(
        {"batch_sizes": [1], "engines": ["openvino", "tensorrt_rtx"], "targets": ["SM89"], "sparsity": "2-of-4",
         "gates": {"max_accuracy_drop": 0.0}}
    )  # fmt: skip
    wanted = RequestedVariants([on_gpu(sparse=True), on_cpu("openvino", "fp32")], ["fp32"], [])
    compilation = Compilation(source_model, config, wanted, tmp_path, print)
    compilation.evaluate()
    sparse, whole = compilation.records
    assert sparse.accuracy < whole.accuracy
    assert whole.score == source_model.score_to_keep
    assert any("compile.gates.max_accuracy_drop is 0.0" in reason for reason in sparse.reasons)
    assert [(file.name, file.failures == ()) for file in compilation.files] == [("fp32", True), ("fp32 2-of-4", False)]
    assert compilation.choose().record == whole
    assert list(compilation.build_ahead()) == []
    (skipped,) = compilation.skipped
    assert (skipped.engine, "the accuracy falls from" in skipped.reason) == ("tensorrt_rtx", True)


@needs_rtx
@pytest.mark.usefixtures("gpu_in_name")
def test_a_plan_is_published_with_its_manifest_and_the_file_that_it_was_built_from(
    source_model: SourceModel, tmp_path: Path
) -> None:
    compilation = compilation_of(source_model, tmp_path, on_gpu())
    compilation.evaluate()
    repository = Repository(UPath(tmp_path / "storage"))
    published = publish(compilation, compilation.choose(), "digits", repository, UPath(tmp_path / "run"))
    repository.verify("digits", published.version)
    plan = {"model.plan", "model.plan.json"}
    assert set(published.files) == {"model.onnx", *plan, "image.json", "labels.json", "answers.npz"}
    key = published.engine_key
    assert (key.engine, key.device, key.architecture, key.file) == ("tensorrt_rtx", "gpu", "SM89", "model.plan")
    _, built = read_plan(Path(repository.folder("digits", published.version).path) / key.file)
    assert built.key.onnx_sha256 == key.onnx_sha256 == published.files["model.onnx"]
    assert built.key.settings.profile == key.profile


@needs_rtx
def test_plans_for_other_machines_lie_in_the_run_and_are_not_published(storage: UPath) -> None:
    engines = ["compile.engines=[openvino,tensorrt_rtx]", "compile.targets=[SM89]", "compile.batch_sizes=[8,1]"]
    run, result = compiled(storage, "compile.precisions=[fp32]", "compile.workspace_mb=64", *engines)
    assert result.status == "succeeded", result.error
    plan = Path(result.artifacts["plan_fp32"])
    assert plan == Path(str(run.folder)) / "plans/fp32"
    built = json.loads((plan / "model.plan.json").read_text(encoding="utf-8"))
    assert built["key"]["machine"]["architectures"] == ["SM89"]
    assert built["key"]["settings"]["profile"]["batch_sizes"] == [1, 8]
    assert built["key"]["settings"]["workspace_mb"] == 64
    assert result.metrics["plans"] == [{"precision": "fp32", "targets": ["SM89"]}]
    assert result.metrics["skipped"] == []
    assert result.metrics["chosen"]["engine"] == "openvino"
