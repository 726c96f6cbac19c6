"""TensorRT and TensorRT for RTX behind one interface, each loaded once per process."""

import functools
import importlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import ModuleType
from typing import Any, Literal

from app.errors import EngineError

Flavour = Literal["tensorrt", "tensorrt_rtx"]

# TensorRT for RTX has two wheels on PyPI: importing the first loads the libraries that the second is linked with.
_MODULES: dict[Flavour, tuple[tuple[str, ...], ...]] = {
    "tensorrt": (("tensorrt",),),
    "tensorrt_rtx": (("tensorrt_rtx",), ("onnxruntime_ep_nv_tensorrt_rtx", "tensorrt_rtx_bindings")),
}
EXTRAS: dict[Flavour, str] = {"tensorrt": "tensorrt", "tensorrt_rtx": "rtx"}
"""The extra of this package that installs each."""

_MESSAGES_KEPT = 100


class Library:
    """One flavour of TensorRT: its module, its version, and the only logger that a process may have."""

    def __init__(self, flavour: Flavour, trt: Any) -> None:
        self.flavour = flavour
        self.trt = trt
        self.version = str(trt.__version__)
        self.messages: deque[str] = deque(maxlen=_MESSAGES_KEPT)
        self.logger = _logger(trt, self.messages)
        self._lock = Lock()

    @property
    def targets(self) -> tuple[str, ...]:
        """The compute capabilities that it builds for without that GPU; empty if it builds only for this machine's."""
        named = getattr(self.trt, "ComputeCapability", None)
        return tuple(name for name in named.__members__ if name.startswith("SM")) if named else ()

    @property
    def compiles_when_run(self) -> bool:
        """True if it compiles kernels, and captures graphs, when a plan first runs, as TensorRT for RTX does."""
        return hasattr(self.trt, "IRuntimeCache")

    @contextmanager
    def errors(self) -> Iterator[deque[str]]:
        """Collect the library's error messages, which are its only diagnosis.

        One caller at a time, because all share the logger.
        """
        with self._lock:
            self.messages.clear()
            yield self.messages


@functools.cache
def load_library(flavour: Flavour) -> Library:
    """Import a flavour of TensorRT. Raises EngineError if it or a library that it is linked with is missing."""
    reasons = []
    for names in _MODULES[flavour]:
        try:
            modules: list[ModuleType] = [importlib.import_module(name) for name in names]
            return Library(flavour, modules[-1])
        except (ImportError, OSError) as error:
            reasons.append(str(error))
    raise EngineError(
        f"{flavour} cannot be loaded ({'; '.join(reasons)}): pip install '.[{EXTRAS[flavour]}]' in the checkout"
    ).of("engine.not_installed")


def _logger(trt: Any, errors: deque[str]) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                errors.append(message)

    return Log()
