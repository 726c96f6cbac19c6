"""DeepSpeed's C++ and CUDA extensions, compiled before the tests and trainings that need them."""

import time

from app.training.engine.extensions import load_extension
from app.training.worker import import_deepspeed
from benchmarks.gpu.bench import Bench


def measure(bench: Bench) -> None:
    """Compile the CPU optimizer and, for a GPU, the quantizer of ZeRO++. Record the seconds of each."""
    import_deepspeed()
    from deepspeed.ops.op_builder import CPUAdamBuilder, QuantizerBuilder

    for builder in (CPUAdamBuilder, *([] if bench.is_small else [QuantizerBuilder])):
        began = time.monotonic()
        load_extension(builder())
        bench.figure(builder.NAME, time.monotonic() - began, "s")
