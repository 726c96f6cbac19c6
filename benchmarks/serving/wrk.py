"""Load by ``wrk``: so many connections, each of which sends its next request once the last one is answered.

https://github.com/wg/wrk
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel

from benchmarks.serving.load import TIMEOUT_S, CpuTimes, Generator, Load
from benchmarks.serving.wire import Request

WRK = Generator("wrk", package="wrk")
_SCRIPT = Path(__file__).with_name("requests.lua")
_MARK = "REPORT "


class Report(BaseModel):
    """The output of the script."""

    requests: int
    """Answers, of any status."""

    duration_us: int
    p50_us: int
    p99_us: int
    refused: int
    """Answers with status 400 or more."""

    connect: int
    read: int
    write: int
    timeout: int


def drive(url: str, requests: Sequence[Request], connections: int, seconds: int) -> Load:
    """Send the requests in turn, again and again.

    Args:
        url: scheme, host and port.

    Raises:
        GeneratorMissingError: wrk is not installed.
        RuntimeError: it fails, or nothing was answered.
    """
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as temporary:
        files = [Path(temporary) / str(number) for number in range(len(requests))]
        for file, request in zip(files, requests, strict=True):
            file.write_bytes(request.raw(urlsplit(url).netloc))
        arguments = ["--threads=1", f"--connections={connections}", f"--duration={seconds}s"]
        arguments += [f"--timeout={TIMEOUT_S}s", f"--script={_SCRIPT}", url, "--", *map(str, files)]
        return parse(*WRK.run(arguments))


def parse(output: str, spent: CpuTimes) -> Load:
    """Return the load that wrk printed, with the CPU time spent meanwhile.

    Raises:
        RuntimeError: it printed no report, or nothing was answered.
    """
    line = next((line for line in output.splitlines() if line.startswith(_MARK)), None)
    if line is None:
        raise RuntimeError(f"wrk printed no report: {output}")
    report = Report.model_validate_json(line.removeprefix(_MARK))
    if not report.requests:
        raise RuntimeError(f"nothing was answered: {report}")
    return Load(
        rate=(report.requests - report.refused) / (seconds := report.duration_us / 1e6),
        p50_ms=report.p50_us / 1e3,
        p99_ms=report.p99_us / 1e3,
        errors=report.refused + report.connect + report.read + report.write + report.timeout,
        generator_busy=spent.children_s / seconds,
        stolen=spent.stolen_s / seconds,
        cpu_us=1e6 * spent.machine_s / report.requests,
    )
