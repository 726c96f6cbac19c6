"""Versions of models: published whole, found damaged."""

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from upath import UPath

from app.errors import StorageError
from app.repository.manifest import EngineKey, Lineage, ModelCard
from app.repository.repository import Repository
from app.storage import open_storage

CARD = ModelCard(
    task="text-classification",
    engine_key=EngineKey(
        onnx_sha256="0", precision="fp32", engine="openvino", engine_version="1", architecture="x86_64"
    ),
    lineage=Lineage(train_run="t", compile_run="c", recipe="r", data_fingerprint="d", code="s"),
    accuracy=1.0,
    max_difference=0.0,
)


@pytest.fixture
def files(tmp_path: Path) -> UPath:
    folder = UPath(tmp_path / "files")
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"a model")
    (folder / "labels.json").write_bytes(b"[]")
    return folder


@pytest.fixture(params=["local", "memory"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    return Repository(UPath(tmp_path / "storage" if request.param == "local" else f"memory://{tmp_path}"))


def test_versions_follow_each_other_and_one_is_in_production(repository: Repository, files: UPath) -> None:
    assert [repository.publish("toy", files, CARD).version for _ in range(3)] == [1, 2, 3]
    repository.promote("toy", 2)
    assert repository.versions("toy") == [1, 2, 3]
    assert repository.production("toy") == 2
    assert repository.names() == ["toy"]


def test_a_version_is_fetched_as_it_was_published(repository: Repository, files: UPath, tmp_path: Path) -> None:
    published = repository.publish("toy", files, CARD)
    assert repository.fetch("toy", 1, UPath(tmp_path / "target")) == published
    assert (tmp_path / "target/model.onnx").read_bytes() == b"a model"


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"a modeL"), lambda file: file.unlink()])
def test_a_damaged_file_is_named(
    repository: Repository, files: UPath, tmp_path: Path, damage: Callable[[UPath], object]
) -> None:
    repository.publish("toy", files, CARD)
    damage(repository.folder("toy", 1) / "model.onnx")
    with pytest.raises(StorageError, match=r"model\.onnx.*make it again"):
        repository.fetch("toy", 1, UPath(tmp_path / "target"))


def test_a_publication_that_breaks_off_leaves_nothing(
    repository: Repository, files: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("app.repository.repository.write_atomically", full_disk)  # the files are written by then
        with pytest.raises(OSError, match="No space left"):
            repository.publish("toy", files, CARD)
    model = repository.folder("toy", 1).parent
    assert not model.exists() or not list(model.iterdir())
    assert repository.publish("toy", files, CARD).version == 1


def test_what_a_killed_publisher_left_is_not_a_version(repository: Repository, files: UPath) -> None:
    (repository.folder("toy", 1) / "model.onnx").parent.mkdir(parents=True)
    (repository.folder("toy", 1) / "model.onnx").write_bytes(b"half a mo")
    assert repository.versions("toy") == []
    assert repository.publish("toy", files, CARD).version == 2


def test_publishers_at_once_get_a_number_each(files: UPath, tmp_path: Path) -> None:
    repository = Repository(UPath(tmp_path / "storage"))
    with ThreadPoolExecutor(8) as pool:
        versions = [each.version for each in pool.map(lambda _: repository.publish("toy", files, CARD), range(16))]
    assert sorted(versions) == repository.versions("toy") == list(range(1, 17))
    for version in versions:
        repository.verify("toy", version)


def test_what_is_not_there_is_said_with_what_is(repository: Repository, files: UPath) -> None:
    repository.publish("toy", files, CARD)
    with pytest.raises(StorageError, match=r"no version in production .*models there: toy"):
        repository.production("other")
    with pytest.raises(StorageError, match=r"no version 9: published are \[1\]"):
        repository.promote("toy", 9)


@pytest.mark.parametrize(("location", "word"), [("storage", "relative path"), ("nosuch://bucket", "cannot be opened")])
def test_storage_that_cannot_be_is_refused(location: str, word: str) -> None:
    with pytest.raises(StorageError, match=word):
        open_storage(location)
