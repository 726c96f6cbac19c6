"""A child process that computes for an event loop, with a two-way channel."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from app.engines.generation.base import GenerationSettings
from app.engines.generation.channel import Failed, Ready, frame, receive
from app.engines.generation.program import Program
from app.errors import EngineError

Role = Literal["serve", "try", "score"]


class Child:
    """A started process, with the processes that it starts. It ends with the thread that started it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin
        assert process.stdout
        self._process, self._commands, self._results = process, process.stdin, process.stdout
        self.version = ""
        """The version of the program's library, known after ``load``."""

    @classmethod
    async def load(
        cls, program: Program, role: Role, folder: Path, settings: GenerationSettings, timeout_s: float
    ) -> Self:
        """Start a program in a role, and have it load a model.

        Raises:
            EngineError: the system refuses the process, or it cannot load the model in time.
        """
        child = await cls._spawn(program, role)
        try:
            # As text, because versions of Python pickle paths differently.
            child.send((str(folder), settings))
            try:
                async with asyncio.timeout(timeout_s):
                    message = await child.receive()
            except EngineError as error:
                raise EngineError(f"{error} before it had loaded {str(folder)!r}{program.remedy}").of(
                    error.rule, error.key
                ) from error
            match message:
                case Ready(version):
                    child.version = version
                    return child
                case Failed(reason):
                    raise EngineError(f"{program.title} cannot load {str(folder)!r}: {reason}").of("engine.not_loaded")
                case other:
                    raise EngineError(f"the engine's process answered {other!r} instead of loading the model").of(
                        "process.unexpected_answer"
                    )
        except TimeoutError:
            await child.end()
            raise EngineError(f"{str(folder)!r} was not loaded within {timeout_s:g} s").of(
                "engine.load_timeout"
            ) from None
        except BaseException:
            await child.end()
            raise

    @classmethod
    async def _spawn(cls, program: Program, role: Role) -> Self:
        """Start a process. Unlike a forked one, it shares no locks and threads with this one."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(*program.command, role, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=program.environment,
                # Ctrl-C in a terminal is for the parent, which may still want answers. As the leader of its group, the
                # process can be killed together with those that it starts.
                start_new_session=True,
            )
        except OSError as error:  # no memory, processes or files are left
            raise EngineError(f"the engine's process cannot be started: {error}").of("process.not_started") from error
        return cls(process)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    def send(self, message: object) -> None:
        """Send a message. If the process has died, the message is lost, and ``receive`` reports the death."""
        if not self._commands.is_closing():
            self._commands.write(frame(message))

    async def receive(self) -> Any:  # whatever the process sent
        """Return the next message. Raises EngineError when the process has died, or sent something else."""
        try:
            return await receive(self._results)
        except asyncio.IncompleteReadError:
            raise EngineError(f"the engine's process {self.pid} died").of("process.died") from None
        except Exception as error:  # reading a pickle may raise anything
            raise EngineError(f"the engine's process {self.pid} sent what cannot be read: {error}").of(
                "process.unreadable"
            ) from error

    def kill(self) -> None:
        """Kill the process and those that it started. ``receive`` then reports its death."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the process, and wait until it has exited."""
        self.kill()
        await self._process.wait()
        self._commands.close()
