"""The view of a job's log: a spinner and bars on a terminal, plain lines elsewhere."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, Self

from app.cluster.queue import Place

Detail = Literal["quiet", "normal", "verbose"]
"""Show the result, warnings and errors; all lines of the job; also Ray's own lines."""

_ALWAYS = ("RESULT {", "error: ", "warning: ")
_HEADING = "── "
"""How the first line of each step of a lifecycle begins."""
_BARS = (
    re.compile(r"(?P<what>epoch \d+/\d+)  step (?P<done>[\d,]+)/(?P<total>[\d,]+)  (?P<rest>.*)"),
    re.compile(r"(?P<what>epoch) (?P<done>[\d,]+)/(?P<total>[\d,]+)  (?P<rest>loss .*)"),
    re.compile(r"(?P<what>.+): (?P<done>\d+) of (?P<total>\d+) parts, (?P<rest>.*)"),
)
"""Progress lines. Each replaces the one before."""
_STEPS = re.compile(r"(?P<what>variant|trials) (?P<done>\d+)/(?P<total>\d+)  (?P<rest>.*)")
"""Progress between lines that stay. It is not kept after them."""


class JobView:
    """Shows the lines of a job's log. Use it as a context manager."""

    def __init__(self, detail: Detail = "normal") -> None:
        self.detail = detail
        self._bar: Any = None
        self._last: str | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.detail == "normal" and _is_terminal(sys.stdout):
            self._bar = self._stack.enter_context(_progress())
            self._task = self._bar.add_task("starting the job", total=None, rest="")
        return self

    def __exit__(self, *_: object) -> None:
        self._keep_last()
        self._stack.close()
        self._bar = None

    def show(self, line: str) -> None:
        """Show a line of the job. Progress replaces earlier progress on a terminal."""
        if self.detail == "quiet" and not line.startswith(_ALWAYS):
            return
        place = Place.of_line(line)
        line = place.sentence if place else line
        if self._bar is None:
            print(line, flush=True)
        elif found := next((match for bar in _BARS if (match := bar.fullmatch(line))), None):
            self._show_bar(found)
            self._last = line
        else:
            self._keep_last()
            if found := _STEPS.fullmatch(line):
                self._show_bar(found)
                return
            if line.startswith(_HEADING):
                self._show_spinner()
            self._print(line)

    def _show_bar(self, found: re.Match[str]) -> None:
        done, total = (int(found[name].replace(",", "")) for name in ("done", "total"))
        what = found["what"]
        # Drawn at once where another bar begins: a short one could end before the next regular drawing.
        is_new = self._bar.tasks[self._task].description != what
        self._bar.update(self._task, description=what, completed=done, total=total, rest=found["rest"], refresh=is_new)

    def _show_spinner(self) -> None:
        self._bar.reset(self._task, description="working", total=None, rest="")

    def _keep_last(self) -> None:
        """Print the last progress line, and reset the bar to a spinner."""
        if self._bar is not None and self._last is not None:
            self._print(self._last)
            self._show_spinner()
            self._last = None

    def _print(self, line: str) -> None:
        self._bar.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner beside ``text`` within the block, on a terminal."""
    if not _is_terminal(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def _is_terminal(stream: Any) -> bool:
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def _progress() -> AbstractContextManager[Any]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    what, rest = (TextColumn(f"{{task.{text}}}", markup=False) for text in ("description", "fields[rest]"))
    return Progress(SpinnerColumn(), what, BarColumn(20), rest, TimeElapsedColumn(), transient=True)
