"""Extensions in C++: however a build of one ends, the next one comes to an end."""

import ctypes
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils import cpp_extension

from app.training.engine.extensions import load_extension
from tests.helpers import BIN, wait_until

SOURCE = """
#include "gate.h"
extern "C" int answer() { return 42; }
"""


@dataclass(frozen=True)
class Answer:
    """What builds a small extension, as DeepSpeed's builders build theirs."""

    folder: Path

    @property
    def name(self) -> str:
        """One of each test's own: torch counts the versions of a name."""
        return self.folder.name

    @property
    def library(self) -> Path:
        return self.folder / "extensions" / self.name / f"{self.name}.so"

    @property
    def lock(self) -> Path:
        """torch's."""
        return self.library.with_name("lock")

    def load(self) -> int:
        library: Any = cpp_extension.load(self.name, [str(self.folder / "answer.cpp")], is_python_module=False)
        answer: int = ctypes.CDLL(library).answer()
        return answer


class Gate:
    """A header that is a pipe: a compiler that includes it waits there."""

    def __init__(self, path: Path) -> None:
        self.path, self._ends = path, list[int]()
        os.mkfifo(path)

    def is_reached(self) -> bool:
        """Whether a compiler waits."""
        with suppress(OSError):  # nobody reads it yet
            self._ends.append(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
        return bool(self._ends)

    def take_away(self) -> None:
        """Leave an empty header in its place; those who wait do so still."""
        self.path.unlink()
        self.path.touch()

    def open(self) -> None:
        """Let those go on who wait."""
        while self._ends:
            os.close(self._ends.pop())


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "extensions").symlink_to("elsewhere")  # as a home or a cache may be
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    (tmp_path / "answer.cpp").write_text(SOURCE, encoding="utf-8")
    return Answer(tmp_path)


@pytest.fixture
def gate(builder: Answer) -> Iterator[Gate]:
    gate = Gate(builder.folder / "gate.h")
    yield gate
    gate.open()


Start = Callable[..., multiprocessing.Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Runs a function in a process of its own, killed after the test."""
    started = []

    def begin(work: Callable[..., Any], *arguments: object) -> multiprocessing.Process:
        started.append(multiprocessing.get_context("fork").Process(target=work, args=arguments))
        started[-1].start()
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.join()


def files_of(builder: Answer) -> dict[str, int]:
    """When each file of the build was changed."""
    return {path.name: path.stat().st_mtime_ns for path in builder.library.parent.iterdir()}


def test_a_build_that_was_killed_is_done_again_and_its_compiler_that_lives_on_harms_nothing(
    builder: Answer, gate: Gate, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = start(load_extension, builder)
    wait_until(gate.is_reached)
    orphans = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.join()
    assert builder.lock.exists(), "torch would wait for it for ever"
    gate.take_away()
    assert load_extension(builder) == 42
    built = files_of(builder)
    gate.open()
    assert not psutil.wait_procs(orphans, timeout=20)[1]
    assert files_of(builder) == built
    assert load_extension(builder) == 42
    assert capfd.readouterr().out.count(f"compiling {builder.name} in {builder.library.parent}: ") == 2, "one a build"
    left = {path.name for path in builder.library.parents[1].iterdir()}
    assert left == {builder.name, f"{builder.name}.rayloom.lock"}


def test_those_who_need_it_at_once_wait_for_the_one_that_builds_it_whoever_that_is(
    builder: Answer, gate: Gate, start: Start, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")  # the stranger's; ours find ninja without it
    stranger = start(builder.load)
    wait_until(builder.lock.exists)
    ours = [start(load_extension, builder) for _ in range(2)]
    wait_until(gate.is_reached)
    ours[0].join(1.0)
    assert ours[0].is_alive()
    gate.take_away()
    gate.open()
    for process in (stranger, *ours):
        process.join(20)
        assert process.exitcode == 0
    assert "compiling" not in capfd.readouterr().out
