"""A model with more weights than protobuf takes, from a run's weights to a replica. It needs 15 GB of disk."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from upath import UPath

from app.repository.repository import Repository
from tests.helpers import ROOT
from tests.large_models import random_run, shaped
from tests.tables import Tables

GIB = 2**30
WIDTH, LAYERS = 9856, 6
SERVE = """
import sys
from upath import UPath
from app.published.loaded import load_model
model = load_model(UPath(sys.argv[1]), "digits", 1, threads=2)
print(model.platform)
"""


def peaks(folder: Path, *command: str) -> tuple[int, int]:
    """Run Python; return the peak of its resident memory without mapped files, and of all of it, in bytes."""
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment)
    anonymous = whole = 0
    while process.poll() is None:
        anonymous, whole = max(anonymous, _field(process.pid, "RssAnon")), max(whole, _field(process.pid, "VmHWM"))
        time.sleep(0.02)
    assert process.returncode == 0
    return anonymous, whole


def _field(pid: int, name: str) -> int:
    """Return a size in bytes from a process's status; 0 if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "torch"])
def test_a_model_of_more_than_2_gib_is_published_and_served(engine: str, folder: Path, tables: Tables) -> None:
    weights = random_run(folder, WIDTH, LAYERS)
    size = (weights / "model.safetensors").stat().st_size
    assert size > 2.1 * GIB
    overrides = [f"storage={folder}", f"compile.weights={weights}", "compile.batch_sizes=[1]", *shaped(WIDTH, LAYERS)]
    compiling = ["-m", "app.compile", "recipes/digits.yaml", *overrides, "compile.precisions=[fp32]"]
    compiled = peaks(folder, *compiling, f"compile.engines=[{engine}]")
    manifest = Repository(UPath(folder)).manifest("digits", 1)
    assert manifest.has_shards is (engine != "torch")
    served = peaks(folder, "-c", SERVE, str(folder))
    rows = [
        [engine, step, f"{anonymous / size:.2f}", f"{whole / size:.2f}"]
        for step, (anonymous, whole) in (("compile", compiled), ("serve", served))
    ]
    tables.add(
        f"Peak memory as a share of {size / GIB:.2f} GiB of weights", ["engine", "step", "its own", "with files"], rows
    )
    assert max(compiled[0], served[0]) < 1.5 * size
