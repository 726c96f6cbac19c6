"""The benchmark of compile: who is measured when, what is made of the numbers, and one small run of all of it."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
from upath import UPath

from app.compile.records import VariantRecord
from app.compile.variants import Variant
from app.config import ComputePrecision, load_recipe
from app.data.builtin import BUILTIN
from app.repository.manifest import Quantization
from app.repository.score import Score
from benchmarks.compile import goals
from benchmarks.compile.__main__ import measure
from benchmarks.compile.coldstart import PHASES, Start, Starts
from benchmarks.compile.contenders import BASELINE, COMPILED, EAGER, PYTORCH_ENGINES, openvino
from benchmarks.compile.findings import Compiled, Findings
from benchmarks.compile.models import MODELS, Model, Setting, leave_fresh, write_weights
from benchmarks.compile.report import report
from benchmarks.compile.speed import Race
from benchmarks.machine import Conditions
from benchmarks.rounds import turns
from benchmarks.spread import Spread

CAPABLE = ("avx2", "avx512_vnni", "avx512_bf16")


def test_each_round_begins_with_another_and_leaves_nobody_out() -> None:
    orders = list(turns(["a", "b", "c"], 4))
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_a_speed_up_is_taken_round_by_round() -> None:
    setting = Setting(8, 128)
    race = Race({setting: {BASELINE: Spread((30.0, 60.0, 90.0)), "it": Spread((10.0, 10.0, 45.0))}}, {})
    assert race.speed_up(setting, "it", over=BASELINE).values == pytest.approx((3.0, 6.0, 2.0))
    assert race.speed_up(setting, "it", over=BASELINE).median == pytest.approx(3.0)


def test_the_worst_setting_decides_a_goal_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "cpu_features", lambda: CAPABLE)
    found = _found(int8_ms={Setting(1, 32): 10.0, Setting(8, 32): 10.0})
    assert _goal(found, "minilm: OpenVINO int8").verdict == "reached"
    found = _found(int8_ms={Setting(1, 32): 10.0, Setting(8, 32): 20.0})
    assert _goal(found, "minilm: OpenVINO int8").verdict == "**missed**"
    assert _goal(found, "minilm: OpenVINO int8").reached == "batch 1, 32 tokens: 4.00; batch 8, 32 tokens: 2.00"
    assert _goal(found, "minilm: chosen variant, openvino int8").reached == "batch 1, 32 tokens: 8.00"


def test_a_cpu_without_the_instructions_misses_no_goal_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "cpu_features", lambda: ("avx2", "avx512_vnni"))
    found = _found(int8_ms={Setting(1, 32): 50.0})
    assert _goal(found, "minilm: OpenVINO int8").verdict == "open: a CPU without avx512_bf16"


def test_int8_may_miss_the_cosine_if_bf16_is_served() -> None:
    found = _found(cosine=0.98, chosen="bf16")
    assert _goal(found, "minilm: mean cosine").verdict == "reached"
    assert "0.9800, worst row 0.9000; refused, openvino bf16 taken" in _goal(found, "minilm: mean cosine").reached
    assert _goal(_found(cosine=0.98, chosen="int8"), "minilm: mean cosine").verdict == "**missed**"


def test_what_is_left_out_is_said_with_its_reason() -> None:
    found = dataclasses.replace(_found(), left_out={"fashion": "its data is not here"})
    rows = [goal for goal in goals.goals(found) if goal.what.startswith("fashion")]
    assert {(row.reached, row.verdict) for row in rows} == {("its data is not here", "open")}
    assert len(rows) == 3
    assert "- **fashion** was left out: its data is not here" in report(found)


def test_a_start_with_a_warm_cache_is_judged_with_and_without_its_imports() -> None:
    load, start = (
        _goal(_found(), "minilm: seconds from its load"),
        _goal(_found(), "minilm: seconds from the first line"),
    )
    assert (load.reached, load.verdict) == ("0.25", "reached")
    assert (start.reached, start.verdict) == ("0.45", "reached")


@pytest.mark.slow
def test_a_small_encoder_runs_through_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PYTORCH_ENGINES, COMPILED)  # a compiler takes longer than all the rest
    model = Model(goals.ENCODER, "recipes/reviews.yaml", _small_encoder, lengths=(16,))
    found = measure([model], {}, threads=1, num_rounds=1)
    one = found.compiled[goals.ENCODER]
    assert set(one.records) | set(one.refused) == {"fp32", "bf16", "int8"}
    assert one.records["fp32"].worst_cosine == pytest.approx(1.0, abs=1e-5)
    for setting in (Setting(1, 16), Setting(8, 16)):
        assert {BASELINE, EAGER, openvino("fp32")} <= set(one.race.latencies[setting])
    phases = [phase for starts in found.starts for start in starts.all for phase in dataclasses.astuple(start)]
    assert len(phases) == 2 * len(PHASES)  # of a start with a cold cache and one with a warm cache
    assert min(phases) > 0.0
    text = report(found)
    assert all(f"| {goal.what} | {goal.goal} | {goal.reached} |" in text for goal in goals.goals(found))


def _small_encoder(model: Model, folder: Path) -> UPath:
    """Fresh weights: what they answer means nothing, but every engine must answer it alike."""
    table = pd.DataFrame({"text": BUILTIN["reviews"]().inputs[:400], "label": ["good", "bad"] * 200})
    table.to_csv(folder / "reviews.csv")
    overrides = (
        f"data={{source: {folder / 'reviews.csv'}, buckets: [16], tokenizer: {{vocab_size: 500}}}}",
        "model.args={layers: 1, width: 32, heads: 2}",
        "compile={engines: [openvino], batch_sizes: [1], gates: {max_accuracy_drop: 0.9, min_cosine: 0.5}}",
    )
    recipe = load_recipe(model.recipe_file, overrides)
    return write_weights(recipe, 2, leave_fresh, folder)


def _goal(found: Findings, begins: str) -> goals.Goal:
    (goal,) = (goal for goal in goals.goals(found) if goal.what.startswith(begins))
    return goal


def _found(
    int8_ms: dict[Setting, float] | None = None, cosine: float = 0.995, chosen: ComputePrecision = "int8"
) -> Findings:
    """The encoder alone, in two rounds of the same numbers: 40 ms of the baseline, 80 ms of PyTorch."""
    int8_ms = int8_ms or {Setting(1, 32): 10.0}
    race = Race(
        {
            setting: {
                BASELINE: Spread((40.0, 40.0)),
                EAGER: Spread((80.0, 80.0)),
                openvino("bf16"): Spread((16.0, 16.0)),
                openvino("int8"): Spread((ms, ms)),
            }
            for setting, ms in int8_ms.items()
        },
        {},
    )
    records = {"fp32": _record("fp32", 1.0), "bf16": _record("bf16", 1.0), "int8": _record("int8", cosine)}
    compiled = Compiled(MODELS["minilm"], records, {}, Variant(engine="openvino", precision=chosen, device="cpu"), race)
    starts = [Starts("warm", [Start(interpreter=0.1, imports=0.2, load=0.2, answer=0.05)])]
    return Findings({"minilm": compiled}, {}, starts, 2, 2, Conditions())


def _record(precision: ComputePrecision, cosine: float) -> VariantRecord:
    return VariantRecord(
        precision=precision,
        engine="openvino",
        engine_version="1",
        device="cpu",
        size_bytes=26 if precision == "int8" else 100,
        score=Score(value=0.9),
        max_difference=0.0,
        cosine=cosine,
        worst_cosine=cosine - 0.08,
        reasons=() if cosine >= 0.99 else (f"the mean cosine is {cosine}",),
        quantization=Quantization(method="minmax", smoothing=0.0, exempt=()) if precision == "int8" else None,
        latency_ms={},
        throughput={},
    )
