"""Compiled engines are cached on disk for the next replica."""

import errno
import io
import logging
import os
from pathlib import Path
from typing import IO, Any, cast

import pytest
from upath import UPath

from app.repository.repository import Repository
from tests.loading import answers_rightly, load_encoder, model_card, publish_encoder


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(UPath(tmp_path / "storage"))


def test_what_was_compiled_is_found_by_the_next_replica(repository: Repository, tmp_path: Path) -> None:
    publish_encoder(repository, tmp_path, model_card(engine="openvino"))
    load_encoder(tmp_path)
    (kept,) = (tmp_path / "cache/engines").iterdir()
    written = kept.stat().st_mtime_ns
    assert answers_rightly(load_encoder(tmp_path), tmp_path)
    assert [(path, path.stat().st_mtime_ns) for path in (tmp_path / "cache/engines").iterdir()] == [(kept, written)]


def test_what_no_replica_has_asked_for_in_a_month_is_forgotten(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "cache/engines").mkdir(parents=True)
    for name, age_days in (("old", 31), ("young", 29)):
        (tmp_path / "cache/engines" / name).write_bytes(b"?")
        age = (tmp_path / "cache/engines" / name).stat().st_atime - age_days * 86400
        os.utime(tmp_path / "cache/engines" / name, (age, age))
    publish_encoder(repository, tmp_path, model_card(engine="openvino"))
    load_encoder(tmp_path)
    left = {path.name for path in (tmp_path / "cache/engines").iterdir()}
    assert (len(left), "young" in left, "old" in left) == (2, True, False)


def test_a_cache_that_cannot_be_used_is_told_of_once(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish_encoder(repository, tmp_path, model_card(engine="openvino"))
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("RAYLOOM_CACHE", str(tmp_path / "file/cache"))  # root may write into any folder, but not here
    caplog.set_level(logging.WARNING, "app.engines.cache")
    for _ in range(2):
        assert answers_rightly(load_encoder(tmp_path), tmp_path)
    told = [record.getMessage() for record in caplog.records if record.name == "app.engines.cache"]
    assert len(told) == 1
    assert "file/cache/engines' cannot be read or written (Not a directory)" in told[0]


def test_a_full_disk_leaves_nothing_half_written(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish_encoder(repository, tmp_path, model_card(engine="openvino"))
    open_file = Path.open

    class FullDisk(io.FileIO):
        def write(self, content: Any) -> int:
            super().write(bytes(content)[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> IO[Any]:
        if path.parent == tmp_path / "cache/engines" and mode == "wb":
            return cast(IO[Any], FullDisk(path, mode))
        return open_file(path, mode, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        model = load_encoder(tmp_path)
    assert answers_rightly(model, tmp_path)
    assert "No space left on device" in caplog.text
    assert list((tmp_path / "cache/engines").iterdir()) == []
