"""Versions of models, on a disk and on S3: published whole, found damaged, promoted and deleted."""

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError
from upath import UPath

from app.checksums import read_checksums, sha256_of
from app.data.shards import Shard
from app.pretrained import PretrainedFolder
from app.repository.repository import Repository
from app.storage import open_storage
from tests.publishing import CARD, files_in
from tests.wording import refused

local = pytest.mark.parametrize("storage", ["local", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
"""Marks tests of what is done alike on every storage. On S3 they are slow."""


@pytest.fixture
def files(tmp_path: Path) -> UPath:
    return files_in(tmp_path / "files")


@pytest.fixture
def repository(storage: str) -> Repository:
    return Repository(open_storage(storage))


def test_versions_follow_each_other_and_one_is_in_production(repository: Repository, files: UPath) -> None:
    assert [repository.publish("toy", files, CARD).version for _ in range(3)] == [1, 2, 3]
    assert repository.current("toy") == 3
    repository.promote("toy", 2)
    assert repository.versions("toy") == [1, 2, 3]
    assert repository.production("toy") == repository.current("toy") == 2
    assert repository.names() == ["toy"]


def test_a_version_is_fetched_as_it_was_published(repository: Repository, files: UPath, tmp_path: Path) -> None:
    published = repository.publish("toy", files, CARD)
    assert repository.fetch("toy", 1, UPath(tmp_path / "target")) == published
    assert (tmp_path / "target/model.onnx").read_bytes() == b"a model"
    assert published.size_bytes == len(b"a model[]")


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "..", "a/b", "a\\b", "s3://bucket/evil", "evil\0"])
def test_a_name_that_leads_out_of_a_version_is_refused(
    repository: Repository, files: UPath, tmp_path: Path, name: str
) -> None:
    manifest, folder = repository.publish("toy", files, CARD), repository.folder("toy", 1)
    forged = manifest.model_copy(update={"files": manifest.files | {name: sha256_of(b"evil")}})
    content = forged.model_dump_json(indent=1).encode()
    (folder / "manifest.json").write_bytes(content)
    (folder / "manifest.sha256").write_bytes(f"{sha256_of(content)}  manifest.json\n".encode())
    if name == "../evil":
        (folder.parent / "evil").write_bytes(b"evil")
    with refused("manifest.damaged"):
        repository.fetch("toy", 1, UPath(tmp_path / "served/target"))
    assert not (tmp_path / "served/evil").exists()
    with refused("model.name"):
        repository.manifest(name, 1)


def test_names_in_checksums_and_indices_of_shards_and_weights_stay_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  ../evil\n", encoding="utf-8")
    with refused("path.outside"):
        read_checksums(UPath(tmp_path))
    sizes = {"rows": 1, "bytes": 1, "min_length": 1, "max_length": 1}
    for names in ({"name": "../evil", "sha256": "0"}, {"name": "a.arrow", "sha256": "../evil"}):
        with pytest.raises(ValidationError, match="not the name of one file"):
            Shard.model_validate(sizes | names)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../evil"}}))
    with refused("path.outside", "model.pretrained"):
        _ = PretrainedFolder("given", tmp_path).weights_files


@pytest.mark.parametrize("act", ["publish", "delete"])
def test_what_a_killed_publisher_left_is_removed_later(tmp_path: Path, act: str) -> None:
    repository, files = Repository(UPath(tmp_path)), files_in(tmp_path / "files")
    for _ in range(2):
        repository.publish("toy", files, CARD)
    left, busy = (tmp_path / "models/toy" / name for name in (".aaaaaaaa.tmp", ".bbbbbbbb.tmp"))
    for folder in (left, busy):
        files_in(folder, b"all weights")
    torn, written = (tmp_path / "models/toy" / f".aliases.json.{8 * name}.tmp" for name in "ab")
    for file in (torn, written):
        file.write_text("{")
    two_hours_ago = time.time() - 7200
    for path in (*left.iterdir(), left, torn):
        os.utime(path, (two_hours_ago, two_hours_ago))
    if act == "publish":
        repository.publish("toy", files, CARD)
    else:
        repository.delete("toy", 1)
    assert not left.exists()
    assert not torn.exists()
    assert written.exists()
    assert (busy / "model.onnx").exists(), "another process may write it"


def test_what_is_read_elsewhere_is_not_fetched(repository: Repository, files: UPath, tmp_path: Path) -> None:
    published = repository.publish("toy", files, CARD)
    (repository.folder("toy", 1) / "model.onnx").write_bytes(b"changed")
    assert repository.fetch("toy", 1, UPath(tmp_path / "target"), exclude=["model.onnx"]) == published
    assert not (tmp_path / "target/model.onnx").exists()
    assert (tmp_path / "target/labels.json").exists()


@local
def test_a_changed_byte_in_any_file_is_found(repository: Repository, files: UPath, tmp_path: Path) -> None:
    repository.publish("toy", files, CARD)
    for name in ("model.onnx", "labels.json", "manifest.json", "manifest.sha256"):
        file = repository.folder("toy", 1) / name
        whole = file.read_bytes()
        for damaged in (whole + b"\n", bytes([whole[0] ^ 1]) + whole[1:], whole[:-1]):
            file.write_bytes(damaged)
            with refused("version.changed"):
                repository.verify("toy", 1)
        with refused("version.changed"):
            repository.fetch("toy", 1, UPath(tmp_path / f"damaged {name}"))
        file.write_bytes(whole)
    repository.verify("toy", 1)


