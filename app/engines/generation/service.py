"""The loop of an engine's process: it reads commands from its standard input, and answers on its standard output.

An engine's environment may lack Rayloom's dependencies, so this module imports only the standard library.
"""

import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from app.engines.generation.base import GenerationSettings, Sampling
from app.engines.generation.channel import Begun, Cancel, Failed, Ready, Refused, Start, Step

_PR_SET_PDEATHSIG = 1

Role = Callable[[Path, GenerationSettings, Connection, Connection], None]
"""Serves the parent with a model. Arguments: the model's folder, settings, and connections for commands and results."""


class Runtime(Protocol):
    """A loaded model with the answers that it generates."""

    @property
    def version(self) -> str:
        """The version of the library."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a step has work."""
        ...

    def start(self, request: int, prompt: tuple[int, ...], sampling: Sampling) -> None:
        """Add an answer. Raises an error of any class if it cannot be generated."""
        ...

    def cancel(self, request: int) -> None:
        """Give up an answer. A later step frees its cache."""
        ...

    def begin_waiting(self) -> Iterable[Begun | Refused]:
        """Begin those answers that there is room for. Called before each step."""
        ...

    def step(self) -> Step:
        """Generate the next tokens. Raises an error if the runtime is broken for good."""
        ...


class _Commands:
    """Reads the commands of the parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def receive(self, wait: bool) -> Any:  # whatever the parent sent
        """Return the next command; None if there is none yet. Raises EOFError when the parent has exited."""
        return self._connection.recv() if self._poll.poll(None if wait else 0) else None


def serving(load: Callable[[Path, GenerationSettings], Runtime], reason_of: Callable[[Exception], str] = str) -> Role:
    """Return the role that generates answers until the parent exits, which raises EOFError."""

    def serve(folder: Path, settings: GenerationSettings, connection: Connection, results: Connection) -> None:
        try:
            runtime = load(folder, settings)
            _try_out(runtime)
        except Exception as error:  # a library raises any class for a model that it cannot load
            results.send(Failed(reason_of(error)))
            return
        results.send(Ready(runtime.version))
        commands = _Commands(connection)
        while True:
            while command := commands.receive(wait=not runtime.is_busy):
                match command:
                    case Start(request, prompt, sampling):
                        try:
                            runtime.start(request, prompt, sampling)
                        except Exception as error:  # a value that the bindings refuse raises TypeError
                            results.send(Refused(request, str(error)))
                    case Cancel(request):
                        runtime.cancel(request)
            for message in runtime.begin_waiting():
                results.send(message)
            results.send(runtime.step())

    return serve


def _try_out(runtime: Runtime) -> None:
    """Generate a token. Raises an error if the runtime cannot. A death later on is then a request's fault."""
    runtime.start(0, (0,), Sampling(max_tokens=1))
    while runtime.is_busy:
        for message in runtime.begin_waiting():
            if isinstance(message, Refused):
                raise ValueError(message.reason)
        runtime.step()


def require_prompt(prompt: tuple[int, ...], max_tokens: int, vocab_size: int, room: int) -> None:
    """Raise ValueError if a token is not in the vocabulary, or the answer does not fit in the cache.

    The libraries would accept the tokens, and generate others after them.
    """
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(f"the prompt has token {max(prompt)}: expected 0 to {vocab_size - 1}")
    if (length := len(prompt) + max_tokens) > room:
        raise ValueError(
            f"the prompt and max_tokens have {length:,} tokens together: expected {room:,} at most, which is the size "
            "of the cache"
        )


def limit_memory(further_bytes: int) -> None:
    """Limit the address space of this process to what it has and so many bytes."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + further_bytes, hard))


def _die_with_parent(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        sys.exit()


def run(roles: Mapping[str, Role]) -> None:
    """Serve the parent in the role that the arguments name, with its process id.

    Its first message has the folder and the settings.
    """
    role, parent = sys.argv[1:]
    _die_with_parent(int(parent))
    results = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what a library prints must not look like a message
    commands = Connection(0, writable=False)
    try:
        folder, settings = commands.recv()
        roles[role](Path(folder), settings, commands, results)
    except (EOFError, BrokenPipeError):
        # The parent has exited. Destructors would only delay this exit.
        os._exit(0)
