"""The Python of vLLM's environment, for the tests that need one."""

import os

import pytest

from app.engines.generation.program import VLLM_PYTHON

VARIABLE = "RAYLOOM_TEST_VLLM_PYTHON"
WIDTH = 128
"""The width of a small model. On CPUs, vLLM has no attention for heads of fewer than 32 numbers."""


def needs_vllm() -> pytest.MarkDecorator:
    """Return a mark that skips a test where no environment with vLLM is named."""
    return pytest.mark.skipif(VARIABLE not in os.environ, reason=f"needs {VARIABLE}, the Python of vLLM's environment")


def name_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines use that Python."""
    monkeypatch.setenv(VLLM_PYTHON, os.environ[VARIABLE])
