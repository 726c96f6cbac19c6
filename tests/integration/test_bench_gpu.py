"""The GPU script on a CPU with small models, in an environment like a bare GPU machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.findings import Results
from benchmarks.gpu.pretraining import SMALL
from benchmarks.gpu.steps import STEPS
from tests.helpers import ROOT, in_fork

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gpu kit")]
_ON_THE_MACHINE = (
    *("torch", "transformers", "accelerate", "peft", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "safetensors"),
    *("tokenizers", "pandas", "pyarrow", "scikit-learn", "fsspec", "tensorboard", "pillow", "psutil", "nvidia-ml-py"),
    *("jinja2", "httpx", "typer", "prometheus-client", "pytest"),
)
"""The packages that the script's README.md requires."""


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "-m", "benchmarks.gpu.kit", str(folder), "--python", python]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without Ray, DeepSpeed, pydantic and the other packages that only the kit contains."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, *_ON_THE_MACHINE], check=True)
    return folder / "bin/python"


def test_every_step_runs_with_what_the_kit_brings(kit: Path, bare_python: Path, tmp_path: Path) -> None:
    script = kit / "rayloom/benchmarks/gpu/run.sh"
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DEVICE": "cpu", "PYTHON": str(bare_python)}
    command = ["bash", str(script), "--out", str(tmp_path), "--budget", "1500"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    results = Results.model_validate_json((tmp_path / "results.json").read_bytes())
    ended = {outcome.step: outcome.status for outcome in results.outcomes}
    on_cpu = {step.name: "not run" if step.needs_gpu else "passed" for step in STEPS}
    assert ended == on_cpu, json.dumps([outcome.reason for outcome in results.outcomes]) + done.stderr
    assert done.returncode == 0
    figures = {figure.name: figure for outcome in results.outcomes for figure in outcome.figures}
    assert figures["reviews: largest difference of losses, resumed"].value == 0.0
    assert figures["digits: largest difference of losses, resumed"].value == 0.0
    page = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "| gpt_350m-fp16 | training in fp16 finds its loss scale | **not run** |" in page


def test_the_command_for_several_gpus_prints_a_row_for_each_recipe() -> None:
    recipes = ("benchmarks/gpu/gpt_350m.yaml", "benchmarks/gpu/gpt_1_3b.yaml")
    options = (*SMALL, "train.torch_compile=false", "--warm-up=1", "--steps=2")
    done = in_fork("benchmarks.gpu.pretraining", *recipes, *options, processes=2)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("gpt_")]
    assert [row[0] for row in rows] == ["gpt_350m", "gpt_1_3b"], done.stderr
    assert all(row[5] != "unknown" for row in rows), "the model's operations were not counted"
