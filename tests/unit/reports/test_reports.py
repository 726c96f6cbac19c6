"""The pages of training, deploy and lifecycle runs, and what they are made of: predictions, device-hours, energy."""

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from upath import UPath

from app.artifacts import METRICS_FILE, WEIGHTS_FILE
from app.config import load_recipe
from app.data.prepared import DataReport
from app.models.factory import blueprint_of
from app.reports.curves import read_curves
from app.reports.deployment import DeploymentRecord, Laps, deployment_page
from app.reports.lifecycle import lifecycle_page, note_part
from app.reports.run_folder import RunFolder, cost_of
from app.reports.training import training_page
from app.serving.config import DeployedModel
from app.tasks import prepare
from app.telemetry.evaluation import Calibration, Evaluation
from app.telemetry.events import Event
from app.telemetry.judgement import Baseline, Judgement
from app.telemetry.mirror import Mirror
from app.telemetry.usage import USAGE_FILE, RaplCounter, Usage, UsageMeter, begin_usage, read_usage
from app.training.evaluation import evaluate, write_evaluation
from tests.engine_contract import PROCESSOR, SIGNATURE
from tests.helpers import ROOT
from tests.stored_runs import write_run
from tests.toy import publish_version, version_config

RUN = "20260101-000000-digits-aaaa"
ALERT = Event(kind="alert", message="val_loss above 1 (val_loss 2, epoch 1): training goes on", step=2, epoch=1)
ROLLBACK = Event(kind="rolled_back", message="step 2: the loss of rank 1 is not finite", step=2, epoch=1)


@pytest.mark.parametrize("recipe_name", ["digits", "stdlib_gpt"])
def test_a_model_is_run_on_a_bounded_part_of_the_validation_split(recipe_name: str, tmp_path: Path) -> None:
    overrides = ["train.report_samples=100"]
    if recipe_name == "stdlib_gpt":
        (tmp_path / "texts").mkdir()
        for number in range(40):
            (tmp_path / f"texts/{number}.txt").write_text(f"text {number}: " + "all happy families are alike. " * 20)
        overrides += [f"data.source={tmp_path / 'texts'}", "data.block_length=32"]
    recipe = load_recipe(str(ROOT / f"recipes/{recipe_name}.yaml"), overrides)
    data = prepare(recipe)
    weights = UPath(tmp_path / "weights")
    weights.mkdir()
    model = blueprint_of(recipe.model, data.facts).model
    safetensors.torch.save_model(model, str(weights / WEIGHTS_FILE))
    found = evaluate(weights, data, recipe)
    assert found.rows == min(100, len(data.validation))
    assert found.of == len(data.validation)
    losses = [sample.loss for sample in found.worst]
    assert len(losses) == min(20, found.rows)
    assert losses == sorted(losses, reverse=True)
    if recipe_name == "digits":
        assert found.matrix is not None
        assert sum(map(sum, found.matrix)) == 100
        assert [sample for sample in found.worst if sample.png_base64 and sample.label in found.labels] == found.worst
        assert found.worst[0].probability == pytest.approx(2.718281828 ** -losses[0], rel=1e-3)
        matrix = np.array(found.matrix)
        for label, score in enumerate(found.scores):
            true, predicted, right = matrix[label].sum(), matrix[:, label].sum(), matrix[label, label]
            assert (score.label, score.rows) == (str(label), true)
            assert score.recall == pytest.approx(right / true)
            assert score.precision == (pytest.approx(right / predicted) if predicted else None)
        assert found.calibration is not None
        assert sum(part.count for part in found.calibration.bins) == 100
    else:
        assert found.matrix is None
        assert "happy families" in str(found.worst[0].text)


def test_a_calibration_is_the_distance_of_probability_and_truth() -> None:
    generator = np.random.default_rng(0)
    probabilities = generator.uniform(0.0, 1.0, 20_000)
    honest = Calibration.of(probabilities, generator.uniform(0.0, 1.0, 20_000) < probabilities)
    boastful = Calibration.of(probabilities, generator.uniform(0.0, 1.0, 20_000) < probabilities - 0.2)
    assert (len(honest.bins), sum(part.count for part in honest.bins)) == (10, 20_000)
    assert honest.error < 0.02
    assert boastful.error == pytest.approx(0.18, abs=0.02)  # 0.2, but no share is less than 0
    assert Calibration.of(np.array([1.0]), np.array([True])).error == 0.0


