"""Gates, operating points, the Pareto front and the objective, on numbers made by hand."""

import re
from collections.abc import Sequence
from functools import partial
from math import nan
from typing import Any

import pytest

from app.compile.choice import best_at_length, best_point, ranked, serving_defaults
from app.compile.parity import Parity, failures
from app.compile.reference import Judge
from app.compile.timing import (
    Concurrency,
    OperatingPoint,
    Point,
    Timer,
    concurrencies,
    operating_points,
    pareto_front,
    race,
)
from app.compile.variants import Variant, requested_variants
from app.config import CompileConfig, GatesConfig, ObjectiveConfig
from app.repository.score import Score
from app.tasks.metrics import Accuracy, Metric
from app.tasks.multilabel import F1
from app.tasks.regression import MeanAbsoluteError
from tests.wording import refused

JUDGE = Judge(Accuracy())
TO_KEEP = Score(value=0.90)
GOOD = Parity(score=TO_KEEP, max_difference=1e-6, cosine=1.0, worst_cosine=1.0)


@pytest.mark.parametrize(
    ("precision", "change", "words"),
    [
        (
            "fp32",
            {"max_difference": 3.0, "scaled_difference": 2e-4},
            "the largest difference is 2.0e-04 of the magnitude of its column, and no number differs by more than 3.0",
        ),
        ("fp32", {"scaled_difference": nan}, "compile.gates.max_difference"),
        ("int8", {"score": Score(value=0.889)}, "falls from 0.9000 to 0.8890: compile.gates.max_accuracy_drop is 0.01"),
        ("bf16", {"cosine": 0.98}, "the mean cosine is 0.9800: compile.gates.min_cosine is 0.99"),
        ("bf16", {"cosine": nan}, "compile.gates.min_cosine"),
        (
            "int8",
            {"unjudged_error": 0.15},
            "relative error is 15.00%: compile.gates.min_cosine is 0.99, which allows 14.11%",
        ),
        ("fp32", {"unjudged_error": nan}, "the relative error is nan%"),
    ],
)
def test_each_gate_refuses(precision: str, change: dict[str, Any], words: str) -> None:
    gates = GatesConfig()
    assert failures(GOOD, precision, TO_KEEP, JUDGE, gates) == ()
    (reason,) = failures(GOOD.model_copy(update=change), precision, TO_KEEP, JUDGE, gates)
    assert words in reason


@pytest.mark.parametrize(
    ("lost", "gained", "limit", "is_refused"),
    [
        (1, 0, 0.01, False),  # one row of 48 is 2 %
        (2, 0, 0.01, False),
        (3, 0, 0.01, True),
        (20, 18, 0.01, False),
        (20, 12, 0.01, True),
        (20, 6, 0.01, True),
        (1, 0, 0.0, True),
    ],
)
def test_a_drop_that_may_be_chance_does_not_refuse(lost: int, gained: int, limit: float, is_refused: bool) -> None:
    given = {"score": Score(value=0.90 - (lost - gained) / 48), "lost": lost, "gained": gained}
    refused = failures(GOOD.model_copy(update=given), "int8", TO_KEEP, JUDGE, GatesConfig(max_accuracy_drop=limit))
    assert bool(refused) is is_refused


def test_the_loss_of_pruning_is_refused_though_the_file_is_equal_to_the_pruned_model() -> None:
    given = GOOD.model_copy(update={"score": Score(value=0.8), "lost": 0, "gained": 0})
    assert failures(given, "fp32", TO_KEEP, JUDGE, GatesConfig(), is_compared=False)
    before, after = (Score(metric="mae", value=value, mode="min") for value in (1e-9, 2e-9))
    rounded = given.model_copy(update={"score": after})
    assert failures(rounded, "fp32", before, Judge(MeanAbsoluteError()), GatesConfig(), is_compared=False)
    assert not failures(rounded, "fp32", before, Judge(MeanAbsoluteError()), GatesConfig())


