"""The runner of the GPU script: steps that fail or hang, and the reports on them."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.config import load_recipe
from app.planner.cluster import cluster_of
from benchmarks.gpu.__main__ import main, run_step
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.findings import Figure, Outcome, Results
from benchmarks.gpu.floors import Floor, training_floor
from benchmarks.gpu.pretraining import predict
from benchmarks.gpu.report import report
from benchmarks.gpu.steps import STEPS, Step
from tests.helpers import ROOT, wait_until

HERE = "tests.unit.benchmarks.test_bench_gpu"


def leave_a_child_and_hang(bench: Bench, mark: str) -> None:
    bench.figure("before", 1.5, "ms")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", mark], start_new_session=True)
    time.sleep(600)


def fail(bench: Bench) -> None:
    bench.figure("before", 1.5, "ms")
    raise RuntimeError("the card fell off the bus")


@pytest.fixture(autouse=True)
def _kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT", str(tmp_path))
    monkeypatch.setenv("DEVICE", "cpu")


def test_a_step_that_hangs_is_killed_with_its_children_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hasty(subprocess.Popen[bytes]):
        """Its limit comes as soon as it hangs, however long this machine needs until then."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            assert timeout == 12
            wait_until(lambda: any(str(tmp_path) in _words(child) for child in psutil.Process(self.pid).children()))
            return super().wait(0.1)

    monkeypatch.setattr(subprocess, "Popen", Hasty)
    step = Step("hangs", "", f"{HERE}:leave_a_child_and_hang", limit_s=60, options={"mark": str(tmp_path)})
    outcome = run_step(step, "cpu", left_s=12, logs=tmp_path)
    assert outcome.status == "timed out"
    assert outcome.figures == [Figure(name="before", value=1.5, unit="ms")]
    assert outcome.reason.startswith("killed after 12 s")
    assert not [process for process in psutil.process_iter() if str(tmp_path) in _words(process)]


def test_a_step_that_fails_says_why_and_keeps_its_figures(tmp_path: Path) -> None:
    outcome = run_step(Step("fails", "", f"{HERE}:fail", limit_s=60), "cpu", left_s=100, logs=tmp_path)
    assert (outcome.status, [figure.name for figure in outcome.figures]) == ("failed", ["before"])
    assert outcome.reason.endswith("RuntimeError: the card fell off the bus")
    assert "Traceback" in (tmp_path / "fails.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("needs_gpu", "left_s", "reason"), [(True, 100, "needs a GPU"), (False, 3, "no time was left")]
)
def test_a_step_that_cannot_run_is_not_begun(needs_gpu: bool, left_s: float, reason: str, tmp_path: Path) -> None:
    step = Step("waits", "", f"{HERE}:fail", limit_s=60, needs_gpu=needs_gpu)
    assert run_step(step, "cpu", left_s, tmp_path) == Outcome(step="waits", status="not run", reason=reason)


def test_the_steps_are_listed_with_their_limits_and_floors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--card", "h100"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{step.limit_s:4d} s  {step.name}: " in listed for step in STEPS)
    # 6 N operations for each of 65,536 tokens, plus attention, at 989.4 TFLOP/s.
    assert "a step takes at least 180 ms on h100" in listed


def test_a_floor_is_the_larger_of_both_times() -> None:
    device = cluster_of("1xh100").device
    assert Floor(operations=989.4e12, nbytes=1.0).seconds(device, "bf16") == pytest.approx(1.0)
    assert Floor(operations=1.0, nbytes=3350e9).seconds(device, "bf16") == pytest.approx(1.0)


def test_the_planner_predicts_a_step_above_its_floor_in_the_memory_of_the_card() -> None:
    recipe, cluster = load_recipe("benchmarks/gpu/gpt_350m.yaml", ["train.torch_compile=false"]), cluster_of("1xh100")
    predicted = predict(recipe, cluster)
    assert predicted is not None
    floor_s = training_floor(recipe).seconds(cluster.device, "bf16")
    assert floor_s < predicted.step_s < 6 * floor_s
    # 353 million parameters: 2 bytes each, 4 for gradients, and 12 for Adam.
    assert predicted.memory.states == pytest.approx(353e6 * 18, rel=0.02)


def test_an_unknown_step_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--steps", "machines", "--out", str(tmp_path)]) == 2
    assert "no step is called machines: the steps are machine, gpt_1_3b-zero1-compiled" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_results_of_another_device_are_not_mixed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    earlier = Results(date="2026-11-28", device="NVIDIA H200", card="h200", versions="torch 2.11.0")
    earlier.save(tmp_path / "results.json")
    assert main(["--again", "--out", str(tmp_path)]) == 2
    assert "results.json is of NVIDIA H200, and this is cpu" in capsys.readouterr().err


def test_the_page_names_failed_steps_and_missed_goals() -> None:
    results = Results(date="2026-11-28", device="NVIDIA H200", card="h200", versions="torch 2.11.0")
    slow = Figure(name="MFU", value=0.41, reference=0.5, source="goal", reached=False)
    results.add(Outcome(step="gpt_1_3b-zero1-compiled", status="failed", seconds=4, reason="an earlier run"))
    results.add(Outcome(step="gpt_1_3b-zero1-compiled", status="passed", seconds=61, figures=[slow]))
    results.add(Outcome(step="float32", status="failed", seconds=3, reason="line one\nline | two"))
    page = report(results)
    assert "| gpt_1_3b-zero1-compiled | an MFU of 0.50 or more | passed, **1 missed** | 61 |" in page
    assert "| MFU | 0.41 | 0.5 (goal) | 0.82 | **missed** |" in page
    assert "| float32 | without TF32 the device holds the gate of fp32 | **failed** | 3 |" in page
    assert "    line one\n    line | two" in page
    assert "| machine | the card reaches its data sheet | not run |  |" in page
    assert "an earlier run" not in page


@pytest.mark.slow
def test_the_tests_for_a_gpu_are_collected_without_what_its_machine_lacks() -> None:
    lacking = ["ray", "optuna", "openvino", "selenium", "psycopg", "sqlalchemy", "moto", "fastapi", "grpc", "uvicorn"]
    collect = "pytest.main(['--collect-only', '--quiet', '-p', 'no:cacheprovider', 'tests/gpu'])"
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking})); import pytest; sys.exit({collect})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_plans_learn_the_digits" in done.stdout


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
