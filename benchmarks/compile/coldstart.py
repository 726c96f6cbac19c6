"""How long it takes from starting a process to the first answer of a published model."""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch import python
from benchmarks.spread import Spread

PHASES = ("interpreter", "imports", "load", "answer")


@dataclass(frozen=True)
class Start:
    """Seconds that each phase took, in one process."""

    interpreter: float
    """From starting the process to the first line of Python."""
    imports: float
    """Importing Rayloom and its dependencies."""
    load: float
    """Fetching the version's files and comparing their sha256, the tokenizer, the engine, and one row to warm up."""
    answer: float
    """From a text to its embedding."""


@dataclass(frozen=True)
class Starts:
    """The same start, several times over."""

    cache: str
    """The state of OpenVINO's cache: warm or cold."""

    all: Sequence[Start]

    def phase(self, name: str) -> Spread:
        """Seconds of one phase."""
        return Spread(tuple(getattr(item, name) for item in self.all))

    @property
    def load_to_answer(self) -> Spread:
        """Seconds from the begin of loading to the first answer."""
        return Spread(tuple(item.load + item.answer for item in self.all))

    @property
    def whole(self) -> Spread:
        """Seconds from the first line of Python to the first answer, imports included."""
        return Spread(tuple(item.imports + item.load + item.answer for item in self.all))


def measure_starts(storage: Path, model: str, threads: int, text: str, num_rounds: int) -> list[Starts]:
    """Start with a cold and a warm cache in turn.

    Args:
        model: ``NAME/VERSION``, published in ``storage``.
    """
    with tempfile.TemporaryDirectory(prefix="bench-compile-") as temporary:
        warm = Path(temporary) / "warm"
        start_once(storage, model, threads, text, warm)
        cold_ones, warm_ones = [], []
        for number in range(num_rounds):
            cold_ones.append(start_once(storage, model, threads, text, Path(temporary) / f"cold-{number}"))
            warm_ones.append(start_once(storage, model, threads, text, warm))
    return [Starts("cold", cold_ones), Starts("warm", warm_ones)]


def start_once(storage: Path, model: str, threads: int, text: str, cache: Path) -> Start:
    """One process, from its start to the first answer."""
    launched = time.time()
    said = python("benchmarks.compile.first_answer", str(storage), model, str(threads), text, RAYLOOM_CACHE=str(cache))
    stamps = json.loads(said)
    return Start(
        interpreter=stamps["began"] - launched,
        imports=stamps["imported"] - stamps["began"],
        load=stamps["loaded"] - stamps["imported"],
        answer=stamps["answered"] - stamps["loaded"],
    )
