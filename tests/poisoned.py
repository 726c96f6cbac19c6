"""The process of an engine that dies while it answers a prompt that begins with ``POISON`` or ``LATE_POISON``."""

import os
import signal

from app.engines.generation import openvino
from app.engines.generation.base import Sampling
from app.engines.generation.channel import Step
from app.engines.generation.service import run, serving

POISON, LATE_POISON = 299, 298
_TOKENS = {POISON: 0, LATE_POISON: 12}
"""Tokens of the answer before the process dies, by the first token of the prompt."""


class _Poisoned(openvino.Pipeline):
    _left: dict[int, int]

    def start(self, request: int, prompt: tuple[int, ...], sampling: Sampling) -> None:
        super().start(request, prompt, sampling)
        self._left = getattr(self, "_left", {})
        if prompt[0] in _TOKENS:
            self._left[request] = _TOKENS[prompt[0]]

    def step(self) -> Step:
        if any(self._left.get(request, 1) <= 0 for request in self._answers):
            os.kill(os.getpid(), signal.SIGKILL)
        stepped = super().step()
        for progress in stepped.progress:
            if progress.request in self._left:
                self._left[progress.request] -= len(progress.tokens)
        return stepped


if __name__ == "__main__":
    run({"serve": serving(_Poisoned), "try": openvino.try_grammars})
