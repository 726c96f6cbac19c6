"""What 'rayloom models' makes of an endpoint that has several versions of a model loaded."""

from pathlib import Path

import pytest
from typer.testing import CliRunner
from upath import UPath

from app.cli.models import models
from app.cluster.state import ClusterState
from app.errors import StorageError
from app.repository.repository import Repository
from app.serving.protocol.management import ModelIndex
from tests.publishing import CARD, files_in


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Three versions, of which two are served."""
    repository = Repository(UPath(tmp_path / "storage"))
    for number in range(3):
        repository.publish("toy", files_in(tmp_path / f"files{number}"), CARD)
    loaded = [("other", "3"), ("toy", "1"), ("toy", "2")]
    index = [ModelIndex(name=name, version=version, state="READY") for name, version in loaded]
    monkeypatch.setattr("app.cli.models.read_state", lambda: ClusterState.model_construct(serve_port=1))
    monkeypatch.setattr("app.cli.models.served_models", lambda cluster: index)
    return repository


def rayloom(tmp_path: Path, *arguments: str) -> str:
    done = CliRunner().invoke(models, [*arguments, "--storage", str(tmp_path / "storage")])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_no_version_that_is_served_is_deleted(repository: Repository, tmp_path: Path) -> None:
    for version in ("1", "2"):
        with pytest.raises(StorageError, match=f"version {version}, is served at http://127.0.0.1:1: deploy another"):
            rayloom(tmp_path, "delete", "toy", version)
    rayloom(tmp_path, "delete", "toy", "3")
    assert repository.versions("toy") == [1, 2]


def test_a_promotion_says_all_that_the_endpoint_goes_on_with(repository: Repository, tmp_path: Path) -> None:
    assert "the endpoint goes on with version 1 and 2: 'rayloom submit" in rayloom(tmp_path, "promote", "toy", "2")
