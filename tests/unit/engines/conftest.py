"""Shared by the tests of engines."""

from collections.abc import Iterator

import pytest

from app.engines.generation import trial


@pytest.fixture(scope="module", autouse=True)
def _patient_trials() -> Iterator[None]:
    """Let the trial of a grammar take as long as a busy machine needs. Tests of hostile ones set the usual time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trial, "_TIMEOUT_S", 60.0)
        yield
