"""Measurements on this machine: rates of its processors and links, and a few steps of a plan.

Each measurement starts worker processes of its own, as many as the plan has, which compute at the same time.
"""

import multiprocessing
import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from app.config import Recipe
from app.config.plan import Precision
from app.data.prepared import PreparedData
from app.errors import PlanError
from app.models.factory import blueprint_of
from app.models.precision import TORCH_DTYPES
from app.planner.calibration import Calibration, MeasuredPlan, machine_name
from app.planner.enumeration import divisors
from app.planner.search import Candidate
from app.process_state import keep_freed_memory
from app.storage import to_path
from app.tasks import load_prepared
from app.training.activity import Activity
from app.training.data.feed import Feed
from app.training.engine import create_engine
from app.training.plan import TrainingPlan
from app.training.planning.report import plan_keys
from app.training.worker import Worker, leave_process_group, seed_random, start_worker

T = TypeVar("T")
_TIMEOUT_S = 300.0
_MEASURED_S, _MIN_STEPS, _MAX_STEPS = 3.0, 10, 100
"""Seconds that the steps of a plan should take in all, and bounds of their number."""
_SIZES = (2**10, 2**14, 2**18, 2**22)
"""Elements of the all-reduces."""


def measure_machine(workers: int, precision: Precision, threads: int) -> Calibration:
    """Measure a matrix product, memory bandwidth, small operations and all-reduces with ``workers`` processes."""
    found = _run_workers(_measure_rates, workers, threads, precision)
    latency_s, bandwidth = _fit_links([reduction for rates in found for reduction in rates.reductions])
    return Calibration(
        machine=machine_name(),
        workers=workers,
        threads=threads,
        precision=precision,
        # The slowest worker counts, because the others wait for it in every step.
        matmul_flops=min(rates.matmul_flops for rates in found),
        memory_bandwidth=min(rates.memory_bandwidth for rates in found),
        launch_s=max(rates.launch_s for rates in found),
        link_bandwidth=bandwidth,
        link_latency_s=latency_s,
    )


def measure_plan(recipe: Recipe, data: PreparedData, candidate: Candidate, subject: str) -> MeasuredPlan:
    """Run a few steps of a plan on this machine's processors.

    Raises:
        PlanError: a worker failed or did not end.
    """
    planned = recipe.with_plan(candidate.config, workers=candidate.plan.workers, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        data.save(to_path(folder) / "data")
        threads = recipe.train.threads
        # Processors take a second or two to reach their pace: caches fill, and allocations become regular.
        count = min(max(round(_MEASURED_S / candidate.time.step_s), _MIN_STEPS), _MAX_STEPS)
        arguments = planned, str(Path(folder) / "data"), count
        found = _run_workers(_measure_steps, candidate.plan.workers, threads, *arguments)
    tensors = int(candidate.memory.total - candidate.memory.context)
    return MeasuredPlan(
        subject=subject,
        plan=plan_keys(candidate.config),
        step_s=max(steps.step_s for steps in found),
        memory_bytes=max(steps.memory_bytes for steps in found),
        context_bytes=max(steps.memory_bytes - tensors for steps in found),
        predicted_step_s=candidate.time.step_s,
    )


@dataclass(frozen=True)
class _Reduction:
    """An all-reduce, as one of its workers saw it."""

    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class _Rates:
    matmul_flops: float
    memory_bandwidth: float
    launch_s: float
    reductions: list[_Reduction]


@dataclass(frozen=True)
class _Steps:
    step_s: float
    memory_bytes: int


def _run_workers(work: Callable[..., T], workers: int, threads: int, *arguments: Any) -> list[T]:
    """Run ``work`` in ``workers`` processes of one process group, and return what each returned, by rank.

    Raises:
        PlanError: one failed, or did not end in time. The others are ended.
    """
    # Spawned, because torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    pipes, processes = [], []
    try:
        for rank in range(workers):
            receiver, sender = context.Pipe(duplex=False)
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "MASTER_PORT": port}
            # Not a daemon: a daemon may not start loader processes.
            process = context.Process(target=_enter, args=(sender, environment, threads, work, arguments))
            process.start()
            # With the parent's copy closed, the pipe ends when the worker does.
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        return _receive_all(pipes)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _receive_all(pipes: list[Any]) -> list[Any]:
    """Return the answers of all workers. Raise the error of the first that fails, because it makes the others fail.

    Raises:
        PlanError: a worker failed, or did not answer in time.
    """
    answers: dict[Any, Any] = {}
    while missing := [pipe for pipe in pipes if pipe not in answers]:
        ready = wait(missing, _TIMEOUT_S)
        if not ready:
            raise PlanError(
                f"a worker that measures has not answered for {_TIMEOUT_S:g} s: try again on an idle machine"
            ).of("worker.silent")
        answers |= {pipe: _receive(pipe) for pipe in ready}
    return [answers[pipe] for pipe in pipes]


