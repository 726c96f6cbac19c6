"""``train.plan: auto``: chosen once the model is known, and kept."""

import json
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from app.config import AutoPlan, PlanConfig, Recipe, dump_recipe, load_recipe, load_stored_recipe
from app.models.factory import blueprint_of
from app.planner.calibration import Calibration, MeasuredPlan, machine_name
from app.planner.cluster import Cluster, cluster_of, local_cluster, this_machine
from app.planner.prediction import Prediction
from app.runs import CONFIG_FILE, Run
from app.storage import to_path
from app.tasks import prepare
from app.training.planning.auto import choose_plan
from app.training.planning.outcome import measured_run, prediction_of
from app.training.planning.recipe import find_plans, subject_name, subject_of
from app.training.resume import start_or_resume
from app.training.run import open_run, prepare_run
from app.tuning.space import load_space
from app.tuning.trial_config import trial_recipe
from app.tuning.trial_data import add_plans, prepare_trials
from tests.helpers import ROOT
from tests.wording import refused

DIGITS = ROOT / "recipes/digits.yaml"


def test_auto_keeps_its_name_in_a_recipe_until_the_model_is_known(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS, ["train.plan=auto"])
    assert isinstance(recipe.train.plan, AutoPlan)
    stored = tmp_path / "recipe.yaml"
    stored.write_text(dump_recipe(recipe), encoding="utf-8")
    assert "plan: auto" in stored.read_text(encoding="utf-8")
    assert isinstance(load_stored_recipe(str(stored)).train.plan, AutoPlan)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_small_model_on_cpus_trains_under_zero_1_as_ever(workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.start("train", load_recipe(DIGITS, [f"train.workers={workers}"]))
    plan, _ = prepare_run(run)
    assert plan.recipe.train.plan == PlanConfig()
    assert isinstance(run.recipe.train.plan, AutoPlan), "nothing but the plan says what was chosen"
    assert "train.plan auto: ZeRO 1: the model's states take" in capsys.readouterr().out


def test_an_elastic_run_takes_a_plan_that_fits_any_number_of_workers() -> None:
    assert _choose(load_recipe(DIGITS, ["train.workers=[1, 4]"]), this_machine(4)).plan == PlanConfig()


def test_the_plan_is_written_into_the_run_and_a_resumed_run_keeps_it() -> None:
    run = Run.start("train", load_recipe(DIGITS))
    plan, data = prepare_run(run)
    chosen = plan.recipe.with_plan(PlanConfig(zero_stage=3))  # as if it had been
    open_run(run, replace(plan, recipe=chosen), data)
    run.until_result.close()
    assert load_stored_recipe(str(run.folder / CONFIG_FILE)).train.plan.zero_stage == 3
    resumed = start_or_resume("train", load_recipe(DIGITS, [f"train.resume={run.run_id}"]))
    assert resumed.recipe.train.plan == PlanConfig(zero_stage=3)


def test_the_fastest_measured_plan_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(DIGITS, ["train.workers=2"])
    _calibrate(recipe, tmp_path, monkeypatch)
    chosen = _choose(recipe, this_machine(2))
    assert chosen.plan.zero_stage == 0
    assert "the fastest that calibration has run on this machine, 0.01 s a step" in chosen.reason


def test_trials_share_one_plan_that_is_chosen_unless_the_space_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(DIGITS, ["train.workers=2", "tune.workers=2"])
    assert recipe.tune is not None
    _calibrate(recipe, tmp_path, monkeypatch)
    run = Run.start("tune", recipe)
    shared = prepare_trials(run, recipe.tune, load_space("tune_spaces.image:rates", recipe), local_cluster)[1]
    assert trial_recipe(shared, {"train.optimizer.lr": 0.1}, recipe.tune).train.plan.zero_stage == 0
    assert "the fastest that calibration has run" in capsys.readouterr().out
    assert isinstance(run.recipe.train.plan, AutoPlan), "the best recipe may train on other machines"
    own = prepare_trials(run, recipe.tune, load_space("tune_spaces.image:space", recipe), local_cluster)[1]
    assert own.train.plan == PlanConfig()
    assert "train.plan auto: ZeRO 1 unless the space says otherwise, since it gives" in capsys.readouterr().out


def test_a_search_draws_one_of_the_planners_plans() -> None:
    recipe = load_recipe(DIGITS, ["train.workers=2", "tune.workers=2", "tune.plans=3"])
    assert recipe.tune is not None
    data, cluster = prepare(recipe), this_machine(2)
    space = add_plans(load_space("tune_spaces.image:rates", recipe), recipe, data, recipe.tune, cluster)
    plans = space.distributions["train.plan"]
    assert isinstance(plans, CategoricalDistribution)
    assert len(set(plans.choices)) == 3
    assert space.own_values()["train.plan"] == plans.choices[0]
    values = space.draw(optuna.create_study().ask())
    assert {*values} > {"train.plan", "train.optimizer.lr"}
    expected = load_recipe(DIGITS, [f"train.plan={values['train.plan']}"]).train.plan
    assert trial_recipe(recipe, values, recipe.tune).train.plan == expected
    with refused("plans.one_model", "tune.plans"):
        add_plans(load_space("tune_spaces.image:space", recipe), recipe, data, recipe.tune, cluster)


def test_a_model_that_zero_1_cannot_hold_gets_a_plan_that_can(tmp_path: Path) -> None:
    chosen = _choose(_large(tmp_path, layers=36, width=3072), cluster_of("8xt4"))
    assert "ZeRO 1 does not fit" in chosen.reason
    assert type(chosen.plan) is PlanConfig
    assert chosen.predicted is not None
    assert chosen.predicted.memory.total < cluster_of("1xt4").device.memory


def test_a_plan_is_searched_among_those_that_the_task_supports(tmp_path: Path) -> None:
    recipe = _large(tmp_path, layers=36, width=3072)
    data = prepare(recipe)
    subject = subject_of(recipe, blueprint_of(recipe.model, data.facts).model, data)
    embedding = replace(subject, recipe=recipe.model_copy(update={"task": "sentence-embedding"}))
    for given in (subject, embedding):
        _, findings = find_plans(given, cluster_of("8xa100-80"))
        is_cut = {found.config.model_parallel > 1 for found in findings.candidates}
        assert is_cut == ({False} if given is embedding else {False, True})
    assert findings.refusals.examples["task supports it"] == "pipeline 2 is not supported by the task: pipeline is 1"


def test_a_model_that_fits_nowhere_is_told_how_many_devices_would_do(tmp_path: Path) -> None:
    with refused("plan.none_fits", "train.plan"):
        _choose(_large(tmp_path, layers=48, width=8192, workers=1), cluster_of("1xt4"))


def _calibrate(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record that ZeRO 0 was the fastest of three plans on this machine."""
    monkeypatch.setattr("app.planner.calibration._FOLDER", to_path(folder))
    data = prepare(recipe)
    subject = subject_name(recipe, blueprint_of(recipe.model, data.facts).num_parameters, data)
    runs = [_run(subject, stage, step_s) for stage, step_s in ((1, 0.02), (0, 0.01), (3, 0.05))]
    rates = {"matmul_flops": 1e11, "memory_bandwidth": 1e10, "launch_s": 1e-6, "link_latency_s": 1e-5}
    Calibration(machine=machine_name(), workers=2, precision="fp32", link_bandwidth=1e9, plans=runs, **rates).save()


def _choose(recipe: Recipe, cluster: Cluster):
    data = prepare(recipe)
    return choose_plan(recipe, blueprint_of(recipe.model, data.facts), data, lambda: cluster)


def _large(folder: Path, layers: int, width: int, workers: int = 8) -> Recipe:
    source = folder / "texts.jsonl"
    source.write_text("".join(f'{{"text": "{"a few words " * 40} {n}"}}\n' for n in range(200)), encoding="utf-8")
    args = f"{{layers: {layers}, width: {width}, heads: 16, positions: rotary, tied: true}}"
    return load_recipe(
        ROOT / "recipes/stdlib_gpt.yaml",
        [
            f"data.source={source}",
            "data.tokenizer={kind: bytes}",
            f"model.args={args}",
            f"train.workers={workers}",
            "train.device=gpu",
            "train.precision=fp16",
        ],
    )


def _run(subject: str, stage: int, step_s: float) -> MeasuredPlan:
    keys = {"tensor": 1, "pipeline": 1, "zero_stage": stage, "offload": "none", "micro_batch": 32}
    return MeasuredPlan(
        subject=subject,
        plan={**keys, "activation_checkpointing": False},
        step_s=step_s,
        memory_bytes=1,
        context_bytes=1,
        predicted_step_s=0.02,
    )


def test_a_run_tells_where_its_prediction_was_off(tmp_path: Path) -> None:
    metrics = to_path(tmp_path / "metrics.jsonl")
    lines = [{"step": n, "step_s": 0.1, "memory": {"peak_bytes": 2**30}} for n in range(3)]
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    measured = measured_run(metrics, to_path(tmp_path / "profile"))
    assert measured is not None
    assert (measured.step_s, measured.memory_bytes, measured.communication) == (0.1, 2**30, None)
    stated = Prediction(step_s=0.2, error=0.15, memory_bytes=2**30, communication=0.1, measured=measured)
    assert stated.differences() == ["a step took 0.1 s, and 0.2 s ± 15% was predicted"]
    assert stated.model_copy(update={"step_s": 0.11}).differences() == []
    assert stated.model_copy(update={"error": None}).differences() == []
    profiled = measured.model_copy(update={"communication": 0.4, "step_s": 0.2})
    (said,) = stated.model_copy(update={"measured": profiled}).differences()
    assert said == "communication took 40% of a step, and 10% was predicted"


def test_the_prediction_for_a_calibrated_plan_is_its_measured_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(DIGITS, ["train.workers=2", "train.plan.micro_batch=32"])
    _calibrate(recipe, tmp_path, monkeypatch)
    metrics = to_path(tmp_path / "metrics.jsonl")
    metrics.write_text('{"step": 0, "step_s": 1.0, "memory": {"peak_bytes": 1}}\n', encoding="utf-8")
    for stage, measured_s in ((1, 0.02), (3, 0.05)):
        staged = load_recipe(DIGITS, ["train.workers=2", "train.plan.micro_batch=32", f"train.plan.zero_stage={stage}"])
        profile = to_path(tmp_path / "profile")
        predicted = prediction_of(staged, prepare(staged), 2, lambda: this_machine(2), metrics, profile)
        assert predicted is not None
        assert predicted.step_s == measured_s
