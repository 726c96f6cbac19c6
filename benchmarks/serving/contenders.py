"""Who is timed: a model server each, started with a model behind it and driven at an address."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from benchmarks.serving.wire import Wire
from benchmarks.serving.workloads import Tolerance


class Contender(Protocol):
    """A server, with a model behind it."""

    @property
    def name(self) -> str:
        """In the report."""
        ...

    @property
    def setting(self) -> str:
        """The settings, for the report."""
        ...

    @property
    def wire(self) -> Wire:
        """The encoding of the requests."""
        ...

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance of its answers."""
        ...

    def serve(self, folder: Path) -> AbstractContextManager[str]:
        """Start it; the value is its address, and the end of the block its end.

        Args:
            folder: empty, for its own files.

        Raises:
            RuntimeError: it does not start.
        """
        ...