@pytest.mark.parametrize("recipe_name", ["diabetes", "breast_cancer"])
def test_rows_of_a_table_are_in_the_report_with_what_was_predicted(recipe_name: str, tmp_path: Path) -> None:
    recipe = load_recipe(str(ROOT / f"recipes/{recipe_name}.yaml"))
    data = prepare(recipe)
    folder = write_run(UPath(tmp_path), RUN, metrics={"val_loss": 0.5, "val_mae": 44.25})
    (folder / "w").mkdir()
    safetensors.torch.save_model(blueprint_of(recipe.model, data.facts).model, str(folder / "w" / WEIGHTS_FILE))
    write_evaluation(folder / "w", data, recipe, folder)
    found = evaluate(folder / "w", data, recipe)
    page = training_page(folder).to_html()
    assert "validation mae" in page
    assert "44.25" in page
    if recipe_name == "diabetes":
        assert (found.scores, found.calibration) == ([], None)
        worst = found.worst[0]
        scale = data.targets.scale  # type: ignore[attr-defined]
        error = (float(worst.label or "nan") - float(worst.predicted or "nan")) / scale.std
        assert worst.loss == pytest.approx(error**2, rel=1e-3)
        assert "Scores by label" not in page
    else:
        assert {score.label for score in found.scores} == {"benign", "malignant"}
        assert "Scores by label" in page
        assert "Expected calibration error" in page


def test_the_page_of_a_training_tells_where_it_stood_and_what_it_survived(tmp_path: Path) -> None:
    storage = UPath(tmp_path)
    search = "20251231-000000-digits-ffff"
    folder = write_run(
        storage,
        RUN,
        f"tuned_from={{run: {search}, trial: 3}}",
        metrics={"val_loss": 0.5, "val_accuracy": 0.9, "steps": 3},
        losses=[2.0, float("nan"), 1.0],
        events=[Event(kind="started", message="started with 2 workers"), ALERT, ROLLBACK],
    )
    recipe = load_recipe(str(ROOT / "recipes/digits.yaml"), ["train.report_samples=50"])
    data = prepare(recipe)
    DataReport.of(recipe.data.source, data).save(folder)
    (folder / "w").mkdir()
    safetensors.torch.save_model(blueprint_of(recipe.model, data.facts).model, str(folder / "w" / WEIGHTS_FILE))
    write_evaluation(folder / "w", data, recipe, folder)
    usage = begin_usage(2, "gpu", 1.0).model_copy(update={"seconds": 3600.0, "energy_j": {"gpu": 3.6e6}})
    (folder / USAGE_FILE).write_text(json.dumps([usage.model_dump(mode="json")]), encoding="utf-8")
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        for share in (0.25, 0.125):  # as on a GPU
            file.write(json.dumps({"step": 3, "memory": {"fragmentation": share}}) + "\n")
    page = training_page(folder).to_html()
    for words in (
        "succeeded", "1,797", "rows for validation", "rolled back", ROLLBACK.message, "val_loss above 1",
        "GPU-hours</th><td>2 h", "2 kWh by all GPUs, estimated from", "25.0 % of what torch reserved",
        "backward", f"50 of {len(data.validation)} rows",
        "data:image/png;base64,",
        f'<a href="../../tune/{search}/report.html">trial 3 of {search}</a>', "Gradient norm", "Learning rate",
        '"training", "kind": "line", "x": [1.0, 2.0, 3.0], "y": [2.0, null, 1.0]',
    ):  # fmt: skip
        assert words in page, words


def test_a_model_that_is_too_large_to_judge_says_so(tmp_path: Path) -> None:
    with (tmp_path / WEIGHTS_FILE).open("wb") as file:
        file.truncate(3 * 2**29)  # a sparse file
    recipe = load_recipe(str(ROOT / "recipes/digits.yaml"))
    evaluation = write_evaluation(UPath(tmp_path), prepare(recipe), recipe, UPath(tmp_path), {"val_accuracy": 0.9})
    assert evaluation.closing_line == (
        "warning: no verdict, and no baseline was fitted: the weights take 1.5 GiB, more than 1 GiB"
    )


def test_a_page_shows_some_of_what_was_dropped_and_predictions_of_data_in_shards(tmp_path: Path) -> None:
    folder = write_run(UPath(tmp_path), RUN, metrics={"val_loss": 0.5})
    rows = [f"text number {number},{number % 2}" for number in range(200)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows, "text number <7>,1", "text number <7>,0"]))
    keys = [
        f"data.source={tmp_path / 'rows.csv'}",
        "data.shards={size: 5KB, window: 9KB}",
        "train.linear_baseline=false",
    ]
    recipe = load_recipe(str(ROOT / "recipes/reviews.yaml"), keys)
    data = prepare(recipe)
    DataReport.of(recipe.data.source, data).save(folder)
    (folder / "w").mkdir()
    safetensors.torch.save_model(blueprint_of(recipe.model, data.facts).model, str(folder / "w" / WEIGHTS_FILE))
    write_evaluation(folder / "w", data, recipe, folder)
    page = training_page(folder).to_html()
    assert "under several labels" in page
    assert "text number &lt;7&gt;" in page
    assert f"{len(data.validation)} of {len(data.validation)} rows" in page


