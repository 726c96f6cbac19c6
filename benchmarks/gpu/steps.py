"""The steps, the most valuable first, because the time may end before the last ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """One step. It runs in its own process."""

    name: str
    proves: str
    measure: str
    """Import string of a function ``measure(bench, **options)``."""
    limit_s: int
    """Seconds after which the step is killed."""
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_gpu: bool = False
    """Whether the step cannot run on a CPU at all."""


def _gpt(name: str, limit_s: int, proves: str, *overrides: str, needs_gpu: bool = False) -> Step:
    """Return the step that trains the recipe whose name ``name`` begins with."""
    options = {"recipe": f"benchmarks/gpu/{name.partition('-')[0]}.yaml", "overrides": overrides}
    return Step(name, proves, "benchmarks.gpu.pretraining:measure_step", limit_s, options, needs_gpu)


def _tests(name: str, limit_s: int, file: str) -> Step:
    return Step(name, f"all tests of {file} pass", "benchmarks.gpu.tests:run", limit_s, {"file": file})


_COMPILED, _EAGER = "train.torch_compile=true", "train.torch_compile=false"
_ZERO_1, _ZERO_3 = "train.plan.zero_stage=1", "train.plan.zero_stage=3"
_RATES = "tokens/s, MFU and memory, beside the floor and the planner's prediction"

STEPS = (
    Step("machine", "the card reaches its data sheet", "benchmarks.gpu.card:measure", 60),
    _gpt("gpt_1_3b-zero1-compiled", 120, "an MFU of 0.50 or more", _ZERO_1, _COMPILED),
    Step("extensions", "DeepSpeed's extensions compile on the machine", "benchmarks.gpu.extensions:measure", 90),
    _tests("training-tests", 180, "tests/gpu/test_train_gpu.py"),
    _gpt("gpt_350m-zero1-eager", 45, _RATES, _ZERO_1, _EAGER),
    Step("exact-resume", "a resumed run computes the same bits", "benchmarks.gpu.resume:measure", 75),
    _tests("engine-tests", 60, "tests/gpu/test_engines_gpu.py"),
    Step("float32", "without TF32 the device holds the gate of fp32", "benchmarks.gpu.inference:measure_float32", 40),
    Step(
        "inference",
        "latency by batch size beside eager PyTorch, a CUDA graph and ONNX Runtime",
        "benchmarks.gpu.inference:measure_latency",
        60,
    ),
    _gpt("gpt_1_3b-zero1-eager", 50, _RATES, _ZERO_1, _EAGER),
    _gpt("gpt_350m-zero1-compiled", 70, "an MFU of 0.50 or more", _ZERO_1, _COMPILED),
    Step(
        "pictures",
        "data stall, pinned memory, fragmentation, power and utilisation of a run",
        "benchmarks.gpu.loading:measure",
        75,
    ),
    _gpt("gpt_350m-fp16", 45, "training in fp16 finds its loss scale", _EAGER, "train.precision=fp16", needs_gpu=True),
    _gpt("gpt_350m-offload", 80, "the optimizer works on the CPU", _EAGER, "train.plan.zero_stage=2",
         "train.plan.offload=cpu"),
    Step("kernels", "where the time of a step goes", "benchmarks.gpu.kernels:measure", 60),
    _gpt("gpt_1_3b-zero3-eager", 50, _RATES, _ZERO_3, _EAGER),
    _gpt("gpt_350m-zero3-eager", 45, _RATES, _ZERO_3, _EAGER),
    _gpt("gpt_1_3b-zero3-compiled", 100, _RATES, _ZERO_3, _COMPILED),
    _gpt("gpt_350m-zero3-compiled", 70, _RATES, _ZERO_3, _COMPILED),
)  # fmt: skip
