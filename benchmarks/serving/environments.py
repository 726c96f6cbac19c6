"""Peers conflict with each other and with Rayloom, so each has a virtual environment of its own."""

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.serving.servers import Server

PEERS = Path(__file__).with_name("peers")
DEFAULT_FOLDER = Path("~/.cache/rayloom-bench/peers").expanduser()


class InstallationError(RuntimeError):
    """A server cannot be installed."""


_VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def interpreter(server: Server, folder: Path) -> Path:
    """The Python that runs a server: of its own environment, made first if it is not there or needs something else.

    A server without ``requirements.txt`` runs on what Rayloom has installed.

    Args:
        folder: of all environments.

    Raises:
        InstallationError: pip fails; with what it said.
    """
    requirements = PEERS / server.folder / "requirements.txt"
    if not requirements.exists():
        return Path(sys.executable)
    environment, wanted = folder / server.folder, requirements.read_text(encoding="utf-8")
    python, installed = environment / "bin/python", environment / "installed.txt"
    if not installed.exists() or installed.read_text(encoding="utf-8") != wanted:
        print(f"{server.name}: installing into {environment}", flush=True)
        venv.create(environment, with_pip=True, clear=True)
        # The file names all that is needed: what it does not name, such as a framework for GPUs, is not installed.
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallationError(
                f"{server.name} cannot be installed, leave it out with --peers: {done.stderr.strip()}"
            )
        installed.write_text(wanted, encoding="utf-8")
    return python


def version_of(server: Server, folder: Path) -> str:
    """Create a server's environment, and return the installed packages with versions. Raise InstallationError."""
    command = [str(interpreter(server, folder)), "-c", _VERSION, server.package]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return f"{server.package} {done.stdout.strip()}"
