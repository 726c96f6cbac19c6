"""Variants of the digits: what keeps one out, and how those that are left are timed."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import onnx
import openvino
import pandas as pd
import pytest
import torch
from onnx import numpy_helper
from upath import UPath

from app.compile.compilation import Compilation
from app.compile.evaluator import Evaluator
from app.compile.files import ModelFiles
from app.compile.quantization.search import Verdict
from app.compile.report import CompileReport, report_of, write_report
from app.compile.run import compile_model
from app.compile.source_model import SourceModel, load_source_model
from app.compile.timing import Concurrency, OperatingPoint
from app.compile.variants import RequestedVariants, Variant
from app.config import CompileConfig, GatesConfig, Precision, load_recipe
from app.engines.base import Engine
from app.errors import CompileError, EngineError
from app.repository.manifest import Quantization
from app.repository.repository import Repository
from app.repository.score import Score
from app.runs import Run, execute
from app.tensors import OUTPUT, Tensors
from benchmarks.compile.models import leave_fresh, write_weights
from tests.compiling import DIGITS, compilation_of, on_cpu, report_in
from tests.helpers import ROOT
from tests.wording import refused


@dataclass(frozen=True, kw_only=True)
class ExportedOnce(SourceModel):
    """A model whose ONNX files are copied after the first export."""

    folder: Path

    def export(self, path: Path, precision: Precision, shard_mb: int) -> None:
        if not (exported := self.folder / precision).exists():
            super().export(exported, precision, shard_mb)
        shutil.copy(exported, path)


@pytest.fixture(scope="module")
def source_model(weights: UPath, tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    loaded = load_source_model(weights, load_recipe(DIGITS), threads=1)
    folder = tmp_path_factory.mktemp("exported")
    return ExportedOnce(**{field.name: getattr(loaded, field.name) for field in fields(loaded)}, folder=folder)


def point_of(variant: Variant, batch_size: int, throughput: float) -> OperatingPoint:
    latency_ms = 1e3 * batch_size / throughput
    return OperatingPoint(
        variant=variant,
        concurrency=Concurrency(1, 1),
        batch_size=batch_size,
        latency_ms=latency_ms,
        latency_p95_ms=latency_ms,
        throughput=throughput,
        score=Score(value=0.9),
        size_bytes=100,
    )


def test_a_damaged_variant_is_kept_out_with_its_numbers(
    source_model: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(
        source: Path,
        samples: object,
        config: object,
        evaluate: Callable[[Path], Verdict],
        target: Path,
        log: object,
        finetune: object,
        shard_mb: int,
    ) -> Quantization:
        model = onnx.load(source)
        weight = max(model.graph.initializer, key=lambda each: np.prod(each.dims))
        weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), weight.name))
        onnx.save(model, target)
        assert not evaluate(target).passed
        return Quantization(method="minmax", smoothing=0.0, exempt=())

    monkeypatch.setattr("app.compile.files.find_quantization", damage)
    compilation = compilation_of(source_model, tmp_path, on_cpu("onnxruntime", "fp32"), on_cpu("onnxruntime", "int8"))
    compilation.evaluate()
    first, second = compilation.records
    assert first.passed
    assert not second.passed
    assert source_model.score_to_keep
    to_keep = source_model.score_to_keep.value
    assert second.accuracy < to_keep - 0.01
    drop = f"falls from {to_keep:.4f} to {second.accuracy:.4f}"
    gate = f"{drop}: compile.gates.max_accuracy_drop is 0.01"
    assert any(gate in reason for reason in second.reasons)
    assert compilation.choose().record == first


@dataclass
class Clock:
    """A clock that stands still unless somebody takes time."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Timed:
    """An engine that takes so many seconds for a call."""

    engine: Engine
    clock: Clock
    seconds: Callable[[], float]

    def run(self, inputs: Tensors) -> Tensors:
        self.clock.now += self.seconds()
        return self.engine.run(inputs)

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)


@dataclass
class Overflowing:
    """An engine whose logits are no numbers."""

    engine: Engine

    def run(self, inputs: Tensors) -> Tensors:
        return {name: np.full_like(answer, np.nan) for name, answer in self.engine.run(inputs).items()}

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)