@pytest.mark.parametrize(
    ("metric", "after", "words"),
    [
        (F1(), 0.88, "the f1 falls from 0.9000 to 0.8800: .* is 0.01, which limits the fall of f1"),
        (MeanAbsoluteError(), 0.95, "the mae rises from 0.9000 to 0.9500: .* limits the rise of mae as a share of it"),
    ],
)
def test_the_gate_of_a_task_names_its_metric(metric: Metric, after: float, words: str) -> None:
    before, found = (Score(metric=metric.name, value=value, mode=metric.mode) for value in (0.9, after))
    given = GOOD.model_copy(update={"score": found})
    (reason,) = failures(given, "int8", before, Judge(metric), GatesConfig())
    assert re.search(words, reason)


def test_without_an_accuracy_the_relative_error_is_a_gate_below_float32() -> None:
    given = GOOD.model_copy(update={"relative_error": 0.15})
    assert failures(given, "int8", TO_KEEP, JUDGE, GatesConfig()) == ()
    (reason,) = failures(given.model_copy(update={"score": None}), "int8", None, JUDGE, GatesConfig())
    assert "the relative error is 15.00%" in reason


def test_a_difference_is_no_gate_below_float32() -> None:
    assert failures(GOOD.model_copy(update={"max_difference": 0.5}), "int8", TO_KEEP, JUDGE, GatesConfig()) == ()


