"""Profiles of training steps: where the time went, and that training goes on whatever happens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from upath import UPath

from app.config import ProfileConfig
from app.telemetry.profiler import profile_steps
from app.telemetry.step_time import Phase, StepTime, phase, read_step_time

CONFIG = ProfileConfig(wait=1, warmup=1, active=2)


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> UPath:
    return UPath(tmp_path / "run" if request.param == "local" else f"memory://{tmp_path}/run")


def train(
    steps: int, folder: UPath, config: ProfileConfig | None = CONFIG, rank: int = 0, fail_at: int | None = None
) -> None:
    """Train as the loop does, with an exchange in the backward pass."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile_steps(config, folder, rank) as profiler:
        for step in range(steps):
            if step == fail_at:
                raise IndexError
            with phase(Phase.DATA):
                inputs = torch.randn(32, 64)
            with phase(Phase.FORWARD):
                loss = model(inputs).square().mean()
            with phase(Phase.BACKWARD):
                loss.backward()
                if distributed.is_initialized():
                    distributed.all_reduce(model.weight.grad)
            with phase(Phase.OPTIMIZER):
                optimizer.step()
            profiler.step()


def shares(time: StepTime) -> list[float]:
    return [time.compute, time.communication, time.data, time.optimizer, time.other]


@pytest.mark.usefixtures("_process_group")
def test_a_run_leaves_its_trace_and_where_its_time_went(folder: UPath, capsys: pytest.CaptureFixture[str]) -> None:
    train(5, folder)
    trace = json.loads((folder / "profile/rank0.pt.trace.json").read_bytes())
    names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert names >= {*Phase, "gloo:all_reduce", "ProfilerStep#2", "ProfilerStep#3"}
    time = StepTime.model_validate_json((folder / "profile/summary.json").read_bytes())
    assert (time.worker, time.steps) == (0, 2)
    assert sum(shares(time)) == pytest.approx(1)
    assert min(shares(time)) > 0
    assert f"profiled {time}; in {folder}/profile\n" in capsys.readouterr().out


def test_every_worker_leaves_a_trace_and_the_first_the_summary(folder: UPath) -> None:
    train(4, folder, rank=1)
    assert [file.name for file in (folder / "profile").iterdir()] == ["rank1.pt.trace.json"]


def test_no_profile_is_made_unasked(folder: UPath) -> None:
    train(4, folder, config=None)
    assert not (folder / "profile").exists()


def test_what_a_short_run_had_is_kept(folder: UPath, capsys: pytest.CaptureFixture[str]) -> None:
    train(3, folder)
    assert StepTime.model_validate_json((folder / "profile/summary.json").read_bytes()).steps == 1
    train(2, UPath(folder / "shorter"))
    assert not (folder / "shorter").exists()
    assert "no step was profiled: there were 2, and train.profile begins after 2" in capsys.readouterr().err


def test_training_goes_on_when_storage_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a folder")
    train(5, UPath(tmp_path / "file"))
    output = capsys.readouterr()
    assert "profiled 2 steps" in output.out
    assert "rank0.pt.trace.json' cannot be written" in output.err
    assert output.err.count("training goes on") == 2


def test_an_error_of_training_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        train(4, UPath(tmp_path), fail_at=3)
    assert (tmp_path / "profile/summary.json").exists()


def span(category: str, name: str, start: float, end: float, thread: int = 1, **arguments: int) -> dict[str, Any]:
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": arguments}


def mark(name: Phase, start: float, end: float) -> dict[str, Any]:
    return span("user_annotation", name.value, start, end)


def time_of(*events: dict[str, Any]) -> StepTime:
    step = span("user_annotation", "ProfilerStep#7", 0, 100)
    return read_step_time(json.dumps({"traceEvents": [step, *events]}).encode(), worker=0, steps=1)


def test_the_shares_of_a_cpu_by_hand() -> None:
    time = time_of(
        mark(Phase.BACKWARD, 0, 80),
        span("cpu_op", "aten::mm", 0, 30),
        span("cpu_op", "c10d::allreduce_", 30, 32),
        span("user_annotation", "gloo:all_reduce", 31, 60, thread=2),
        span("cpu_op", "aten::view", 33, 34, thread=2),  # Gloo's own work
        span("cpu_op", "aten::mm", 50, 70),  # hides the end of the exchange
    )
    assert shares(time) == pytest.approx([0.6, 0.2, 0, 0, 0.2])
    assert time.hidden_communication == pytest.approx(0.1)
    assert time.step_ms == 0.1


def test_the_shares_of_a_gpu_by_hand() -> None:
    time = time_of(
        *(mark(Phase.DATA, 0, 10), mark(Phase.FORWARD, 10, 30), mark(Phase.BACKWARD, 30, 60)),
        mark(Phase.OPTIMIZER, 60, 80),
        span("cuda_runtime", "cudaLaunchKernel", 12, 13, correlation=1),
        span("kernel", "sgemm", 15, 40, thread=7, correlation=1),
        span("cuda_runtime", "cudaLaunchKernel", 35, 36, thread=3, correlation=2),  # from autograd's thread
        span("kernel", "sgemm", 45, 70, thread=7, correlation=2),  # while the process is at the optimizer
        span("cuda_runtime", "cudaLaunchKernelExC", 50, 51, thread=3, correlation=3),
        span("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 60, 85, thread=8, correlation=3),
        span("cuda_driver", "cuLaunchKernel", 65, 66, correlation=4),
        span("kernel", "adamw", 80, 95, thread=7, correlation=4),  # while the process is at nothing
    )
    assert shares(time) == pytest.approx([0.6, 0.1, 0.1, 0.15, 0.05])
    assert time.hidden_communication == pytest.approx(0.15)


def test_a_trace_without_its_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="the trace has 1 steps, expected 2"):
        read_step_time(
            json.dumps({"traceEvents": [span("user_annotation", "ProfilerStep#1", 0, 1)]}).encode(), worker=0, steps=2
        )
