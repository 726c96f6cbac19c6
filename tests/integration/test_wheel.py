"""The wheel, installed where no checkout can be seen."""

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from site import getsitepackages

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of what git tracks: a build in place would pick up files of earlier ones."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", folder]
    command = [sys.executable, "-m", "pip", "wheel", *map(str, options), str(folder / "source")]
    subprocess.run(command, check=True, timeout=300)
    (built,) = folder.glob("rayloom-*.whl")
    return built


def test_the_wheel_has_all_that_the_packages_need_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    needed = {"app/py.typed", "app/serving/transport/page.html", "jobs/train.py", "serve_deployments/model_server.py"}
    template = {"gitignore", "data/examples.csv", "my_project/models.py", "recipes/my_project.yaml"}
    assert needed | {f"app/project/template/{name}" for name in template} <= names
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"app", "jobs", "monitoring", "serve_deployments", "tune_spaces"}
    assert {f"{path.relative_to(ROOT)}" for path in (ROOT / "app").rglob("*") if _belongs(path)} <= names
    assert "License-Expression: Apache-2.0" in text


def _belongs(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment in which Rayloom is installed from the wheel.

    Its dependencies are read from this environment, to save minutes.
    """
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=False)
    (site,) = (home / "lib").glob("python*/site-packages")
    install = ["install", "--quiet", "--no-deps", "--disable-pip-version-check", str(wheel)]
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), *install]
    subprocess.run(command, check=True, timeout=120)
    # Folders that are added this way have no .pth files read, so the editable install of the checkout has no effect.
    (site / "dependencies.pth").write_text("\n".join(getsitepackages()), encoding="utf-8")
    return home


def run(*command: str, folder: Path) -> str:
    """Run a command that must succeed, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_installed_rayloom_starts_a_project_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    code = "import app, jobs, serve_deployments, tune_spaces; print(app.__file__, jobs.__file__)"
    (site,) = (installed / "lib").glob("python*/site-packages")
    where = run(str(installed / "bin/python"), "-c", code, folder=tmp_path)
    assert where.split() == [str(site / "app/__init__.py"), str(site / "jobs/__init__.py")]
    rayloom = str(installed / "bin/rayloom")
    assert "submit" in run(rayloom, "--help", folder=tmp_path)
    run(rayloom, "init", "tickets", folder=tmp_path)
    shown = run(rayloom, "recipes", "show", "recipes/tickets.yaml", folder=tmp_path / "tickets")
    assert "factory: tickets.models:net" in shown


@pytest.mark.slow
def test_a_project_of_an_installed_rayloom_passes_its_own_tests(installed: Path, tmp_path: Path) -> None:
    run(str(installed / "bin/rayloom"), "init", "tickets", folder=tmp_path)
    tested = run(str(installed / "bin/python"), "-m", "pytest", "--quiet", folder=tmp_path / "tickets")
    assert "2 passed" in tested


def test_serving_and_submitting_need_nothing_of_the_training_extra() -> None:
    modules = "serve_deployments.model_server, app.engines.onnxruntime, app.engines.openvino, jobs.deploy, app.cli.main"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = {Requirement(text).name for text in project["optional-dependencies"]["train"]} - {"ray"}
    missing = sorted(name for name, homes in packages_distributions().items() if extra & set(homes))
    assert {"torch", "deepspeed", "optuna", "onnx"} <= {*missing}
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import {modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
