"""What the training benchmark says of what it measured."""

import time
from pathlib import Path

import pytest
from upath import UPath

from app.telemetry.memory import MemoryRecord
from app.telemetry.mirror import Mirror
from app.telemetry.tensorboard import TensorBoardLog
from app.training.records import StepRecord
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
    trial = read_run(tmp_path, launched=0.0)
    assert list(trial.ends) == [1, 3, 6]
    assert trial.ends[1] < trial.ends[3] < trial.ends[6]
    assert trial.losses == {step: float(step) for step in range(1, 7)}


def test_contenders_are_compared_round_by_round_and_to_hold_less_misses_the_goal() -> None:
    losses = dict.fromkeys(range(1, 31), 4.0)
    peer = Trial(launched=0.0, ends={step: 10.0 + step for step in range(1, 31)}, losses=losses)
    ours = [Trial(5.0, {1: 25.0, 11: 100.0, 12: 101.0, 30: 100.0 + seconds}, losses) for seconds in (19.0, 38.0)]
    rounds = tuple({"torchrun": peer, "accelerate": peer, "Rayloom": each, "Rayloom on Ray": peer} for each in ours)
    found = Comparison(CASES[0], preparation_s=9.0, rounds=rounds)
    assert found.speed_ratio("torchrun").values == pytest.approx((1.0, 0.5))
    assert found.speed_ratio("torchrun").median == pytest.approx(0.75)
    assert found.start_ratio("torchrun").median == pytest.approx(20.0 / 11.0)
    assert found.start_ratio_prepared("torchrun").median == pytest.approx(1.0)
    holdings = [
        Holding(stage=1, workers=4, accumulation=1, held=Bytes(2.0, 0.6, 3.0), other_bytes=0),
        Holding(stage=3, workers=2, accumulation=1, held=Bytes(1.0, 1.0, 6.0), other_bytes=0),
        Holding(stage=3, workers=2, accumulation=2, held=Bytes(1.0, 1.0, 6.0), other_bytes=0),
    ]
    text = report(Findings([found], holdings, "torch 2.13", load_before="0.1", load_after="0.1", minutes=1.0))
    assert "| steps/s after start-up / the best peer's | ≥ 0.97 | 0.750 | **missed** |" in text
    assert "| the same as a job on a Ray cluster | ≥ 0.97 | 1.000 | reached |" in text
    assert "| within 10% | -20.0% (ZeRO 1 on 4) to +0.0% (ZeRO 3 on 2) | **missed** |" in text


def _record(step: int, rate: float) -> StepRecord:
    return StepRecord(
        step=step, epoch=1, loss=float(step), lr=0.1, grad_norm=1.0, samples_per_s=rate, data_stall=0.0,
        memory=MemoryRecord(peak_bytes=1),
    )  # fmt: skip
