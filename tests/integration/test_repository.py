"""Processes that publish, promote and die at once, and the words of the command line; on a disk and on S3."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig
from upath import UPath

from app.repository.repository import Repository
from app.storage import open_storage
from tests.helpers import ROOT, rayloom, wait_until
from tests.publishing import CARD, files_in

Models = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def repository(storage: str) -> Repository:
    return Repository(open_storage(storage))


@pytest.fixture(scope="module")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of commands with no cluster up."""
    return {"RAYLOOM_HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture
def models(storage: str, empty_home: dict[str, str]) -> Models:
    """Runs 'rayloom models ...', with no cluster up."""
    return lambda *arguments: rayloom("models", *arguments, "--storage", storage, environment=empty_home)


def waiting(storage: str, *acts: list[str]) -> subprocess.Popen[str]:
    """Processes that have loaded all they need, and act once their input ends. This one then waits for the others."""
    command = [sys.executable, "-m", "tests.publishing", storage, *map(json.dumps, acts)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in acts] == ["ready\n"] * len(acts)
    return process


def let_act(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def kill_halted(process: subprocess.Popen[str]) -> None:
    """Let a process act until it halts, and kill it there."""
    let_act(process)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


def test_processes_that_publish_and_promote_at_once_lose_nothing(
    repository: Repository, storage: str, tmp_path: Path
) -> None:
    contents = [b"a model of process %d" % index for index in range(4)]
    folders = [files_in(tmp_path / f"files{number}", content) for number, content in enumerate(contents)]
    publishers = waiting(storage, *(["publish_and_promote", str(files), "3"] for files in folders))
    let_act(publishers)
    assert publishers.wait(120) == 0
    assert repository.versions("toy") == list(range(1, 13))
    published = []
    for version in range(1, 13):
        repository.verify("toy", version)
        published.append((repository.folder("toy", version) / "model.onnx").read_bytes())
    assert sorted(published) == sorted(contents * 3)
    aliases = repository.aliases("toy")
    assert aliases.production is not None
    assert aliases.canary is not None
    assert (aliases.production % 2, aliases.canary % 2) == (1, 0)
    repository.verify_config("toy")


def test_what_processes_write_down_at_once_is_all_there(repository: Repository, storage: str, tmp_path: Path) -> None:
    for index in range(8):
        repository.publish("toy", files_in(tmp_path / f"files{index}"), CARD)
    deleting = waiting(
        storage, *(["delete", *(str(version) for version in range(first, 9, 4))] for first in range(1, 5))
    )
    let_act(deleting)
    assert deleting.wait(120) == 0
    assert repository.names() == []
    assert repository.aliases("toy").deleted == tuple(range(1, 9))


def test_a_publisher_that_is_killed_leaves_nothing_that_a_reader_sees(
    repository: Repository, storage: str, tmp_path: Path, models: Models
) -> None:
    process = waiting(storage, ["publish_until_the_manifest", str(files_in(tmp_path / "killed"))])
    kill_halted(process)
    assert any(repository.folder("toy", 1).parent.iterdir())
    assert repository.names() == []
    assert "toy" not in models("list").stdout
    version = repository.publish("toy", files_in(tmp_path / "small"), CARD).version
    assert repository.versions("toy") == [version]
    repository.verify("toy", version)


@pytest.mark.parametrize("storage", ["local"], indirect=True)
def test_a_later_export_removes_what_a_killed_one_left_and_nothing_else(
    repository: Repository, storage: str, tmp_path: Path
) -> None:
    target = tmp_path / "triton"
    repository.publish("toy", files_in(tmp_path / "files"), CARD)
    kill_halted(waiting(storage, ["export_until_the_rename", str(target)]))
    assert any(target.glob(".*.tmp/1/model.onnx"))

    (left,) = target.iterdir()
    other, busy = target / ".notes.tmp", target / ".aaaaaaaa.tmp"
    other.write_text("a user's own")
    files_in(busy / "1")
    long_ago = time.time() - 7200
    for path in (*left.rglob("*"), left, other, busy, busy / "1"):
        os.utime(path, (long_ago, long_ago))
    repository.publish("toy", files_in(tmp_path / "small"), CARD)
    repository.export_to_triton("toy", 2, UPath(target))
    assert sorted(target.iterdir()) == sorted([other, busy, target / "toy"])


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_the_words_of_the_command_line(repository: Repository, storage: str, tmp_path: Path, models: Models) -> None:
    files = files_in(tmp_path / "files")
    for _ in range(3):
        repository.publish("toy", files, CARD)

    assert models("promote", "toy", "1").stdout.startswith("toy, version 1, is production now\nno local endpoint")
    tried = models("promote", "toy", "2", "--alias", "canary").stdout
    assert tried.startswith("toy, version 2, is canary now\n'rayloom submit deploy RECIPE', with serve.canary")
    assert models("promote", "toy", "2").stdout.startswith("toy, version 2, is production now\n")
    assert models("rollback", "toy").stdout.startswith("toy, version 1, is in production again\n")
    head, *rows = models("list").stdout.splitlines()
    assert head.split() == ["model", "version", "aliases", "precision", "engine", "score", "size", "created"]
    assert [row.split()[:2] for row in rows] == [["toy", "1"], ["toy", "2"], ["toy", "3"]]
    assert rows[1].split()[2:7] == ["previous", "fp32", "openvino", "accuracy", "0.9000"]

    shown = models("show", "toy").stdout
    for line in ("model toy, version 1", "data d", "recipe sha256:r", "code s", "train run t", "compile run c",
                 "input input_ids int64 [-1, -1]", "output logits float32 [-1, 2]"):  # fmt: skip
        assert line in " ".join(shown.split()), shown

    exported = models("export", "toy", "3", str(tmp_path / "triton"))
    assert f"serve it with: tritonserver --model-repository {tmp_path / 'triton'}" in exported.stdout
    config = text_format.Parse((tmp_path / "triton/toy/config.pbtxt").read_text(encoding="utf-8"), ModelConfig())
    assert (config.name, config.version_policy.specific.versions) == ("toy", [3])
    assert (tmp_path / f"triton/toy/3/{config.default_model_filename}").read_bytes() == b"a model"

    assert models("delete", "toy", "3").stdout == "deleted toy, version 3; its number is not given again\n"
    assert repository.versions("toy") == [1, 2]
    assert models("verify", "toy").stdout.count("every byte as published") == 2


@pytest.mark.parametrize("storage", ["local"], indirect=True)
def test_what_the_command_line_refuses(repository: Repository, storage: str, tmp_path: Path, models: Models) -> None:
    for index in range(2):
        repository.publish("toy", files_in(tmp_path / f"files{index}"), CARD)
    repository.promote("toy", 1)
    for name in ("model.onnx", "labels.json"):
        file = repository.folder("toy", 2) / name
        file.write_bytes(file.read_bytes() + b"!")
    config = repository.folder("toy", 1).with_name("config.pbtxt")
    config.write_bytes(config.read_bytes() + b"#")
    for arguments, words in (
        (("delete", "toy", "1"), "version 1, is production: promote another version first"),
        (("delete", "toy", "7"), "no version 7: published are [1, 2]"),
        (("promote", "toys", "1"), "no model 'toys'; did you mean 'toy'"),
        (("rollback", "toy"), "had no other version in production before"),
        (("show", "toy", "3"), "no version 3"),
        (("export", "toy", "one", str(tmp_path)), "expected a folder, or a version's number and a folder"),
        (("verify", "toy"), "2/model.onnx' was changed"),
        (("verify", "toy", "2"), "2/labels.json' was changed"),
        (("verify", "toy", "1"), "config.pbtxt' was changed"),
    ):
        refused = models(*arguments)
        assert refused.returncode == 2, refused
        assert words in " ".join(refused.stderr.split())
        assert "Traceback" not in refused.stderr
    assert repository.versions("toy") == [1, 2]