def test_a_regression_shows_its_numbers_and_marks_none_as_wrong(tmp_path: Path) -> None:
    recipe = load_recipe(str(ROOT / "recipes/diabetes.yaml"))
    data = prepare(recipe)
    folder = write_run(UPath(tmp_path), RUN, metrics={"val_mae": 50.0})
    (folder / "w").mkdir()
    safetensors.torch.save_model(blueprint_of(recipe.model, data.facts).model, str(folder / "w" / WEIGHTS_FILE))
    write_evaluation(folder / "w", data, recipe, folder)
    page = training_page(folder).to_html()
    assert "Predicted against true" in page
    assert "Residuals" in page
    assert 'class="state bad"' not in page


def test_a_noisy_loss_is_smoothed_and_a_short_wait_for_data_is_no_bottleneck(tmp_path: Path) -> None:
    folder = write_run(UPath(tmp_path), RUN, "train.epochs=7", metrics={"val_loss": 0.5})
    reading = {"processes": 0, "seconds": 1.0, "cpu_s": 0.9, "queued_s": 0.0, "source": "memory"}
    steps = [
        {"step": step, "epoch": 1, "loss": 2.0 + (-1.0) ** step, "data_stall": 0.033, "reading": reading}
        for step in range(1, 1001)
    ]
    (folder / METRICS_FILE).write_text("".join(f"{json.dumps(step)}\n" for step in steps), encoding="utf-8")
    curves = read_curves(folder)
    assert np.ptp(curves.of_steps["loss"].smoothed.values[100:]) < 0.1
    page = training_page(folder).to_html()
    assert "Data is no bottleneck: 3.3 % of a step." in page
    assert "train.epochs: 7" in page, "a difference from the default"
    assert "train.seed: 0" not in page.partition("<details>")[0]


def test_a_page_is_made_of_whatever_a_run_has(tmp_path: Path) -> None:
    folder = write_run(UPath(tmp_path), RUN, status=None)
    page = training_page(folder).to_html()
    assert "running" in page
    assert "No step has been recorded yet." in page
    failed = write_run(
        UPath(tmp_path), "20260102-000000-digits-bbbb", status="failed", error="<the loss> is not finite"
    )
    assert "&lt;the loss&gt; is not finite" in training_page(failed).to_html()
    for name in (Evaluation.file, USAGE_FILE):
        assert not (folder / name).exists()


def test_a_lifecycle_links_its_parts_and_a_deployment_its_versions(tmp_path: Path) -> None:
    storage = UPath(tmp_path)
    publish_version(storage, "digits", b"a model", SIGNATURE, PROCESSOR, ["a", "b", "c"])
    good = Judgement(metric="accuracy", mode="max", split="test", rows=90, value=0.85, low=0.76, high=0.91)
    bad = good.model_copy(update={"split": "validation", "trivial": Baseline(name="the majority class", value=0.8)})
    train = write_run(storage, RUN, metrics={"val_accuracy": 0.875, "judgement": bad.model_dump()})
    published = {"split": "test", "score": {"metric": "accuracy", "value": 0.85}, "judgement": good.model_dump()}
    compiled = write_run(storage, "20260101-000030-digits-dddd", job="compile", metrics={"accuracy": published})
    deploy = write_run(storage, "20260101-000100-digits-bbbb", job="deploy", status="failed", error="no room")
    whole = write_run(storage, "20260101-000000-digits-cccc", job="lifecycle", status="failed", error="deploy: no room")
    for part in (train, compiled, deploy):
        note_part(whole, part.parent.name, part.name)
    page = lifecycle_page(whole).to_html()
    assert f'<a href="../../train/{RUN}/report.html">{RUN}</a>' in page
    assert "val_accuracy 0.875" in page
    assert page.index("test accuracy") < page.index("validation accuracy"), "rows that chose nothing come first"
    verdicts = [
        page.index(f"accuracy 0.850 ± 0.090, {words}") for words in ("and no baseline", "not significantly better than")
    ]
    assert sorted(verdicts) == verdicts
    assert verdicts[-1] < page.index("test accuracy")
    assert "deploy: no room" in page
    clock = count(0, 2.0)
    laps = Laps(lambda: next(clock))
    laps.end("starting Serve")
    record = DeploymentRecord(
        model=DeployedModel(production=version_config(storage, 1, "digits")), phases_s=laps.seconds
    )
    record.save(deploy)
    page = deployment_page(deploy).to_html()
    assert "digits/1, in production" in page
    assert "starting Serve" in page
    assert "2.0 s" in page
    assert "no room" in page


