"""Peers conflict with each other and with Rayloom, so each has a virtual environment of its own."""

import subprocess
import sys
import venv
from pathlib import Path

PEERS = Path(__file__).with_name("peers")
DEFAULT_FOLDER = Path("~/.cache/rayloom-bench/peers").expanduser()

_VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def interpreter(peer: str, folder: Path) -> Path:
    """The Python that runs a peer: of its own environment, which is made first, or made anew if what it needs changed.

    A peer without ``requirements.txt`` runs on what Rayloom has installed.

    Raises:
        RuntimeError: pip fails; with what it said.
    """
    requirements = PEERS / peer / "requirements.txt"
    if not requirements.exists():
        return Path(sys.executable)
    environment, wanted = folder / peer, requirements.read_text(encoding="utf-8")
    python, installed = environment / "bin/python", environment / "installed.txt"
    if not installed.exists() or installed.read_text(encoding="utf-8") != wanted:
        print(f"{peer}: installing into {environment}", flush=True)
        venv.create(environment, with_pip=True, clear=True)
        # The file names all that is needed: what it does not name, such as a framework for GPUs, is not installed.
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{peer} cannot be installed: {done.stderr.strip()}")
        installed.write_text(wanted, encoding="utf-8")
    return python


def version_of(package: str, python: Path) -> str:
    """The version of a package in an environment."""
    command = [str(python), "-c", _VERSION, package]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
