"""Servers in processes of their own: started, waited for, and gone with all that they have started."""

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

_MARK = "RAYLOOM_BENCH_SERVER"
"""The environment variable that every process of a server inherits; its value is the server's own."""

_START_TIMEOUT_S, _STOP_TIMEOUT_S = 120.0, 10.0
_PERIOD_S = 0.1


class ServerError(RuntimeError):
    """A server does not start, or does not answer right."""


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, answers: Callable[[], bool]
) -> Iterator[None]:
    """A server until the end of the block; it begins once ``answers`` says so.

    Args:
        folder: what the server starts in; its log is ``server.log`` in it.

    Raises:
        ServerError: it ends, or does not answer in time; with the end of its log.
    """
    mark, log = secrets.token_hex(8), folder / "server.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _asks(answers):
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(encoding="utf-8", errors="replace")[-4000:]
                how = "does not answer" if process.poll() is None else f"ended with {process.returncode}"
                raise ServerError(f"{' '.join(command)} {how}:\n{said}")
            time.sleep(_PERIOD_S)
        yield
    finally:
        _end(mark, process)


def _asks(answers: Callable[[], bool]) -> bool:
    try:
        return answers()
    except httpx.HTTPError:
        return False


def _end(mark: str, process: subprocess.Popen[bytes]) -> None:
    """Politely at first; a process that outlives its parent is found by its mark."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)  # before their parents are gone
        _stop([psutil.Process(process.pid)])
        _stop([child for child in children if child.is_running()])
    process.wait()
    while left := _marked(mark):
        _stop(left)


def _stop(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=_STOP_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_STOP_TIMEOUT_S)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or ended while we looked
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
