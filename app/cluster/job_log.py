"""A job's log as a person wants to see it: Rayloom's lines as they are, and Ray's own left out."""

import re
from collections.abc import Iterator

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_WORKER = re.compile(r"\((?P<process>RayTrainWorker pid=\d+)(?:, ip=\S+)?\) ")
_PROCESS = r"(?:\([^)]+ pid=[^)]+\) )?"
_OF_RAY = re.compile(
    r"\S+ \S+\tINFO job_manager\.py:\d+ -- "  # how the job is started, with its whole command
    r"|Running entrypoint for job "
    rf"|{_PROCESS}INFO \S+ \S+ serve \d+ -- "  # Serve's settings, and that it was started
    r"|\(ServeController pid=\d+\)\s*(?:•|$)"
    rf"|{_PROCESS}I\d+ \S+ +\d+ fork_posix\.cc:\d+\] "  # gRPC, where a process with threads starts another
)


class JobLog:
    """Turns pieces of a job's log into the lines to show. ``ray job logs`` shows the others, too."""

    def __init__(self) -> None:
        self._rest = ""
        self._leader: str | None = None
        self.has_result = False
        """Whether the job has printed its RESULT, which is the last line of its own."""

    def lines(self, piece: str) -> Iterator[str]:
        """Yield the lines that end in this piece."""
        *whole, self._rest = (self._rest + piece).split("\n")
        for line in whole:
            yield from self._shown(line)

    def end(self) -> Iterator[str]:
        """Yield what follows the last line's end."""
        if self._rest:
            yield from self._shown(self._rest)
        self._rest = ""

    def _shown(self, line: str) -> Iterator[str]:
        line = _COLOR.sub("", line).rstrip("\r")
        if _OF_RAY.match(line):
            return
        self.has_result |= line.startswith("RESULT ")
        yield self._without_leader(line)

    def _without_leader(self, line: str) -> str:
        """Leave out the name of the training worker that speaks first: it reports progress for all of them."""
        if not (named := _WORKER.match(line)):
            return line
        self._leader = self._leader or named["process"]
        return line[named.end() :] if named["process"] == self._leader else line
