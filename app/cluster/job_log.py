"""A job's log as a person wants to see it: Rayloom's lines as they are, and Ray's own left out."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"(?P<process>\([^)]+ pid=\d+[^)]*\)) ")
_WORKER = "(RayTrainWorker "
_OF_RAY = re.compile(
    r"\S+ \S+\tINFO job_manager\.py:\d+ -- "  # how the job is started, with its whole command
    r"|Running entrypoint for job "
    r"|INFO \S+ \S+ serve \d+ -- "  # Serve's settings, and that it was started
    r"|I\d+ \S+ +\d+ fork_posix\.cc:\d+\] "  # gRPC, where a process with threads starts another
)
_OF_SERVE_CONTROLLER = re.compile(r"\s*(?:•|$)")
_BLOCKS = (
    # Ray ends an actor by an exception, which Python reports if it comes while a collected object is cleaned up.
    (re.compile("Exception ignored in: "), re.compile("SystemExit: 1$")),
    # A warning of Python about Ray's own code, and the line of it.
    (re.compile(r"\S+/ray/\S+\.py:\d+: \w*DeprecationWarning: "), re.compile("  ")),
)
"""The first and the last line of what Ray's processes print over several lines."""
_MAX_BLOCK_LINES = 20


@dataclass
class _Block:
    """Lines of one process that are left out once its last one comes, and shown if it does not."""

    last: re.Pattern[str]
    lines: list[str] = field(default_factory=list)


class JobLog:
    """Turns pieces of a job's log into the lines to show: Rayloom's, or with ``shows_all`` also Ray's own."""

    def __init__(self, shows_all: bool = False) -> None:
        self._shows_all = shows_all
        self._rest = ""
        self._leader: str | None = None
        self._blocks: dict[str, _Block] = {}
        self.has_result = False
        """Whether the job has printed its RESULT, which is the last line of its own."""
        self.was_stopped = False
        """Whether its RESULT says that it was paused or stopped. Ray counts such a job as one that succeeded."""

    def lines(self, piece: str) -> Iterator[str]:
        """Yield the lines that end in this piece."""
        # A piece may end within a line.
        *whole, self._rest = (self._rest + piece).split("\n")
        for line in whole:
            yield from self._shown(_COLOR.sub("", line).rstrip("\r"))

    def end(self) -> Iterator[str]:
        """Yield what is left."""
        if self._rest:
            yield from self._shown(_COLOR.sub("", self._rest))
        for block in self._blocks.values():
            yield from block.lines
        self._rest, self._blocks = "", {}

    def _shown(self, line: str) -> Iterator[str]:
        if line.startswith("RESULT {"):
            self.has_result = True
            with suppress(ValueError):  # the line of another program
                self.was_stopped = json.loads(line.removeprefix("RESULT ")).get("status") == "stopped"
        if self._shows_all:
            yield line
            return
        named = _PROCESS.match(line)
        process, text = (named["process"], line[named.end() :]) if named else ("", line)
        if _OF_RAY.match(text) or (process.startswith("(ServeController ") and _OF_SERVE_CONTROLLER.match(text)):
            return
        # The first that speaks reports progress for all of them.
        if process.startswith(_WORKER):
            self._leader = self._leader or process.partition(",")[0].rstrip(")")
            line = text if process.startswith(self._leader) else line
        yield from self._outside_blocks(process, text, line)

    def _outside_blocks(self, process: str, text: str, line: str) -> Iterator[str]:
        # By process, because the log mixes the lines of all processes.
        if process not in self._blocks:
            last = next((last for first, last in _BLOCKS if process and first.match(text)), None)
            if last is None:
                yield line
            else:
                self._blocks[process] = _Block(last, [line])
            return
        block = self._blocks[process]
        block.lines.append(line)
        if block.last.match(text):
            del self._blocks[process]
        # This is no such block, and its lines must not be lost.
        elif len(block.lines) > _MAX_BLOCK_LINES:
            yield from self._blocks.pop(process).lines
