"""Programs that run language model engines in separate processes."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import app
from app.errors import EngineError

VLLM_PYTHON = "RAYLOOM_VLLM_PYTHON"
"""The environment variable with the path of the Python interpreter that has vLLM."""

_KEPT_VARIABLES = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")
# The parent's other packages must not hide those of another environment.
_RUN_IN_OTHER_ENVIRONMENT = (
    "import runpy, sys, types; app = sys.modules['app'] = types.ModuleType('app'); app.__path__ = [sys.argv[1]]; "
    "sys.argv = sys.argv[2:]; runpy.run_module(sys.argv[0], run_name='__main__')"
)


@dataclass(frozen=True)
class Program:
    """A module that runs an engine, as ``app.engines.generation.service`` describes."""

    name: str
    """The name in recipes and manifests."""
    title: str
    """The name in messages."""
    module: str
    python: str = sys.executable
    kept_variables: tuple[str, ...] = ()
    """Environment variables that the process inherits in addition to the usual ones."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set for the process only."""
    remedy: str = ""
    """What to do if the process dies while it loads a model."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command line, to which the role and the parent's process id are added."""
        if self.python == sys.executable:
            return (self.python, "-P", "-m", self.module)
        return (self.python, "-P", "-c", _RUN_IN_OTHER_ENVIRONMENT, *app.__path__, self.module)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the process, without Ray's variables. In this Python, it has the same module path."""
        names = (*_KEPT_VARIABLES, *self.kept_variables)
        kept = {name: value for name in names if (value := os.environ.get(name)) is not None}
        if self.python == sys.executable:
            kept["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        return {**kept, **self.variables}


def openvino() -> Program:
    """Return the program of OpenVINO GenAI."""
    return Program("openvino_genai", "OpenVINO", "app.engines.generation.openvino")


def vllm() -> Program:
    """Return the program of vLLM. Raises EngineError if the environment variable names no Python."""
    how = (
        "expected the Python of an environment with vLLM; make one with `python3 -m venv ~/vllm && "
        f"~/vllm/bin/pip install vllm`, and set {VLLM_PYTHON}=$HOME/vllm/bin/python where the cluster starts"
    )
    given = os.environ.get(VLLM_PYTHON)
    if not given:
        raise EngineError(f"{VLLM_PYTHON} is not set: {how}").of("vllm.python", VLLM_PYTHON)
    if not (Path(given).is_file() and os.access(given, os.X_OK)):
        raise EngineError(f"{VLLM_PYTHON} is {given!r}, which is no program: {how}").of("vllm.python", VLLM_PYTHON)
    return Program(
        "vllm",
        "vLLM",
        "app.engines.generation.vllm",
        python=given,
        kept_variables=("CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_VISIBLE_DEVICES"),
        variables={
            # The engine's core runs in the process itself, not in another one.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        },
        remedy=f"; {VLLM_PYTHON} is {given!r}: {how}",
    )
