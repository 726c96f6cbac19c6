"""A project that ``rayloom init`` writes, and folders that jobs can be submitted from."""

import sys
from pathlib import Path

import pytest

from app.cluster.packages import LIBRARY, PACKAGES, known_jobs, runtime_env
from app.config import load_recipe
from app.project.scaffold import create_project
from tests.helpers import ROOT, run
from tests.wording import refused

JOBS = ["compile", "deploy", "lifecycle", "plan", "prepare", "train", "tune", "undeploy"]


def test_a_new_project_passes_its_own_test_also_on_another_file(tmp_path: Path) -> None:
    created = run("rayloom", "init", "tickets", folder=tmp_path)
    assert created.returncode == 0, created.stderr
    files = [Path(line) for line in created.stdout.splitlines()[:-1]]
    assert {file.suffix for file in files} >= {".py", ".yaml", ".csv", ".md", ".toml"}
    assert not [file for file in files if "my_project" in f"{file}{(tmp_path / file).read_text(encoding='utf-8')}"]
    project = tmp_path / "tickets"
    assert load_recipe(project / "recipes/tickets.yaml").name == "tickets"
    (project / "data/examples.csv").rename(project / "data/own.csv")
    recipe = project / "recipes/tickets.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("data/examples.csv", "data/own.csv"), encoding="utf-8")
    tested = run(sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", folder=project)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "2 passed" in tested.stdout


@pytest.mark.parametrize("name", ["My_project", "my-project", "2nd", "class", "torch", "app", "data"])
def test_a_name_that_python_would_not_import_is_refused(name: str, tmp_path: Path) -> None:
    with refused("project.name_taken" if name in ("torch", "app", "data") else "project.name"):
        create_project(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_files_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)  # as 'rayloom' does with the current folder
    (tmp_path / "tickets").mkdir()
    (tmp_path / "tickets/notes.txt").touch()
    with refused("folder.taken"):
        create_project(tmp_path / "tickets")
    assert [file.name for file in tmp_path.rglob("*")] == ["tickets", "notes.txt"]


def test_any_folder_can_submit_every_job(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()  # it holds no modules, so it hides none
    assert known_jobs(tmp_path) == known_jobs(ROOT) == JOBS


@pytest.mark.parametrize("file", ["app.py", "app/__init__.py", "jobs/nightly.py"])
def test_a_folder_with_a_package_of_rayloom_s_name_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with refused("package.name_taken"):
        known_jobs(tmp_path)


def test_rayloom_is_sent_with_a_project_to_a_cluster_that_lacks_it(tmp_path: Path) -> None:
    sent = runtime_env(str(tmp_path), has_rayloom=False)
    assert sent["working_dir"] == str(tmp_path)
    assert sent["py_modules"] == [str(LIBRARY / name) for name in PACKAGES]
    assert runtime_env(str(tmp_path), has_rayloom=True) == {"working_dir": str(tmp_path)}
    assert runtime_env(str(ROOT), has_rayloom=False) == {"working_dir": str(ROOT)}, "a checkout holds them already"
