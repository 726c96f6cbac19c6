"""Run the measurements that need a GPU: bash benchmarks/gpu/run.sh [--steps NAME …] [--again] [--dry-run]

Each step runs in its own process, within a time limit. ``results.json``, ``RESULTS.md`` and
``logs/STEP.log`` are written after each step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from app.errors import RayloomError
from benchmarks.gpu.bench import Device, default_device, hardware
from benchmarks.gpu.findings import Outcome, Results, Status, read_figures
from benchmarks.gpu.report import figure_line, list_steps, report
from benchmarks.gpu.steps import STEPS, Step
from benchmarks.machine import today, versions

_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parents[1]
_BUDGET_S = 9 * 60
_MIN_S = 10
"""Minimum time left to start a step."""
_PACKAGES = ("torch", "deepspeed", "transformers", "onnxruntime", "numpy", "pydantic")
_CPU_PATIENCE = 4
"""Factor on the limits for a CPU, which compiles and computes slower."""
_MARK = "RAYLOOM_GPU_STEP"
"""The environment variable that marks the processes of a step."""
_LOG_LINES = 12
"""Number of lines to keep from a failed step's log."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps. Return 0 if all that ran passed, 1 if one failed, 2 if the command or the device is wrong."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__)
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="run only these; keep the others in results.json")
    parser.add_argument("--again", action="store_true", help="run only those that have not passed in results.json")
    parser.add_argument("--dry-run", action="store_true", help="list the steps, their limits and their floors")
    parser.add_argument("--card", default="h100", help="with --dry-run: the card for the floors (default: h100)")
    parser.add_argument("--budget", type=float, default=_BUDGET_S, help="total seconds (default: 540)")
    parser.add_argument("--out", type=Path, default=_FOLDER, help="folder for results.json and RESULTS.md")
    given = parser.parse_args(argv)
    if given.dry_run:
        print(list_steps(given.card))
        return 0
    try:
        device = default_device()
        results = _open_results(given.out / "results.json", device, is_new=not (given.again or given.steps))
        chosen = _chosen(results, given.steps, given.again)
    except (RayloomError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    for step in chosen:
        left_s = given.budget - (time.monotonic() - began)
        outcome = run_step(step, device, left_s, given.out / "logs")
        results.add(outcome)
        results.save(given.out / "results.json")
        (given.out / "RESULTS.md").write_text(report(results), encoding="utf-8")
        _print(outcome, time.monotonic() - began)
    return int(any(outcome.status in ("failed", "timed out") for outcome in results.outcomes))


def _open_results(file: Path, device: Device, is_new: bool) -> Results:
    """Return the results of an earlier run on this device, to add steps to, or empty results.

    Raises:
        ValueError: there is no GPU, or the earlier results are of another device.
    """
    fresh = Results(date=today(), device=_device_name(device), card=hardware(device).device.name, versions=_versions())
    if is_new or not file.exists():
        return fresh
    earlier = Results.model_validate_json(file.read_bytes())
    if earlier.device != fresh.device:
        raise ValueError(f"{file} is of {earlier.device}, and this is {fresh.device}: give another folder with --out")
    return fresh.model_copy(update={"outcomes": earlier.outcomes})


def _device_name(device: Device) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "torch finds no GPU here: check the driver, or set DEVICE=cpu to test the script on small models"
        )
    return torch.cuda.get_device_name()


def _chosen(results: Results, names: Sequence[str] | None, is_again: bool) -> list[Step]:
    """Return the steps to run, the most valuable first. Raises ValueError for an unknown name."""
    known = [step.name for step in STEPS]
    if unknown := set(names or ()) - set(known):
        raise ValueError(f"no step is called {', '.join(sorted(unknown))}: the steps are {', '.join(known)}")
    passed = {outcome.step for outcome in results.outcomes if outcome.status == "passed"} if is_again else set()
    return [step for step in STEPS if step.name in (names or known) and step.name not in passed]


def run_step(step: Step, device: Device, left_s: float, logs: Path) -> Outcome:
    """Run a step within its limit and the time left, and return its outcome. The log is kept in ``logs``."""
    limit_s = min(step.limit_s * (_CPU_PATIENCE if device == "cpu" else 1), left_s)
    if step.needs_gpu and device == "cpu":
        return Outcome(step=step.name, status="not run", reason="needs a GPU")
    if limit_s < _MIN_S:
        return Outcome(step=step.name, status="not run", reason="no time was left")
    began = time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{step.name}.log"
    with tempfile.TemporaryDirectory(prefix="rayloom-gpu-") as folder:
        figures = Path(folder) / "figures.jsonl"
        command = [sys.executable, "-m", "benchmarks.gpu.step", step.measure, json.dumps(step.options), str(figures)]
        status = _wait(command, device, limit_s, log)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        reason = f"killed after {limit_s:.0f} s\n" if status == "timed out" else ""
        return Outcome(
            step=step.name,
            status=status,
            seconds=time.monotonic() - began,
            figures=read_figures(figures),
            reason="" if status == "passed" else reason + "\n".join(lines[-_LOG_LINES:]),
        )


def _wait(command: Sequence[str], device: Device, limit_s: float, log: Path) -> Status:
    """Run ``command`` with its output in ``log``. Kill it at the limit. Always kill what it leaves running."""
    settings = {"DEVICE": device, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", _MARK: str(log)}
    with log.open("wb") as output:
        environment = os.environ | settings
        process = subprocess.Popen(command, cwd=_ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            return "failed" if process.wait(limit_s) else "passed"
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            # Also kill compilers and ranks, which would disturb the next step. Some have their own session.
            for left in psutil.process_iter():
                with suppress(psutil.Error):
                    if left.environ().get(_MARK) == str(log):
                        left.kill()
            process.wait()


def _print(outcome: Outcome, elapsed_s: float) -> None:
    """Print one line for the step and one for each figure."""
    print(f"{elapsed_s:5.0f} s  {outcome.step}: {outcome.status} after {outcome.seconds:.0f} s", flush=True)
    for figure in outcome.figures:
        print(f"         {figure_line(figure)}", flush=True)
    for line in outcome.reason.splitlines():
        print(f"         | {line}", flush=True)


def _versions() -> str:
    return versions([package for package in _PACKAGES if _is_installed(package)])


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
