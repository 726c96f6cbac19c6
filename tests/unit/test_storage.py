"""Paths in storage show what other processes write."""

import ast
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from upath import UPath

from app.checksums import write_checksums
from app.storage import to_path, write_atomically
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from tests.helpers import ROOT

CODE = ("app", "benchmarks", "jobs", "serve_deployments", "tune_spaces")


def constructions(file: Path) -> Iterator[int]:
    """Yield the lines that call ``UPath``, or one of its class methods."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            callee = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            if isinstance(callee, ast.Name) and callee.id == "UPath":
                yield node.lineno


def test_only_one_function_makes_paths() -> None:
    found = {
        f"{file.relative_to(ROOT)}:{line}"
        for folder in CODE
        for file in (ROOT / folder).rglob("*.py")
        for line in constructions(file)
    }
    elsewhere = sorted(place for place in found if not place.startswith("app/storage.py:"))
    assert not elsewhere, "call app.storage.to_path: UPath(...) caches listings, and hides what other processes write"
    assert found, "nothing was looked at"


def test_concurrent_writers_leave_one_complete_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in the containers of two machines
    contents = [bytes([number]) * 10_000 for number in range(4)]
    ready = threading.Barrier(len(contents))

    def write(content: bytes) -> None:
        ready.wait()
        for _ in range(50):
            write_atomically(to_path(tmp_path / "file"), content)
            assert (tmp_path / "file").read_bytes() in contents

    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(write, contents))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_an_actor_that_gets_a_trial_back_finds_the_checkpoint_that_another_wrote(storage: str) -> None:
    """Each actor has its own filesystem object, which would cache its directory listings."""
    location = f"{storage}/trials/0000/checkpoints"
    first, second = CheckpointStore(to_path(location)), CheckpointStore(UPath(location, skip_instance_cache=True))
    for number in (1, 2):
        checkpoint = Checkpoint(number)
        second.folder_of(checkpoint).mkdir(parents=True)
        (second.folder_of(checkpoint) / "state.json").write_bytes(b"{}")
        assert checkpoint not in first.committed()
        write_checksums(second.folder_of(checkpoint))
        assert first.newest_intact() == checkpoint
