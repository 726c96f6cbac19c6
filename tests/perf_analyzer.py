"""NVIDIA's load generator ``perf_analyzer``, from its wheel.

The wheels are installed in a separate folder, because the project uses another release of ``tritonclient``.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_WHEELS = ("tritonclient==2.50.0", "nvidia-cuda-runtime-cu12==12.9.79")
"""The tool, and the ``libcudart.so.12`` that it loads. It also loads ``libb64.so.0d``, from Debian's ``libb64-0d``."""
_FOLDER = Path("~/.cache/rayloom-tests/perf_analyzer-2.50.0").expanduser()
_INSTALL_S, _RUN_S = 120, 60


class PerfAnalyzerMissingError(Exception):
    """The tool cannot be installed or started here; the message has the reason."""


class PerfAnalyzer:
    """The installed tool."""

    def __init__(self) -> None:
        """Install the tool, unless an earlier test has done so. Raises PerfAnalyzerMissingError."""
        if not _FOLDER.exists():
            _install()
        started = self.run("--version")
        if started.returncode:
            raise PerfAnalyzerMissingError(f"perf_analyzer does not start: {started.stderr.strip()}")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the tool, and return its output."""
        libraries = {"LD_LIBRARY_PATH": str(_FOLDER / "nvidia/cuda_runtime/lib")}
        command = [str(_FOLDER / "bin/perf_analyzer"), *arguments]
        return subprocess.run(
            command, env=os.environ | libraries, capture_output=True, text=True, timeout=_RUN_S, check=False
        )


def _install() -> None:
    _FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER.parent) as aside:
        target = Path(aside) / "installed"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *_WHEELS]
        installed = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
        if installed.returncode:
            raise PerfAnalyzerMissingError(f"pip cannot install perf_analyzer: {installed.stderr.strip()}")
        try:
            target.rename(_FOLDER)
        except OSError:
            if not _FOLDER.exists():  # otherwise another test installed it first
                raise
