"""What the training benchmark says of what it measured."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from upath import UPath

from app.telemetry.mirror import Mirror
from app.telemetry.record import MemoryRecord
from app.telemetry.tensorboard import TensorBoardLog
from app.training.records import StepRecord
from benchmarks.machine import Conditions, CpuUse
from benchmarks.training.cases import CASES
from benchmarks.training.contenders import Trial, read_run
from benchmarks.training.memory import Bytes, Holding, paper
from benchmarks.training.report import Findings, report
from benchmarks.training.throughput import Comparison


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_bytes_held_are_those_of_the_papers_first_figure(stage: int, gigabytes: float) -> None:
    assert 7.5 * paper(stage, workers=64).total == pytest.approx(gigabytes, abs=0.05)


def test_a_run_tells_when_the_last_step_of_each_exchange_ended(tmp_path: Path) -> None:
    log = TensorBoardLog(Mirror(UPath(tmp_path)), first_step=1)
    for rate, exchanged in ((4.0, (1,)), (5.0, (2, 3)), (6.0, (4, 5, 6))):
        time.sleep(0.01)
        log.append(*(_record(step, rate) for step in exchanged))
    log.close()
    trial = read_run(tmp_path, launched=0.0, cpu=CpuUse())
    assert list(trial.ends) == [1, 3, 6]
    assert trial.ends[1] < trial.ends[3] < trial.ends[6]
    assert trial.losses == {step: float(step) for step in range(1, 7)}


def test_contenders_are_compared_round_by_round() -> None:
    losses = dict.fromkeys(range(1, 31), 4.0)
    half_a_core = CpuUse([0.0, 200.0], [0.0, 100.0])
    peer = Trial(launched=0.0, ends={step: 10.0 + step for step in range(1, 31)}, losses=losses, cpu=half_a_core)
    ours = [
        Trial(5.0, {1: 25.0, 11: 100.0, 12: 101.0, 30: 100.0 + seconds}, losses, half_a_core)
        for seconds in (19.0, 38.0)
    ]
    on_ray = replace(peer, second_start_s=22.0)
    rounds = tuple({"torchrun": peer, "accelerate": peer, "Rayloom": our, "Rayloom on Ray": on_ray} for our in ours)
    found = Comparison(CASES[0], preparation_s=9.0, rounds=rounds)
    assert found.speed_ratio("torchrun").values == pytest.approx((1.0, 0.5))
    assert found.speed_ratio("torchrun").median == pytest.approx(0.75)
    assert found.cpu_ratio("torchrun").values == pytest.approx((1.0, 2.0))
    assert found.start_ratio("torchrun").median == pytest.approx(20.0 / 11.0)
    assert found.start_ratio_prepared("torchrun").median == pytest.approx(1.0)
    assert found.second_start_ratio("torchrun").median == pytest.approx(2.0)
    holdings = [
        Holding(stage=1, workers=4, accumulation=1, held=Bytes(2.0, 0.6, 3.0), other_bytes=0),
        Holding(stage=3, workers=2, accumulation=1, held=Bytes(1.0, 1.0, 6.0), other_bytes=0),
        Holding(stage=1, workers=2, accumulation=2, held=Bytes(2.0, 6.0, 6.0), other_bytes=0),
    ]
    text = report(Findings([found], holdings, "torch 2.13", Conditions()))
    assert "| steps/s / the best peer's | ≥ 0.99 | 0.750 | **missed** |" in text
    assert "| steps/s as a job on Ray / the best peer's | ≥ 0.97 | 1.000 | reached |" in text
    assert "| CPU seconds a step / the best peer's | ≤ 0.97 | 1.500 | **missed** |" in text
    assert "| the same as the second job from the same folder | ≤ 2.5 | 2.000 | reached |" in text
    assert "| ≤ +2% | +0.0% (ZeRO 3 on 2) | reached |" in text
    assert "| ≤ +2% | +16.7% (ZeRO 1 on 2) | **missed** |" in text


def _record(step: int, rate: float) -> StepRecord:
    return StepRecord(
        step=step, epoch=1, loss=float(step), lr=0.1, grad_norm=1.0, samples_per_s=rate, step_s=0.1, data_stall=0.0,
        memory=MemoryRecord(peak_bytes=1),
    )  # fmt: skip
