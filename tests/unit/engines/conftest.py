"""Shared by the tests of engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.engines.generation import trial
from tests.generating import export_language_model, make_language_model
from tests.generation_contract import LENGTH


@pytest.fixture(scope="module", autouse=True)
def _patient_trials() -> Iterator[None]:
    """Let the trial of a grammar take as long as a busy machine needs. Tests of hostile ones set the usual time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trial, "_TIMEOUT_S", 60.0)
        yield


@pytest.fixture(scope="package")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in transformers' folder."""
    return make_language_model(tmp_path_factory.mktemp("source"), "llama", length=LENGTH)


@pytest.fixture(scope="package")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as the engine opens it."""
    return export_language_model(source, tmp_path_factory.mktemp("exported"))
