"""The page on training over slow networks."""

from benchmarks.network.cases import CASES, LOSS_CASES, PLAIN, RATES, Case, Rate
from benchmarks.network.machines import Measured
from benchmarks.network.plot import lines
from benchmarks.network.predicted import Predictions, sent_bytes
from benchmarks.network.report import LOSS, REDUCTIONS, Findings, report


class Fixed(Predictions):
    """Predicts a second for every step."""

    def step_s(self, case: Case, rate: Rate) -> float:
        return 1.0


def findings(powersgd_s: float) -> Findings:
    """Two rounds, in which PowerSGD takes ``powersgd_s`` a step, and everything else 10 s."""
    round_ = [
        Measured(name, powersgd_s if case.plan.get("powersgd") else 10.0, round(sent_bytes(case)), None)
        for name, case in CASES.items()
    ]
    once = [Measured(name, 1.0, 1, 2.5) for name in LOSS_CASES]
    reductions = [Measured("", 1.0, 1, None)] * 2 * len(RATES)
    found = {rate.name: [round_, round_] for rate in RATES} | {LOSS: [once], REDUCTIONS: [reductions]}
    return Findings(found, "a machine", Fixed())


def test_the_page_says_whether_compression_reaches_its_goal() -> None:
    goal = "| PowerSGD, rank 4: steps/s at 20 Mbit/s / without compression | ≥ 5 |"
    assert f"{goal} 10.0 | reached |" in report(findings(1.0))
    assert f"{goal} 4.0 | **missed** |" in report(findings(2.5))


def test_the_planner_counts_what_each_case_sends() -> None:
    plain = sent_bytes(PLAIN)
    assert sent_bytes(CASES["ZeRO 0, gradients as bf16"]) == plain / 2
    assert sent_bytes(CASES["ZeRO 1"]) == 1.5 * plain
    assert sent_bytes(CASES["PowerSGD, rank 4"]) < plain / 20


def test_the_picture_has_a_line_for_each_case() -> None:
    drawn = lines([rate.name for rate in RATES], findings(1.0).steps_per_s())
    assert drawn.count("<polyline") == len(CASES)
    assert all(f">{name}</text>" in drawn for name in CASES)
