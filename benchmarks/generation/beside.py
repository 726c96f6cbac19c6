"""A classifier's latency beside a language model, and beside a load of the same size that is none."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

from app.ports import LOOPBACK
from benchmarks.generation.endpoint import Served, served
from benchmarks.generation.material import LENGTH, PROMPT_TOKENS, Material, prompts
from benchmarks.markdown import Goal, verdict
from benchmarks.serving.models import Models
from benchmarks.serving.steady import Times, ask_steadily
from benchmarks.serving.wire import BinaryTensors
from benchmarks.spread import Spread

_STREAMS, _RATE, _SECONDS, _ROUNDS = 16, 100.0, 20.0, 3
_WARM_S = 3.0
_CACHE_MB = 1024
"""Enough for all streams at their full length."""
_GOAL = 1.5
_BURN = """
import numpy as np
matrix = np.ones((512, 512), np.float32)
while True:
    matrix @ matrix
"""
"""A load of one thread, as the engine's."""


@dataclass(frozen=True)
class Beside:
    """A classifier's latencies, in turns."""

    streams: tuple[Times, ...]
    load: tuple[Times, ...]
    """Beside a process that multiplies matrices with one thread."""
    alone: Times
    title: ClassVar[str] = "A classifier beside streams"

    @property
    def goals(self) -> Iterator[Goal]:
        """The goal of this part."""
        ratio = _p99(self.streams).over(_p99(self.load))
        what = f"p99 of the tiny CNN beside {_STREAMS} streams / beside another load of 1 thread"
        yield Goal(what, f"≤ {_GOAL}", str(ratio), verdict(ratio.median <= _GOAL))

    @property
    def summary(self) -> str:
        """A sentence that describes the run."""
        return (
            "One process serves the tiny CNN and the language model, whose engine has 1 thread. The CNN gets "
            f"{_RATE:.0f} requests per second for {_SECONDS:.0f} s, {len(self.streams)} times in turns. Its p99 is "
            f"{_p99(self.streams)} ms with {_STREAMS} streams, {_p99(self.load)} ms with a process that multiplies "
            f"matrices with 1 thread, and {self.alone.p99_ms:.3f} ms without either."
        )


def _p99(times: tuple[Times, ...]) -> Spread:
    return Spread(tuple(one.p99_ms for one in times))


def time_beside(material: Material) -> Beside:
    """Ask the classifier in turns beside both loads. It is trained if it does not exist yet."""
    models = Models(material.folder.absolute() / "classifier")
    wire, rows = BinaryTensors(models.cnn.name), models.pictures
    streams, load = list[Times](), list[Times]()
    with served(material, _CACHE_MB, models.cnn.storage) as server:
        url, requests = f"http://{LOOPBACK}:{server.port}", [wire.request(row) for row in rows]

        def ask() -> Times:
            return ask_steadily(url, requests, _RATE, _SECONDS)

        ask_steadily(url, requests, _RATE, _WARM_S)
        alone = ask()
        for number in range(_ROUNDS):
            turns = ((_streaming(server), streams), (_burning(), load))
            for running, times in turns if number % 2 else reversed(turns):
                with running:
                    time.sleep(_WARM_S)
                    times.append(ask())
                    print(f"beside {'streams' if times is streams else 'another load'}: {times[-1]}", flush=True)
    return Beside(tuple(streams), tuple(load), alone)


@contextmanager
def _streaming(server: Served) -> Iterator[None]:
    """Keep streams open in another process until the end of the block."""
    tokens = LENGTH - PROMPT_TOKENS
    bodies = [
        {"model": "fp32", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        for prompt in prompts(_STREAMS).tolist()
    ]
    command = [sys.executable, "-m", "benchmarks.generation.client", LOOPBACK, str(server.port), "/v1/completions"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as client:
        assert client.stdin is not None
        client.stdin.write(json.dumps(bodies) + "\n")
        client.stdin.flush()
        yield
        if client.poll() is not None:
            raise RuntimeError("the streams ended before the measurement")
        client.kill()


@contextmanager
def _burning() -> Iterator[None]:
    """Use one core until the end of the block."""
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BURN], env={"OMP_NUM_THREADS": "1"}))
        yield
        process.kill()
