"""What is asked, and what is the right answer: that of ONNX Runtime, run directly."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import onnxruntime

from app.tensors import OUTPUT, Tensors
from benchmarks.serving.client import connect
from benchmarks.serving.processes import ServerError
from benchmarks.serving.wire import Answer, Request, Wire

_AT_ONCE = 16


@dataclass(frozen=True)
class Tolerance:
    """The maximum deviation from the right answer."""

    difference: float | None = 1e-3
    """Maximum difference of a number; None if only the direction counts."""

    cosine: float = 0.9999
    """Minimum cosine similarity of the row."""

    def difference_of(self, given: Answer, expected: Answer) -> str | None:
        """Return a description of the deviation; None if there is none."""
        if given.shape != expected.shape:
            return f"{len(given)} numbers, expected {len(expected)}"
        furthest = float(np.abs(given - expected).max())
        if self.difference is not None and not furthest <= self.difference:
            return f"a number is {furthest:.2g} off, at most {self.difference:g} is allowed"
        cosine = float(given @ expected / np.linalg.norm(given) / np.linalg.norm(expected))
        return None if cosine >= self.cosine else f"a cosine of {cosine:.4f}, at least {self.cosine} is asked for"


EXACT, NARROWED = Tolerance(), Tolerance(difference=None, cosine=0.97)
"""For the same file in float32, and for a variant in a narrower precision that has passed the gates."""


@dataclass(frozen=True)
class Workload:
    """Rows that every server of a race is asked for, each in a request of its own."""

    rows: Sequence[Tensors]
    expected: Sequence[Answer]

    def requests(self, wire: Wire) -> list[Request]:
        """A request for each row."""
        return [wire.request(row) for row in self.rows]

    def check(self, url: str, wire: Wire, tolerance: Tolerance) -> None:
        """Ask for every row, several at once, and compare. Raises ServerError, which names the first that is wrong."""
        with connect(url) as client, ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = list(pool.map(lambda request: ask(client, wire, request), self.requests(wire)))
        for number, (given, expected) in enumerate(zip(answers, self.expected, strict=True)):
            if wrong := tolerance.difference_of(given, expected):
                raise ServerError(f"row {number} is answered wrong: {wrong}")


def ask(client: httpx.Client, wire: Wire, request: Request) -> Answer:
    """One answer. Raises ServerError if there is none, or it is an error or of another form."""
    try:
        response = client.post(request.path, content=request.body, headers=dict(request.headers))
    except httpx.HTTPError as error:
        raise ServerError(f"{request.path} does not answer: {error!r}") from error
    if response.is_error:
        raise ServerError(f"{request.path} answered {response.status_code}: {response.text[:500]}")
    try:
        return wire.answer(response)
    except (KeyError, ValueError) as error:
        raise ServerError(f"{request.path} answered in another form: {response.content[:500]!r}") from error


def workload(onnx: Path, rows: Sequence[Tensors]) -> Workload:
    """The rows with the answers of an ONNX file, each asked for alone."""
    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    return Workload(rows, [session.run([OUTPUT], dict(row))[0].ravel() for row in rows])
