"""The tests of ``tests/gpu``, with an outcome for each."""

import os
import sys
from collections import Counter

import pytest

from benchmarks.gpu.bench import Bench

_PROCESSES = 4
"""Number of tests to run in parallel. Imports take most of each test's time."""


class _Outcomes:
    """A pytest plugin that records each test as it ends, and counts skipped tests by reason."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.skipped = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            *_, reason = report.longrepr if isinstance(report.longrepr, tuple) else (str(report.longrepr),)
            self.skipped[str(reason).removeprefix("Skipped: ")] += 1
        elif report.when == "call" or report.failed:  # a fixture fails in another phase
            reason = report.longreprtext.strip().rpartition("\n")[2]
            value = f"{report.outcome}: {reason}" if reason else report.outcome
            self._bench.figure(report.nodeid.partition("::")[2], value, reached=report.passed)


def run(bench: Bench, file: str) -> None:
    """Run the tests of ``file``, several at a time, and record the outcome of each.

    Raises:
        SystemExit: a test failed, or pytest could not run.
    """
    outcomes = _Outcomes(bench)
    # tests/conftest.py sets one process, for machines with few cores.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(_PROCESSES)
    processes = str(1 if bench.is_small else _PROCESSES)
    arguments = [file, "-ra", "--numprocesses", processes, "-p", "no:cacheprovider"]
    code = pytest.main(arguments, plugins=[outcomes])
    for reason, count in outcomes.skipped.items():
        bench.figure(f"skipped: {reason}", count, "tests")
    if code:
        sys.exit(f"pytest ended with {code!r}")
