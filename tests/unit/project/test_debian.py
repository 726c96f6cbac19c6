"""Debian packages in tests: a mark names them, a missing one skips the test, and a watch finds undeclared uses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.debian import README, TESTS, Packages
from tests.helpers import ROOT

STATUS = """\
Package: libc6
Priority: required
Status: install ok installed

Package: make
Status: install ok installed
Depends: libmake (>= 1.0) | other-make:any, libc6

Package: libmake0
Status: install ok installed
Provides: libmake (= 1.0)

Package: drawing
Status: install ok installed
Depends: drawing-data

Package: drawing-data
Status: install ok installed

Package: gone
Status: deinstall ok config-files
"""
CONFTEST = """\
import re
from pathlib import Path
import tests.debian as debian
debian.PACKAGES, debian.TESTS = debian.Packages(Path(__file__).parent / "dpkg"), ["drawing", "gone"]
debian._SYSTEM = re.compile(re.escape(str(Path(__file__).parent / "usr")))
from tests.debian import pytest_runtest_setup, pytest_runtest_teardown
"""
TEST = """\
import subprocess
from pathlib import Path
import pytest
FOLDER = Path(__file__).parent / "usr"

def test_promised(): (FOLDER / "make").read_text()
def test_read(): (FOLDER / "data").read_text()
def test_started(): subprocess.run([FOLDER / "draw"], check=True)
def test_started_by_name(monkeypatch):
    monkeypatch.setenv("PATH", f"{FOLDER}:/bin")
    subprocess.run(["draw"], check=True)
def test_linked(): (FOLDER / "link").read_text()
@pytest.mark.debian("drawing")
def test_named(): (FOLDER / "data").read_text()
@pytest.mark.debian("gone")
def test_missing(): raise AssertionError
@pytest.mark.debian("never")
def test_unknown(): raise AssertionError
"""
SAID = [
    "PASSED test_some.py::test_promised",
    "ERROR test_some.py::test_read .*data of Debian's drawing-data",
    "ERROR test_some.py::test_started - .*draw of Debian's drawing",
    "ERROR test_some.py::test_started_by_name - .*draw of Debian's drawing",
    "ERROR test_some.py::test_linked .*link of Debian's drawing-data",
    "PASSED test_some.py::test_named",
    "SKIPPED .*needs packages of Debian: apt-get install gone",
    "ERROR test_some.py::test_unknown .*names never, which .ci/test_packages lacks",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of five packages, and dpkg's records of them."""
    usr, info = tmp_path / "usr", tmp_path / "dpkg/info"
    usr.mkdir()
    info.mkdir(parents=True)
    (info.parent / "status").write_text(STATUS)
    for package, name in {"make:amd64": "make", "drawing": "draw", "drawing-data": "data"}.items():
        (usr / name).write_text("#!/bin/sh\n")
        (usr / name).chmod(0o755)
        (info / f"{package}.list").write_text(f"{usr}\n{usr / name}\n")
    (usr / "link").symlink_to("data")
    return tmp_path


def test_the_readme_promises_packages_with_all_that_they_depend_on(folder: Path) -> None:
    packages = Packages(folder / "dpkg")
    assert packages.with_dependencies(["make"]) == {"make", "libmake0", "libc6"}
    assert packages.foreign_owner(str(folder / "usr/make")) is None
    assert packages.foreign_owner(str(folder / "usr/data")) == "drawing-data"
    assert packages.is_installed("drawing")
    assert not packages.is_installed("gone")


def test_a_test_names_the_packages_that_it_uses(folder: Path) -> None:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-rA", "--override-ini=markers=debian", "--rootdir=."]
    environment = {**os.environ, "COLUMNS": "1000", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert [line for line in SAID if not re.search(line, done.stdout)] == []
    assert done.stdout.count("\nERROR ") == sum(line.startswith("ERROR") for line in SAID)


def test_the_readme_lists_the_packages_that_make_test_fresh_installs() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"apt-get install {' '.join(README)}`" in page
    assert "make" in README


def test_the_page_for_developers_lists_the_packages() -> None:
    page = (ROOT / "docs/how-to/work_on_rayloom.md").read_text(encoding="utf-8")
    assert [name for name in TESTS if f"`{name}`" not in page] == []
