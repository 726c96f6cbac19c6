"""python -m benchmarks.training.parts FOLDER: what Rayloom's own parts cost in each step, in one process."""

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

from app.telemetry.alerts import Alerts
from app.telemetry.tensorboard import TensorBoardLog
from app.training import loop
from app.training.__main__ import main as train
from app.training.coordination.control import Control
from app.training.coordination.exchange import Exchange
from app.training.coordination.watchdog import Watchdog
from app.training.engine import StepResult
from app.training.reporting.meter import Meter
from app.training.reporting.metrics_log import MetricsLog
from app.training.reporting.recorder import Recorder
from benchmarks.training.cases import CASES, copy_corpus
from benchmarks.training.launch import python

_WARM_UP_STEPS, _STEPS = 50, 300
_ALERT = "alerts=[{when: loss is not finite, do: [notify, stop]}]"


@dataclass(frozen=True)
class Part:
    """One of Rayloom's parts."""

    name: str
    calls_per_step: float
    us_per_step: float
    """Microseconds of this thread's CPU time."""
    is_inner: bool
    """Whether the part before it that is not inner counts it, too."""


@dataclass
class _Stopwatch:
    """Counts the time in some functions once the first steps are over."""

    steps: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Take the time of each call of ``owner.function``; reading the clock adds about a microsecond."""
        original: Callable[..., Any] = getattr(owner, function)

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                if self.steps >= _WARM_UP_STEPS:
                    self.seconds[name] += time.thread_time() - began
                    self.calls[name] += 1

        setattr(owner, function, timed)

    def count_steps(self, owner: Any, function: str) -> None:
        """Take each call of ``owner.function`` for a step."""
        original: Callable[..., Any] = getattr(owner, function)

        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.steps += 1
            return result

        setattr(owner, function, counted)


def measure_parts(folder: Path) -> list[Part]:
    """Train the smallest case in a process of its own, with an alert, and take the time of each part."""
    print("parts", flush=True)
    printed = python("benchmarks.training.parts", str(folder))
    return [Part(**each) for each in json.loads(printed.splitlines()[-1])]


def main() -> None:
    """Measure in this process; the last line printed is what was found, as JSON."""
    folder = Path(sys.argv[1])
    copy_corpus(folder)
    stopwatch = _Stopwatch()
    inner = _watch_all(stopwatch)
    case = replace(CASES[0], steps=_STEPS)
    if train([*case.command(folder), _ALERT]):
        raise SystemExit("the run failed")
    steps = stopwatch.steps - _WARM_UP_STEPS
    parts = [
        Part(name, stopwatch.calls[name] / steps, stopwatch.seconds[name] / steps * 1e6, is_inner)
        for name, is_inner in inner.items()
    ]
    print(json.dumps([vars(each) for each in parts]))


def _watch_all(stopwatch: _Stopwatch) -> dict[str, bool]:
    """Watch every part; their names, and whether each lies inside the one before."""
    watched = (
        (Watchdog, "beat", "watchdog: beats", False),
        (StepResult, "of", "reading norm and scale", False),
        (loop.Loop, "_check_finite", "checking that numbers are finite", False),
        (Meter, "utilisation", "meter: utilisation", False),
        (Exchange, "add", "exchange: noting the step", False),
        (Exchange, "run", "exchange: telling the others", False),
        (Control, "asked", "control: reading the file", False),
        (Recorder, "record_steps", "recorder", False),
        (MetricsLog, "append", "metrics.jsonl", True),
        (TensorBoardLog, "append", "TensorBoard", True),
        (Alerts, "append", "alerts", True),
    )
    for owner, function, name, _ in watched:
        stopwatch.watch(owner, function, name)
    stopwatch.count_steps(loop.Loop, "_step")
    return {name: is_inner for _, _, name, is_inner in watched}


if __name__ == "__main__":
    main()
