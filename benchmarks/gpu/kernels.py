"""The kernels of a training step, by share of the device's time."""

from itertools import islice

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from app.config import load_recipe
from app.training.activity import Activity
from app.training.worker import start_worker
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.pretraining import SMALL, start_engine

_RECIPE = "benchmarks/gpu/gpt_350m.yaml"
_WARM_UP, _PROFILED = 3, 2
_SHOWN = 12
_MAX_NAME = 90


def measure(bench: Bench) -> None:
    """Profile two eager steps of GPT 350M, and record the kernels that take the most time."""
    recipe = load_recipe(_RECIPE, ["train.torch_compile=false", *(SMALL if bench.is_small else ())])
    worker = start_worker(recipe.train)
    engine, batches = start_engine(recipe, worker, _WARM_UP + _PROFILED)
    for _ in range(_WARM_UP):
        engine.train_step(iter(batches), Activity())
    on_gpu = bench.device == "gpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(_PROFILED):
            engine.train_step(iter(batches), Activity())
    # On a GPU, an operator's time is that of its kernels, which have their own rows.
    times = {
        event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total
        for event in profiler.key_averages()
        if not on_gpu or (event.device_type == DeviceType.CUDA and not event.is_user_annotation)
    }
    total = sum(times.values())
    for name in islice(sorted(times, key=lambda name: -times[name]), _SHOWN):
        bench.figure(name[:_MAX_NAME], 100 * times[name] / total, "%")
    engine.deepspeed.destroy()