def point(
    batch: int, latency_ms: float, streams: int = 1, precision: str = "fp32", accuracy: float = 0.9, size: int = 100
) -> OperatingPoint:
    return OperatingPoint(
        variant=Variant(engine="openvino", precision=precision, device="cpu"),
        concurrency=Concurrency(2 // streams, streams),
        batch_size=batch,
        latency_ms=latency_ms,
        latency_p95_ms=2 * latency_ms,
        throughput=1e3 * batch * streams / latency_ms,
        score=Score(value=accuracy),
        size_bytes=size,
    )


ONE, EIGHT, MANY = point(1, 2.0), point(8, 10.0), point(8, 12.0, streams=2)
SMALL = point(1, 1.0, precision="int8", accuracy=0.89, size=25)


def test_the_least_latency_is_that_of_one_row() -> None:
    assert best_point([EIGHT, point(8, 0.5), SMALL, ONE], ObjectiveConfig()) == SMALL


def test_the_most_rows_within_the_limit() -> None:
    points = [ONE, EIGHT, MANY, SMALL]
    assert best_point(points, ObjectiveConfig(goal="max_throughput")) == MANY
    within = ObjectiveConfig(goal="max_throughput", latency_ms=20.0)
    assert best_point(points, within) == SMALL  # 1,000 rows a second: EIGHT has 800
    assert ranked(points, within)[-1] == MANY
    with refused("objective.unreachable", "compile.objective.latency_ms"):
        best_point(points, ObjectiveConfig(goal="max_throughput", latency_ms=1.0))


def test_a_batch_waits_as_long_as_joining_saves_and_as_the_limit_leaves() -> None:
    throughput = ObjectiveConfig(goal="max_throughput")
    defaults = serving_defaults(EIGHT, [ONE, EIGHT], throughput)
    assert (defaults.max_batch_size, defaults.preferred_batch_sizes) == (8, (8,))
    assert defaults.timeout_us == 6000  # eight alone take 16 ms, together 10 ms
    assert (defaults.replicas, defaults.threads) == (1, 2)
    limited = ObjectiveConfig(goal="max_throughput", latency_ms=21.0)
    assert serving_defaults(EIGHT, [ONE, EIGHT], limited).timeout_us == 1000
    assert serving_defaults(MANY, [MANY], throughput).replicas == 2


def test_for_the_least_latency_nothing_waits_and_a_request_may_have_many_rows() -> None:
    defaults = serving_defaults(ONE, [ONE, EIGHT], ObjectiveConfig())
    assert (defaults.max_batch_size, defaults.preferred_batch_sizes, defaults.timeout_us) == (8, (), 0)


def test_nothing_on_the_front_is_beaten_in_everything() -> None:
    slower, larger = point(1, 3.0), point(1, 2.0, size=200)
    points = [ONE, slower, larger, EIGHT, MANY, SMALL]
    assert pareto_front(points) == [ONE, EIGHT, MANY, SMALL]
    assert pareto_front([ONE, ONE]) == [ONE, ONE]  # neither is better


def test_settings_are_timed_in_turns_and_a_slow_round_decides_nothing() -> None:
    order: list[str] = []

    def timer(name: str, *latencies: float) -> Timer:
        times = iter(latencies)

        def time_once() -> OperatingPoint:
            order.append(name)
            return point(1, next(times))

        return time_once

    raced = race([timer("a", 2.0, 9.0, 2.1, 9.0, 2.2), timer("b", 3.0, 3.0, 3.0, 3.0, 3.0)])
    assert [item.latency_ms for item in raced] == [2.2, 3.0]
    assert [round(item.throughput) for item in raced] == [455, 333]
    assert "".join(order) == "abbaabbaab"


def test_lengths_count_as_rows_have_them() -> None:
    def measured(length: int, latency_ms: float, throughput: float) -> Point:
        return Point(
            concurrency=Concurrency(2, 1),
            batch_size=4,
            length=length,
            latency_ms=latency_ms,
            latency_p95_ms=latency_ms + 1.0,
            throughput=throughput,
        )

    points = [measured(16, 2.0, 2000.0), measured(64, 6.0, 500.0)]
    (joined,) = operating_points(ONE.variant, TO_KEEP, 100, points, {16: 0.75, 64: 0.25}, only)
    assert (joined.accuracy, joined.size_bytes) == (0.9, 100)
    assert joined.latency_ms == pytest.approx(3.0)
    assert joined.latency_p95_ms == 7.0
    assert joined.throughput == pytest.approx(1 / (0.75 / 2000 + 0.25 / 500))


def only(points: Sequence[Point]) -> Point:
    (point,) = points
    return point


def at(length: int, throughputs: dict[int, float]) -> list[Point]:
    """Return the points of one stream at a length, one for each batch size. The p95 latency is the median."""
    times = {size: 1e3 * size / throughput for size, throughput in throughputs.items()}
    return [
        Point(
            concurrency=Concurrency(2, 1),
            batch_size=size,
            length=length,
            latency_ms=times[size],
            latency_p95_ms=times[size],
            throughput=throughput,
        )
        for size, throughput in throughputs.items()
    ]


SHORT, LONG = at(32, {1: 100.0, 4: 160.0, 16: 200.0, 32: 195.0}), at(128, {1: 40.0, 4: 50.0, 16: 48.0, 32: 40.0})


def points_of(measured: list[Point], **objective: Any) -> tuple[list[OperatingPoint], ObjectiveConfig]:
    config = ObjectiveConfig.model_validate(objective)
    shares: dict[int | None, float] = {32: 0.5, 128: 0.5}
    choose = partial(best_at_length, objective=config)
    return list(operating_points(ONE.variant, TO_KEEP, 100, measured, shares, choose)), config


def test_for_throughput_each_length_gets_the_fastest_size_within_the_limit() -> None:
    points, objective = points_of([*SHORT, *LONG], goal="max_throughput")
    best = best_point(points, objective)
    assert (best.batch_size, best.batch_sizes) == (16, {32: 16, 128: 4})
    assert best.throughput == pytest.approx(1 / (0.5 / 200 + 0.5 / 50))
    assert "batches of 16 at length 32, 4 at length 128" in str(best)
    defaults = serving_defaults(best, points, objective)
    assert (defaults.max_batch_size, defaults.preferred_batch_sizes) == (16, (16,))
    assert defaults.max_batch_size_by_length == {32: 16, 128: 4}
    assert defaults.timeout_us == 32_000  # a call takes 80 ms at 80 rows a second; row by row it is 57.1 rows a second
    within, limited = points_of([*SHORT, *LONG], goal="max_throughput", latency_ms=30.0)
    assert best_point(within, limited).batch_sizes == {32: 4, 128: 1}


def test_for_min_latency_each_length_gets_the_largest_size_that_is_about_as_fast() -> None:
    points, objective = points_of([*SHORT, *LONG])
    best = best_point(points, objective)
    assert (best.batch_size, best.batch_sizes) == (1, {})
    defaults = serving_defaults(best, points, objective)
    assert (defaults.max_batch_size, defaults.max_batch_size_by_length) == (32, {32: 32, 128: 16})
    assert (defaults.preferred_batch_sizes, defaults.timeout_us) == ((), 0)


def test_one_size_that_is_best_at_every_length_is_one_point() -> None:
    points, objective = points_of([*LONG, *at(32, {1: 100.0, 4: 160.0, 16: 150.0, 32: 145.0})], goal="max_throughput")
    best = best_point(points, objective)
    assert [point.batch_size for point in points] == [1, 4, 16, 32]
    assert (best.batch_sizes, best.batches) == ({128: 4, 32: 4}, "4")


@pytest.mark.parametrize("goal", ["min_latency", "max_throughput"])
@pytest.mark.parametrize(("long", "sizes"), [({1: 10.0, 4: 12.0}, [1, 4]), ({}, [])])
def test_a_size_that_failed_at_one_length_is_left_out(goal: str, long: dict[int, float], sizes: list[int]) -> None:
    """Long rows run out of memory in calls of a size that is fine for short rows."""
    points, objective = points_of([*SHORT, *at(128, long)], goal=goal)
    assert [point.batch_size for point in points] == sizes
    if points:
        defaults = serving_defaults(best_point(points, objective), points, objective)
        assert (defaults.max_batch_size, defaults.max_batch_size_by_length) == (4, {32: 4, 128: 4})


@pytest.mark.parametrize("goal", ["min_latency", "max_throughput"])
def test_noise_does_not_give_shorter_rows_smaller_calls_than_longer_ones(goal: str) -> None:
    noisy = at(32, {1: 100.0, 4: 90.0, 16: 94.0, 32: 93.0})
    points, _ = points_of([*noisy, *at(128, {1: 40.0, 4: 44.0, 16: 50.0, 32: 40.0})], goal=goal)
    (chosen,) = [point for point in points if point.batch_sizes]
    assert chosen.batch_sizes == {32: 32 if goal == "min_latency" else 16, 128: 16}


def test_cores_are_shared_in_every_even_way() -> None:
    assert concurrencies("cpu", 6) == [Concurrency(6, 1), Concurrency(3, 2), Concurrency(2, 3), Concurrency(1, 6)]


def test_each_engine_takes_the_file_that_it_computes_from() -> None:
    config = CompileConfig(precisions=["fp32", "bf16", "fp16", "int8"], engines=["openvino", "onnxruntime"])
    wanted = requested_variants(config)
    files = {str(variant): variant.file for variant in wanted.variants if variant.device == "cpu"}
    assert files == {
        "openvino fp32": "fp32", "openvino bf16": "fp32", "openvino fp16": "fp32", "openvino int8": "int8",
        "onnxruntime fp32": "fp32", "onnxruntime fp16": "fp16", "onnxruntime int8": "int8",
    }  # fmt: skip
    assert ("onnxruntime", "bf16") in [(reason.engine, reason.precision) for reason in wanted.skipped]


def test_pytorch_is_what_others_are_compared_with_unless_it_is_named() -> None:
    beside = requested_variants(CompileConfig(precisions=["fp32"]))
    assert {variant.engine: variant.baseline for variant in beside.variants if variant.runs_module} == {"torch": True}
    assert beside.exported
    named = requested_variants(CompileConfig(engines=["torch"]))
    assert {(variant.engine, variant.precision, variant.baseline) for variant in named.variants} == {
        ("torch", "fp32", False)
    }
    assert not named.exported
    with refused("variants.none", "compile.engines"):
        requested_variants(CompileConfig(engines=["torch"], precisions=["int8"]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engines": ["openvino"], "precisions": ["fp8"]}, "fp8 needs tensorrt or"),
        ({"engines": ["openvino"], "sparsity": "2-of-4"}, "sparsity 2-of-4 needs tensorrt or"),
        ({"engines": ["openvino"], "workspace_mb": 64}, "workspace_mb 64 needs tensorrt or"),
        ({"targets": ["SM89"]}, "targets"),
        ({"batch_sizes": [1, 1]}, "twice"),
    ],
)
def test_keys_that_do_not_fit_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CompileConfig.model_validate(given)
