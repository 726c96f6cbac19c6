"""What training does not import or start, and that it trains as with those imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, losses, result_of, train_alone

UNUSED = {"boto3", "httpx", "optuna", "ray", "torch._dynamo", "torch._inductor", "transformers"}
TRAIN = """
import resource, sys
from pathlib import Path
from app.training.__main__ import main
assert main(sys.argv[2:]) == 0
imported = {*sys.argv[1].split()} & {*sys.modules}
assert not imported, imported
threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
assert "pt_gloo_runloop" not in threads or "train.plan.zero_stage=3" in sys.argv, threads

import torch
def pages_taken_by(blocks, size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [torch.ones(size) for _ in range(blocks)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for blocks, size in 12 * [(4, 2**22)] + 4 * [(8, 2**20)]:
    pages_taken_by(blocks, size)
taken = pages_taken_by(4, 2**22)
assert taken < 1000, f"{taken} pages were returned to the system"
"""


@pytest.mark.parametrize(("stage", "optimizer"), [pytest.param(3, "adamw", marks=pytest.mark.slow), (0, "sgd")])
def test_training_imports_what_it_uses_keeps_freed_memory_and_leaves_no_thread(
    stage: int, optimizer: str, tmp_path: Path
) -> None:
    plan = [f"train.plan.zero_stage={stage}", f"train.optimizer.name={optimizer}"]
    settings = [*plan, "train.max_steps=3", f"storage={tmp_path}"]
    command = [sys.executable, "-c", TRAIN, " ".join(UNUSED), "recipes/digits.yaml", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with_compiler = train_alone(*settings, processes=0)
    assert losses(result_of(done.stdout)) == losses(with_compiler)


def test_the_controller_of_a_run_imports_neither_torch_nor_the_library() -> None:
    code = "import sys, app.training.ray_trainer; assert not {'torch', 'app.config', 'app.runs'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