def _receive(pipe: Any) -> Any:
    try:
        answer = pipe.recv()
    except EOFError as error:
        raise PlanError("a worker that measures has died, perhaps for lack of memory: leave out --calibrate").of(
            "worker.died"
        ) from error
    if isinstance(answer, str):
        raise PlanError(f"a worker that measures failed: {answer}").of("worker.failed")
    return answer


def _enter(
    sender: Any, environment: dict[str, Any], threads: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Run ``work`` in this process, and send what it returns, or its error as text."""
    os.environ.update({key: str(value) for key, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(threads)
    try:
        sender.send(work(*arguments))
    except Exception as error:  # the parent says so
        sender.send(f"{type(error).__name__}: {error}")
    finally:
        leave_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _measure_rates(precision: Precision) -> _Rates:
    dist.init_process_group("gloo")
    side = 512
    matrix = torch.ones(side, side, dtype=TORCH_DTYPES[precision])
    product_s = _seconds(lambda: matrix @ matrix)
    large = torch.ones(2**23)
    copied = torch.empty_like(large)
    copy_s = _seconds(lambda: copied.copy_(large))
    small = torch.ones(8)
    launch_s = _seconds(lambda: small + small)
    reductions = _measure_reductions()
    dist.destroy_process_group()
    # A copy reads and writes every byte.
    return _Rates(2 * side**3 / product_s, 2 * large.nbytes / copy_s, launch_s, reductions)


def _seconds(work: Callable[[], Any], repeats: int = 30) -> float:
    """Return the median seconds of ``work``."""
    # The first call warms up.
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _measure_reductions() -> list[_Reduction]:
    """Measure all-reduces by size in groups of neighbours, of each size that divides the workers. All groups run."""
    workers, reductions = dist.get_world_size(), []
    for ranks in divisors(workers)[1:]:
        group, _ = dist.new_subgroups(ranks)  # type: ignore[no-untyped-call]
        for size in _SIZES:
            tensor = torch.ones(size)
            seconds = _seconds(partial(dist.all_reduce, tensor, group=group))
            reductions.append(_Reduction(ranks, tensor.nbytes, seconds))
    return reductions


def _fit_links(reductions: list[_Reduction]) -> tuple[float, float]:
    """Return the latency of a message and the bytes per second of a link: the medians of what each size of group shows.

    A ring sends 2 (n - 1) messages one after the other, each of an n-th of the tensor. The smallest tensor shows the
    latency, and what the largest takes longer the bandwidth. A group is as fast as its slowest worker.
    """
    latencies, bandwidths = [], []
    for ranks in sorted({reduction.ranks for reduction in reductions}):
        worst: dict[int, float] = {}
        for reduction in reductions:
            if reduction.ranks == ranks:
                worst[reduction.nbytes] = max(worst.get(reduction.nbytes, 0.0), reduction.seconds)
        smallest, largest, hops = min(worst), max(worst), 2 * (ranks - 1)
        latencies.append(worst[smallest] / hops)
        # Noise may make the largest message look as fast as the smallest.
        seconds = max(worst[largest] - worst[smallest], 1e-9)
        bandwidths.append(hops / ranks * (largest - smallest) / seconds)
    return (statistics.median(latencies), statistics.median(bandwidths)) if bandwidths else (0.0, 1e12)


def _measure_steps(recipe: Recipe, folder: str, count: int) -> _Steps:
    """Train ``count`` steps on the recipe's data, and return the median of the last half."""
    config = recipe.train
    keep_freed_memory()
    worker = start_worker(config)
    data = load_prepared(recipe, to_path(folder))
    layout = config.layout(worker.size)
    seed_random(config.seed)
    blueprint = blueprint_of(recipe.model, data.facts)
    plan = TrainingPlan.of(recipe, data)
    steps = min(count, plan.epoch_batches)
    engine = create_engine(blueprint, config, layout, steps, plan.objective, plan.deepspeed.get(worker.size))

    activity = Activity()
    feed = Feed(data, config, layout, worker, activity, plan.order(data), plan.augmentation)
    batches = feed.train(1, range(steps))
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.train_step(islice(batches, layout.gradient_accumulation), activity)
        times.append(time.perf_counter() - started)

    feed.close()
    engine.deepspeed.destroy()
    return _Steps(_slowest(worker, statistics.median(times[len(times) // 2 :])), _peak_memory())


def _slowest(worker: Worker, seconds: float) -> float:
    """Return the largest of the workers' ``seconds``."""
    gathered: list[float] = [0.0] * worker.size
    dist.all_gather_object(gathered, seconds)
    return max(gathered)


def _peak_memory() -> int:
    """Return the peak resident bytes of this process. ``getrusage`` would begin with those of its parent."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(match.group(1)) * 1024 if match else 0
