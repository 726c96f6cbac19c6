"""The messages between an engine and its process: pickled, and prefixed with their length."""

import pickle
import struct
from asyncio import StreamReader
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.engines.generation.base import FinishReason, Sampling

_LENGTH = struct.Struct("!i")
"""The header of ``multiprocessing.connection.Connection``, which the process reads and writes with."""


@dataclass(frozen=True)
class Start:
    """Generate an answer."""

    request: int
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Cancel:
    """Give up an answer."""

    request: int


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    version: str
    """The version of the library."""


@dataclass(frozen=True)
class Failed:
    """The model cannot be loaded."""

    reason: str


@dataclass(frozen=True)
class Begun:
    """The next step begins an answer, for which the cache has room."""

    request: int


@dataclass(frozen=True)
class Refused:
    """The pipeline refuses a request."""

    request: int
    reason: str


class Progress(NamedTuple):
    """The new tokens of an answer. Plain tuples are pickled fastest."""

    request: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason | None


class Step(NamedTuple):
    """The result of one step, even if no answer has new tokens: it shows that the process is alive."""

    progress: list[Progress]
    cache_usage: float
    preemptions: int
    """Since the process started."""


def frame(message: object) -> bytes:
    """Return a message as bytes."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


async def receive(reader: StreamReader) -> Any:  # whatever the other side sent
    """Return the next message. Raises asyncio.IncompleteReadError at the end of the stream."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))  # noqa: S301 # our own process wrote it
