"""Who is timed: an engine each, in a process of its own, where no other's threads are in its way."""

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

from upath import UPath

from app.compile.timing import Concurrency, measure
from app.compile.variants import Variant
from app.config import ComputePrecision
from app.engines.base import Engine, EngineSettings, Signature
from app.engines.registry import open_engine
from app.engines.torch import CompiledTorchEngine, TorchEngine
from app.errors import EngineError
from app.published.weights import load_weights
from app.tensors import Tensors
from benchmarks.compile.models import Setting

BASELINE, EAGER, COMPILED = "ONNX Runtime fp32", "PyTorch eager", "PyTorch torch.compile"
PYTORCH_ENGINES: dict[str, type[TorchEngine]] = {EAGER: TorchEngine, COMPILED: CompiledTorchEngine}
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])  # what all of them import takes a second

Open = Callable[[Concurrency], Engine]
"""Opens a contender's engine; it can be pickled."""


def openvino(precision: ComputePrecision) -> str:
    """The contender's name."""
    return f"OpenVINO {precision}"


def name_of(variant: Variant) -> str | None:
    """The contender that runs a variant; None if it is not timed."""
    if variant.engine == "openvino":
        return openvino(variant.precision)
    return BASELINE if (variant.engine, variant.precision) == ("onnxruntime", "fp32") else None


def contenders(files: Mapping[ComputePrecision, Path], weights: UPath, signature: Signature) -> dict[str, Open]:
    """Every contender by its name.

    Args:
        files: the ONNX file that OpenVINO takes for each precision, and ONNX Runtime for fp32.
    """
    return {
        BASELINE: partial(open_file, "onnxruntime", files["fp32"], "fp32"),
        **{openvino(precision): partial(open_file, "openvino", path, precision) for precision, path in files.items()},
        **{name: partial(_open_module, kind, weights, signature) for name, kind in PYTORCH_ENGINES.items()},
    }


class EngineProcess:
    """A contender in a process of its own."""

    def __init__(self, open_: Open, threads: int, rows: Mapping[Setting, Tensors]) -> None:
        """Start the process, open the engine and run each setting once. Raises EngineError, in the library's words."""
        self._pool = ProcessPoolExecutor(1, _PROCESSES)
        self._concurrency = Concurrency(threads, streams=1)
        try:
            self._pool.submit(_open_here, open_, self._concurrency).result()
            for setting, some in rows.items():
                self.latency_ms(setting, some)
        except BaseException:
            self._pool.shutdown()
            raise

    def latency_ms(self, setting: Setting, rows: Tensors) -> float:
        """The median of a few calls, as compile measures them; one before them is not counted."""
        return self._pool.submit(_measure_here, self._concurrency, setting, rows).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


_here: list[Engine] = []
"""In a contender's process: its engine."""


def _open_here(open_: Open, concurrency: Concurrency) -> None:
    _here.append(open_(concurrency))


def _measure_here(concurrency: Concurrency, setting: Setting, rows: Tensors) -> float:
    (engine,) = _here
    try:
        (point,) = measure(engine, concurrency, (setting.batch_size,), {setting.length: rows}, min_calls=3)
    except Exception as error:  # compilers have many error classes, not all of which can be pickled
        raise EngineError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from None
    return point.latency_ms


def open_file(engine: str, path: Path, precision: ComputePrecision, concurrency: Concurrency) -> Engine:
    """A compiled file's engine. Raises EngineError."""
    return open_engine(engine, path, EngineSettings(precision, concurrency.threads, concurrency.streams))


def _open_module(kind: type[TorchEngine], weights: UPath, signature: Signature, concurrency: Concurrency) -> Engine:
    return kind(load_weights(weights).model, signature, EngineSettings("fp32", concurrency.threads))
