"""Load over gRPC by ``h2load``: so many connections, each with one call at a time.

h2load takes about 15 µs of CPU a call, and clients on gRPC's C-core 60 µs or more. It reads no gRPC status. A refused
call has no message, so good answers are counted by the bytes of the messages.
https://nghttp2.org/documentation/h2load.1.html
"""

import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.serving.client import connect
from benchmarks.serving.load import TIMEOUT_S, CpuTimes, Generator, Load
from benchmarks.serving.wire import Request

H2LOAD = Generator("h2load", package="nghttp2-client")
_HEADERS = ("--header=content-type: application/grpc", "--header=te: trailers")
PILOT_CALLS = 50
"""On each connection, to estimate the rate."""

_SUCCEEDED = re.compile(r"^requests: .* (\d+) succeeded,", re.MULTILINE)
_DATA = re.compile(r"^traffic: .* \((\d+)\) data$", re.MULTILINE)


def drive(url: str, requests: Sequence[Request], connections: int, seconds: int) -> Load:
    """Send the first of the requests again and again, because h2load has one body for all its calls.

    A short load estimates how many calls fill the time, and that number is made. A limit in time would cancel calls,
    which has crashed Triton.

    Args:
        url: scheme, host and port.
        seconds: about how long the load takes.

    Raises:
        GeneratorMissingError: h2load is not installed.
        RuntimeError: h2load fails, or nothing was answered.
    """
    with connect(url) as client:
        answer = client.post(requests[0].path, content=requests[0].body)
    if answer.is_error:
        raise RuntimeError(f"{requests[0].path} answered {answer.text}")
    load = partial(_load, urlsplit(url).netloc, requests[0], len(framed(answer.content)), connections)
    pilot = load(PILOT_CALLS * connections)
    return load(max(connections, round(pilot.rate * seconds)))


def _load(address: str, request: Request, answer_bytes: int, connections: int, num_calls: int) -> Load:
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as temporary:
        body, log = Path(temporary) / "body", Path(temporary) / "log"
        body.write_bytes(framed(request.body))
        arguments = [f"--clients={connections}", "--max-concurrent-streams=1", f"--requests={num_calls}"]
        arguments += [f"--connection-inactivity-timeout={TIMEOUT_S}s", f"--log-file={log}", f"--data={body}"]
        output, spent = H2LOAD.run([*arguments, *_HEADERS, f"http://{address}{request.path}"])
        return parse(output, log.read_text(encoding="ascii"), num_calls, answer_bytes, spent)


def framed(message: bytes) -> bytes:
    """Return an uncompressed message with its prefix, as it goes over HTTP/2."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def parse(output: str, log: str, num_calls: int, answer_bytes: int, spent: CpuTimes) -> Load:
    """Return the load that h2load printed.

    Args:
        log: a line for each answer: start in µs, HTTP status or -1, duration in µs.
        num_calls: number of calls that were to be made.
        answer_bytes: size of a good answer, with its prefix.
        spent: CPU time meanwhile.

    Raises:
        RuntimeError: h2load printed no report, or nothing was answered.
    """
    succeeded, data = _SUCCEEDED.search(output), _DATA.search(output)
    if succeeded is None or data is None:
        raise RuntimeError(f"h2load printed no report: {output}")
    lines = np.array([line.split("\t")[:3] for line in log.splitlines()], np.int64).reshape(-1, 3)
    starts_us, _, taken_us = lines[lines[:, 1] >= 0].T
    if not len(taken_us):
        raise RuntimeError(f"nothing was answered: {output}")
    seconds = float((starts_us + taken_us).max() - starts_us.min()) / 1e6
    good = min(int(succeeded[1]), int(data[1]) // answer_bytes)
    p50_us, p99_us = np.percentile(taken_us, [50, 99])
    return Load(
        rate=good / seconds,
        p50_ms=float(p50_us) / 1e3,
        p99_ms=float(p99_us) / 1e3,
        errors=num_calls - good,
        generator_busy=spent.children_s / seconds,
        stolen=spent.stolen_s / seconds,
        cpu_us=1e6 * spent.machine_s / len(taken_us),
    )
