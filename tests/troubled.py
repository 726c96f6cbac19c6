"""An engine that waits and fails on demand, and clients that observe it."""

import threading

import httpx
import numpy as np

from app.engines.base import Engine, Signature
from app.errors import EngineError
from app.tensors import OUTPUT, Tensors
from tests.engine_contract import rows
from tests.serving import Server
from tests.toy import body, expected, is_right

POISON = 2
"""A text that begins with this token the engine cannot run, or runs to no number, as the test says."""


class Troubled:
    """An engine that waits in every call until ``go`` is set, and that ``POISON`` is poison to.

    It waits in calls with blank requests, as checks send them, until ``well`` is set, too.
    """

    name, version = "troubled", "1"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.go, self.well, self.raises = threading.Event(), threading.Event(), False
        self.calls: list[int] = []
        """The rows of each call that was begun."""
        self.blanks = 0
        """How many of these were blank."""
        self.go.set()
        self.well.set()

    @property
    def signature(self) -> Signature:
        return self._engine.signature

    def infer(self, inputs: Tensors) -> Tensors:
        poisoned = inputs["input_ids"][:, 0] == POISON
        self.calls.append(len(poisoned))
        self.go.wait()
        if (inputs["input_ids"] == 1).all():
            self.blanks += 1
            self.well.wait()
        if self.raises and poisoned.any():
            raise EngineError("the engine failed on a batch: it was poisoned")
        outputs = dict(self._engine.infer(inputs))
        outputs[OUTPUT][poisoned] = np.nan
        return outputs

    run = infer

    def close(self) -> None:
        self._engine.close()


def ask(server: Server, tensors: Tensors, **parameters: object) -> httpx.Response:
    return httpx.post(f"http://{server.http}/v2/models/toy/infer", json=body(tensors, **parameters), timeout=60)


def answers(server: Server) -> bool:
    """Whether it does, and rightly."""
    answer = ask(server, rows(1))
    return answer.status_code == 200 and is_right(answer.json(), expected(rows(1)))