def test_logits_that_are_no_numbers_hold_no_gate_and_their_report_can_be_read(
    source_model: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = ModelFiles.open
    monkeypatch.setattr(ModelFiles, "open", lambda *given: Overflowing(real_open(*given)))
    compilation = compilation_of(source_model, tmp_path, on_cpu("onnxruntime", "fp32"))
    compilation.evaluate()
    write_report(report_of(compilation, "digits", None), UPath(tmp_path))
    (variant,) = CompileReport.model_validate_json((tmp_path / "report.json").read_bytes()).variants
    assert math.isnan(variant.cosine)
    assert math.isnan(variant.max_difference)
    assert not variant.passed


def test_the_faster_variant_is_chosen_though_the_machine_was_slow_when_it_was_first_timed(
    source_model: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = on_cpu("onnxruntime", "fp32"), on_cpu("openvino", "fp32")
    clock, real_open = Clock(), ModelFiles.open
    now_ms = {fast: 30.0, slow: 20.0}

    def open_timed(files: ModelFiles, variant: Variant, concurrency: Concurrency) -> Timed:
        return Timed(real_open(files, variant, concurrency), clock, lambda: now_ms[variant] / 1e3)

    monkeypatch.setattr(ModelFiles, "open", open_timed)
    monkeypatch.setattr("app.compile.timing.time", clock)
    compilation = compilation_of(source_model, tmp_path, fast, slow)
    compilation.evaluate()
    now_ms[fast] = 10.0
    choice = compilation.choose()
    assert (choice.point.variant, choice.point.latency_ms) == (fast, 10.0)
    assert {point.variant: point.latency_ms for point in compilation.points} == {fast: 10.0, slow: 20.0}
    assert choice.point in compilation.points


def test_a_race_that_runs_out_of_memory_keeps_the_points_that_were_measured_alone(
    source_model: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants, real_open = [on_cpu("onnxruntime", "fp32"), on_cpu("openvino", "fp32")], ModelFiles.open
    opened: list[Engine] = []

    def open_few(files: ModelFiles, variant: Variant, concurrency: Concurrency) -> Engine:
        engine = real_open(files, variant, concurrency)
        opened.append(engine)
        if 2 < len(opened) <= 4:  # those of the race
            engine.close()
        return engine

    monkeypatch.setattr(ModelFiles, "open", open_few)
    compilation = compilation_of(source_model, tmp_path, *variants)
    compilation.evaluate()
    alone = list(compilation.points)
    choice = compilation.choose()
    assert compilation.points == alone
    assert choice.point in alone


def test_the_baseline_has_its_own_best_batch_size(source_model: SourceModel, tmp_path: Path) -> None:
    config = CompileConfig.model_validate({"batch_sizes": [4, 16], "objective": {"goal": "max_throughput"}})
    compilation = Compilation(source_model, config, RequestedVariants([], [], []), tmp_path, print)
    baseline = on_cpu("torch", "fp32").model_copy(update={"baseline": True})
    slow, fast = (point_of(baseline, *numbers) for numbers in ((16, 24.0), (4, 50.0)))
    compilation.points = [slow, fast]
    assert compilation.baseline_of(point_of(on_cpu("openvino", "fp32"), 16, 80.0)) == fast
    assert (
        compilation.baseline_of(point_of(Variant(engine="tensorrt", precision="fp32", device="gpu"), 4, 80.0)) is None
    )


def test_an_int8_that_nobody_can_make_is_a_row_of_the_report(
    source_model: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Quantization:
        raise CompileError("the best try loses 0.5")

    monkeypatch.setattr("app.compile.files.find_quantization", refuse)
    compilation = compilation_of(source_model, tmp_path, on_cpu("openvino", "fp32"), on_cpu("openvino", "int8"))
    compilation.evaluate()
    assert [record.precision for record in compilation.records] == ["fp32"]
    assert [str(reason) for reason in compilation.skipped] == ["openvino int8: not run: the best try loses 0.5"]


def test_an_int8_that_no_search_saves_is_kept_out_with_the_numbers_of_the_closest_try(
    source_model: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Evaluator, "failures", lambda _, parity, precision: ("too far",) if precision == "int8" else ())
    variants = [on_cpu(engine, precision) for engine in ("onnxruntime", "openvino") for precision in ("fp32", "int8")]
    compilation = compilation_of(source_model, tmp_path, *variants)
    compilation.evaluate()
    write_report(report_of(compilation, "digits", compilation.choose()), UPath(tmp_path))
    report = CompileReport.model_validate_json((tmp_path / "report.json").read_bytes())
    refused = [variant for variant in report.variants if variant.precision == "int8"]
    assert [item.engine for item in refused] == ["onnxruntime", "openvino"]
    for item in refused:
        assert item.reasons[:2] == ("in its file too far", "in its file as openvino runs it, too far")
        assert (item.accuracy > 0.5, item.cosine > 0.9) == (True, True)
        assert item.size_bytes < min(other.size_bytes for other in report.variants if other.precision == "fp32")
    assert report.chosen is not None
    assert report.chosen.precision == "fp32"
    assert [(file.precision, file.passes) for file in report.files] == [("fp32", True), ("int8", False)]


def test_why_an_engine_cannot_run_an_int8_file_is_kept(
    source_model: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Engine:
        raise EngineError("no kernel")

    monkeypatch.setattr("app.compile.evaluator.open_engine", refuse)
    files = ModelFiles(source_model, CompileConfig(), ["openvino"], tmp_path, print)
    assert Evaluator(source_model, GatesConfig(), ["openvino"]).verdict(files.onnx_path("fp32")) == Verdict(
        ("no kernel",), math.inf
    )


def test_a_bf16_file_is_evaluated_as_openvino_runs_it(source_model: SourceModel, tmp_path: Path) -> None:
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU does not compute in bf16")
    file = ModelFiles(source_model, CompileConfig(), (), tmp_path, print).get("bf16")
    assert file.parity is not None
    assert 1e-4 < file.parity.max_difference < 0.5
    assert (file.passes, file.verdict) == (True, "passed")


def test_a_file_that_nothing_here_runs_is_not_evaluated_and_no_plan_is_built_of_it(
    source_model: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Engine:
        raise EngineError("no kernel")

    monkeypatch.setattr("app.compile.evaluator.open_engine", refuse)
    wanted = RequestedVariants([on_cpu("onnxruntime", "fp32")], ["bf16"], [])
    compilation = Compilation(source_model, CompileConfig(batch_sizes=[1]), wanted, tmp_path, print)
    compilation.evaluate()
    assert list(compilation.build_ahead()) == []
    (skipped,) = compilation.skipped
    assert (skipped.precision, "its file: not evaluated" in skipped.reason) == ("bf16", True)
    page = write_report(report_of(compilation, "digits", None), UPath(tmp_path)).read_text(encoding="utf-8")
    assert page.count(">not evaluated: ") == 1


def test_an_engine_that_refuses_a_precision_is_skipped_in_its_own_words(
    source_model: SourceModel, tmp_path: Path
) -> None:
    on_gpu = Variant(engine="torch", precision="fp32", device="gpu")
    baseline = on_cpu("torch", "fp32").model_copy(update={"baseline": True})
    compilation = compilation_of(source_model, tmp_path, baseline, on_gpu)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    compilation.evaluate()
    (skipped,) = compilation.skipped
    assert "PyTorch finds no GPU" in skipped.reason
    with refused("variants.none_pass"):
        compilation.choose()


def test_every_length_is_measured_with_rows_that_alone_are_padded_to_it(tmp_path: Path) -> None:
    short, long = [f"{number} words" for number in range(60)], [" ".join(map(str, range(n, n + 20))) for n in range(20)]
    pd.DataFrame({"text": short + long, "label": ["good", "bad"] * 40}).to_csv(tmp_path / "texts.csv")
    source = f"data={{source: {tmp_path / 'texts.csv'}, buckets: [8, 64], validation_fraction: 0.5}}"
    reviews = [str(ROOT / "recipes/reviews.yaml"), source, "model.args={layers: 1, width: 8, heads: 2}"]
    recipe = load_recipe(reviews[0], reviews[1:])
    weights = write_weights(recipe, 2, leave_fresh, tmp_path)
    source_model = load_source_model(weights, recipe, threads=1)
    assert set(source_model.rows_by_length) == set(source_model.shares) == {8, 64}
    texts = source_model.data.validation.split.inputs
    assert source_model.shares[8] == sum(len(text.split()) == 2 for text in texts) / len(texts)
    assert (source_model.rows_by_length[8]["attention_mask"].sum(1) <= 8).all()
    assert (source_model.rows_by_length[64]["attention_mask"].sum(1) > 8).all()
    assert source_model.profile([1]).lengths == (8, 64)
    wanted = ["compile={engines: [torch], batch_sizes: [1, 4], objective: {goal: max_throughput}}"]
    wanted += [f"compile.weights={weights}", f"storage={tmp_path / 'storage'}"]
    compiling = Run.start("compile", load_recipe(reviews[0], [*reviews[1:], *wanted]))
    result = execute(compiling, compile_model)
    assert result.status == "succeeded", result.error
    serving, point = (
        Repository(UPath(tmp_path / "storage")).manifest(recipe.name, 1).serving,
        report_in(compiling).point,
    )
    assert point is not None
    assert serving.max_batch_size_by_length == point.batch_sizes
    assert set(point.batch_sizes) == {8, 64}
    assert serving.max_batch_size == point.batch_size == max(point.batch_sizes.values())
    page = (compiling.folder / "report.html").read_text(encoding="utf-8")
    assert f"8: {point.batch_sizes[8]}, 64: {point.batch_sizes[64]}" in page


def test_a_pruned_model_is_to_keep_the_accuracy_of_the_whole_one(source_model: SourceModel) -> None:
    sparse = source_model.pruned()
    assert sparse.score_to_keep == source_model.score_to_keep
    assert not np.array_equal(sparse.reference.outputs[0][OUTPUT], source_model.reference.outputs[0][OUTPUT])
