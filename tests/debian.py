"""The Debian packages that tests need, and a watch for uses of packages that a test does not name.

A test with the mark ``@pytest.mark.debian("prometheus")`` is skipped if the package is not installed. A test that opens
a file or starts a program of any other package fails, as it would on a machine with only what the README lists. The
watch sees what the test process itself opens and starts, not what its child processes do.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

_CI = Path(__file__).parents[1] / ".ci"
README = (_CI / "readme_packages").read_text().split()
"""The packages that the README lists: Python with its headers, make, a C++ compiler, and the needs of a clone."""
TESTS = (_CI / "test_packages").read_text().split()
"""The packages that tests may name. A test is skipped if its package is missing."""
_SYSTEM = re.compile(r"/(usr|s?bin|lib\w*)/")
"""Folders with files of packages, or with links to them."""


class Packages:
    """The installed packages, as dpkg records them. There are none on other Linux distributions."""

    def __init__(self, dpkg: Path = Path("/var/lib/dpkg")) -> None:
        self._dpkg = dpkg

    def is_installed(self, name: str) -> bool:
        """Return whether a package is installed."""
        return name in self._fields

    def with_dependencies(self, names: Iterable[str]) -> set[str]:
        """Return these packages and all their dependencies, as far as they are installed."""
        found: set[str] = set()
        waiting = [*names]
        while waiting:
            name = waiting.pop()
            for package in self._providers.get(name, set()) - found:
                found.add(package)
                waiting += _names(self._fields[package], "Depends", "Pre-Depends")
        return found

    def foreign_owner(self, path: str) -> str | None:
        """Return the package that owns a file; None if the README lists that package or nothing owns the file."""
        return next((self._foreign[name] for name in _spellings(path) if name in self._foreign), None)

    @cached_property
    def _fields(self) -> dict[str, dict[str, str]]:
        status = self._dpkg / "status"
        paragraphs = status.read_text(encoding="utf-8", errors="replace").split("\n\n") if status.exists() else []
        read = [dict(re.findall(r"^([\w-]+): (.*)$", paragraph, re.MULTILINE)) for paragraph in paragraphs]
        return {fields["Package"]: fields for fields in read if fields.get("Status", "").endswith(" installed")}

    @cached_property
    def _providers(self) -> dict[str, set[str]]:
        providers: dict[str, set[str]] = {}
        for package, fields in self._fields.items():
            for name in [package, *_names(fields, "Provides")]:
                providers.setdefault(name, set()).add(package)
        return providers

    @cached_property
    def _foreign(self) -> dict[str, str]:
        base = {name for name, fields in self._fields.items() if _is_base(fields)}
        promised = self.with_dependencies([*base, *README])
        owners = {file: name for name in self._fields.keys() - promised for file in self._files(name)}
        for name in promised:
            for file in self._files(name):
                owners.pop(file, None)
        return owners

    @cached_property
    def _lists(self) -> dict[str, list[Path]]:
        """The lists of files of each package, of which dpkg has one for each architecture."""
        lists: dict[str, list[Path]] = {}
        for file in (self._dpkg / "info").glob("*.list"):
            lists.setdefault(file.stem.partition(":")[0], []).append(file)
        return lists

    def _files(self, package: str) -> list[str]:
        lists = self._lists.get(package, [])
        return [line for file in lists for line in file.read_text(errors="replace").splitlines()]


def _is_base(fields: dict[str, str]) -> bool:
    return fields.get("Essential") == "yes" or fields.get("Priority") == "required"


def _names(fields: dict[str, str], *keys: str) -> list[str]:
    return [name for key in keys for name in re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]*)", fields.get(key, ""))]


def _spellings(path: str) -> Iterator[str]:
    """Yield the names that dpkg may record for a file: ``/bin/ls`` even if ``/bin`` is a link."""
    real = os.path.realpath(path)
    yield from (real, real.removeprefix("/usr"))


class Watch:
    """Collects the system's files that this process opens, and the programs that it starts."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        sys.addaudithook(self._hear)

    def take(self) -> set[str]:
        """Return the paths collected since the last call."""
        taken, self._paths = self._paths, set()
        return taken

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.exec", "os.posix_spawn"):
            self._note(arguments[0])
        elif event == "subprocess.Popen":
            program, _, _, environment = arguments
            self._note(shutil.which(program, path=(environment or os.environ).get("PATH")))

    def _note(self, path: object) -> None:
        if isinstance(path, str | os.PathLike) and _SYSTEM.match(found := os.fsdecode(path)):
            self._paths.add(found)


PACKAGES, WATCH = Packages(), Watch()


def _named(item: pytest.Item) -> set[str]:
    return {str(name) for marker in item.iter_markers("debian") for name in marker.args}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose packages are not installed."""
    named = _named(item)
    if unknown := named.difference(TESTS):
        pytest.fail(f"the mark 'debian' names {', '.join(sorted(unknown))}, which .ci/test_packages lacks")
    if missing := sorted(name for name in named if not PACKAGES.is_installed(name)):
        pytest.skip(f"needs packages of Debian: apt-get install {' '.join(missing)}")
    WATCH.take()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that has opened a file, or started a program, of a package that it does not name."""
    yield
    if item.get_closest_marker("gpu"):
        return  # CUDA and its libraries may be Debian packages
    allowed = PACKAGES.with_dependencies(_named(item))
    owners = {path: PACKAGES.foreign_owner(path) for path in sorted(WATCH.take())}
    found = [f"{path} of Debian's {owner}" for path, owner in owners.items() if owner and owner not in allowed]
    if found:
        pytest.fail(f"this test uses {', '.join(found)}: mark it with pytest.mark.debian(PACKAGE)", pytrace=False)