def test_a_file_that_is_missing_is_named(repository: Repository, files: UPath, tmp_path: Path) -> None:
    repository.publish("toy", files, CARD)
    (repository.folder("toy", 1) / "model.onnx").unlink()
    with refused("version.changed"):
        repository.verify("toy", 1)
    with refused("version.changed"):
        repository.fetch("toy", 1, UPath(tmp_path / "target"))


def test_a_file_that_was_added_later_is_found(repository: Repository, files: UPath) -> None:
    repository.publish("toy", files, CARD)
    (repository.folder("toy", 1) / "model.plan").write_bytes(b"?")
    with refused("version.changed"):
        repository.verify("toy", 1)


def test_a_publication_that_breaks_off_leaves_nothing(
    repository: Repository, files: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("app.repository.version.write_atomically", full_disk)  # the files are written by then
        with pytest.raises(OSError, match="No space left"):
            repository.publish("toy", files, CARD)
    model = repository.folder("toy", 1).parent
    assert not model.exists() or not list(model.iterdir())
    assert repository.publish("toy", files, CARD).version == 1


def test_only_a_folder_of_files_is_published(repository: Repository, files: UPath, tmp_path: Path) -> None:
    (files / "tokenizer").mkdir()
    with refused("version.folders"):
        repository.publish("toy", files, CARD)
    (tmp_path / "empty").mkdir()
    with refused("version.folders"):
        repository.publish("toy", UPath(tmp_path / "empty"), CARD)
    assert repository.names() == []


@local
def test_damaged_aliases_of_a_model_hide_no_other(repository: Repository, files: UPath) -> None:
    for name in ("one", "two"):
        repository.publish(name, files, CARD)
        repository.promote(name, 1)
    (repository.folder("one", 1).parent / "aliases.json").write_bytes(b"{")
    assert [(listed.name, listed.aliases) for listed in repository.list_versions()] == [
        ("one", ("damaged aliases.json",)),
        ("two", ("production",)),
    ]


def test_a_stray_file_is_no_model(repository: Repository, files: UPath) -> None:
    repository.publish("toy", files, CARD)
    (repository.folder("toy", 1).parent.parent / "notes.txt").write_bytes(b"?")
    (repository.folder("toy", 1).parent / "7").write_bytes(b"?")
    assert (repository.names(), repository.versions("toy")) == (["toy"], [1])


def test_what_a_killed_publisher_left_is_not_a_version(repository: Repository, files: UPath) -> None:
    (repository.folder("toy", 1) / "model.onnx").parent.mkdir(parents=True)
    (repository.folder("toy", 1) / "model.onnx").write_bytes(b"half a mo")
    assert repository.names() == []
    assert repository.publish("toy", files, CARD).version == 2


def test_threads_that_publish_at_once_get_a_number_each(repository: Repository, files: UPath) -> None:
    with ThreadPoolExecutor(5) as pool:
        versions = [item.version for item in pool.map(lambda _: repository.publish("toy", files, CARD), range(5))]
    assert sorted(versions) == repository.versions("toy") == list(range(1, 6))
    for version in versions:
        repository.verify("toy", version)


def test_another_process_sees_a_version_at_once(storage: str, files: UPath) -> None:
    reader, writer = Repository(open_storage(storage)), Repository(open_storage(storage))
    assert reader.names() == []
    writer.publish("toy", files, CARD)
    assert reader.versions("toy") == [1]


@local
def test_a_rollback_goes_to_what_was_before_and_back_again(repository: Repository, files: UPath) -> None:
    for _ in range(3):
        repository.publish("toy", files, CARD)
    repository.promote("toy", 1)
    with refused("production.no_previous"):
        repository.rollback("toy")
    repository.promote("toy", 2)
    repository.promote("toy", 2)  # as jobs.deploy does with what is in production
    repository.promote("toy", 3, "canary")
    assert [repository.rollback("toy").production for _ in range(3)] == [1, 2, 1]
    assert repository.aliases("toy").of(3) == ["canary"]


def test_a_version_is_deleted_for_good_unless_an_alias_names_it(repository: Repository, files: UPath) -> None:
    for _ in range(4):
        repository.publish("toy", files, CARD)
    repository.promote("toy", 1)
    repository.promote("toy", 2)
    repository.promote("toy", 3, "canary")
    for version in (1, 2, 3):
        with refused("version.in_use"):
            repository.delete("toy", version)
    repository.delete("toy", 4)
    assert repository.versions("toy") == [1, 2, 3]
    assert not repository.folder("toy", 4).exists()
    with refused("version.unknown"):
        repository.delete("toy", 4)
    assert repository.publish("toy", files, CARD).version == 5, "a number is not given twice"


def test_what_is_not_there_is_said_with_what_is(repository: Repository, files: UPath) -> None:
    repository.publish("toy", files, CARD)
    with refused("production.none"):
        repository.production("other")
    with refused("version.unknown"):
        repository.promote("toy", 9)
    with refused("model.unknown"):
        repository.promote("other", 1)


@pytest.mark.parametrize(
    ("location", "rule"), [("storage", "path.relative"), ("nosuch://bucket", "storage.not_opened")]
)
def test_storage_that_cannot_be_is_refused(location: str, rule: str) -> None:
    with refused(rule, "storage"):
        open_storage(location)