def test_device_hours_count_every_attempt_also_one_that_was_killed(tmp_path: Path) -> None:
    now, joules = [0.0], [100.0]

    class Source:
        def read(self) -> float:
            return joules[0]

    class Broken:
        def __init__(self) -> None:
            raise PermissionError

        def read(self) -> float:
            raise AssertionError

    with Mirror(UPath(tmp_path)) as mirror:
        killed = UsageMeter(mirror, begin_usage(2, "cpu", 1.5), {"cpu": Source, "gpu": Broken}, clock=lambda: now[0])
        with killed.measure():
            now[0], joules[0] = 1800.0, 100.0 + 7.2e6
            killed.write()  # as the thread does every few seconds
            left = (tmp_path / USAGE_FILE).read_bytes()
        (tmp_path / USAGE_FILE).write_bytes(left)
        with UsageMeter(mirror, begin_usage(1, "cpu", 1.0), {"gpu": Broken}, clock=lambda: now[0]).measure():
            now[0] += 3600.0
    usage = read_usage(UPath(tmp_path))
    assert [attempt.device_hours for attempt in usage] == [1.5, 1.0]
    assert [attempt.energy_j for attempt in usage] == [{"cpu": 7.2e6}, {}]
    told = cost_of(usage)
    assert told["CPU core-hours"] == "2.5 h"
    assert str(told["energy"]).startswith("2 kWh by the first worker's processors")
    assert cost_of(usage[1:])["energy"] == "not measured"
    assert cost_of([])["device-hours"] == "not measured"


def test_a_gpu_is_told_by_its_mean_power_and_by_its_utilisation_between_two_writes(tmp_path: Path) -> None:
    now, joules = [0.0], [500.0]

    class Energy:
        def read(self) -> float:
            return joules[0]

    kept = [(10, 1.0)]  # from what ran there before

    class Gpu:
        def samples(self, after_us: int) -> list[tuple[int, float]]:
            return kept  # includes samples that were read before, which must not count twice

        def now(self) -> float:
            return 0.0

    def cannot_open() -> Gpu:
        raise OSError

    with Mirror(UPath(tmp_path)) as mirror:
        killed = UsageMeter(mirror, begin_usage(2, "gpu", 1.0), {"gpu": Energy}, Gpu, lambda: now[0])
        with killed.measure():
            now[0], joules[0] = 10.0, 4500.0
            kept.extend([(20, 0.5), (30, 1.0)])  # a mean of 0.75 since then, for 10 s
            killed.write()
            now[0] = 20.0  # idle for 10 s
            killed.write()
            left = (tmp_path / USAGE_FILE).read_bytes()
        (tmp_path / USAGE_FILE).write_bytes(left)
        with UsageMeter(mirror, begin_usage(2, "gpu", 1.0), {}, cannot_open, lambda: now[0]).measure():
            now[0] += 3600.0
    usage = read_usage(UPath(tmp_path))
    assert [attempt.gpu_busy_s for attempt in usage] == [7.5, None]
    told = cost_of(usage)
    assert told["GPU power"] == "200 W on average, the first worker's GPU (NVML)"
    assert told["GPU utilisation"] == "37.5 % of the time, the first worker's GPU (NVML)"
    assert [cost_of(usage[1:])[name] for name in ("GPU power", "GPU utilisation")] == ["not measured"] * 2
    assert "GPU power" not in cost_of([begin_usage(1, "cpu", 1.0)])


def test_rapl_adds_up_packages_and_notices_when_a_counter_begins_again(tmp_path: Path) -> None:
    for name, energy_uj in (("intel-rapl:0", 900_000), ("intel-rapl:1", 0), ("intel-rapl:0:0", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{energy_uj}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("1000000\n")
    counter = RaplCounter(tmp_path)
    assert counter.read() == 0.0
    (tmp_path / "intel-rapl:0/energy_uj").write_text("400000\n")
    (tmp_path / "intel-rapl:1/energy_uj").write_text("250000\n")
    assert counter.read() == pytest.approx(0.75)
    with pytest.raises(FileNotFoundError):
        RaplCounter(tmp_path / "nothing").read()


def test_a_run_without_a_result_has_no_recipe_it_cannot_read(tmp_path: Path) -> None:
    folder = UPath(tmp_path / "runs/train/20260101-000000-x-aaaa")
    run = RunFolder(folder)
    assert run.recipe == {}
    assert run.usage == []
    assert run.status == "interrupted"
    assert isinstance(begin_usage(1, "cpu", 1.0), Usage)
