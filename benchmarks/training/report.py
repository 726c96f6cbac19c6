"""RESULTS.md: what was reached, beside the goals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.machine import Conditions, machine
from benchmarks.markdown import table, verdict
from benchmarks.spread import Spread
from benchmarks.training.contenders import CONTENDERS, OURS, OURS_ON_RAY, WARM_UP_STEPS
from benchmarks.training.memory import Holding
from benchmarks.training.throughput import Comparison

GOAL_SPEED, GOAL_SPEED_ON_RAY, GOAL_CPU = 0.99, 0.97, 0.97
GOAL_START, GOAL_START_ON_RAY, GOAL_SECOND_START = 1.0, 3.3, 2.5
GOAL_MEMORY = 0.02
PEERS = tuple(name for name in CONTENDERS if name not in (OURS, OURS_ON_RAY))
_MANY_OTHER_BYTES = 2**20


@dataclass(frozen=True)
class Findings:
    """All that a run of the benchmark found."""

    comparisons: Sequence[Comparison]
    holdings: Sequence[Holding]
    versions: str
    conditions: Conditions


def report(found: Findings) -> str:
    """The whole of RESULTS.md."""
    sections = (_title(found), _goals(found), _speed(found), _memory(found), _GPU)
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _title(found: Findings) -> str:
    rounds = len(found.comparisons[0].rounds)
    return f"""
# Training: results

`python -m benchmarks.training --rounds {rounds}`.
{machine()}. {found.versions}.
{found.conditions} A load above 0.5 before
the run means that other work used part of the cores. Single figures are then unreliable; ratios of consecutive
runs are more reliable."""


def _goals(found: Findings) -> str:
    rows = [
        _least("steps/s / the best peer's", GOAL_SPEED, _over_peers(found, Comparison.speed_ratio, OURS)),
        _least(
            "steps/s as a job on Ray / the best peer's",
            GOAL_SPEED_ON_RAY,
            _over_peers(found, Comparison.speed_ratio, OURS_ON_RAY),
        ),
        _most("CPU seconds a step / the best peer's", GOAL_CPU, _over_peers(found, Comparison.cpu_ratio, OURS)),
        _most("time to the first step / torchrun's", GOAL_START, _over_torchrun(found, OURS)),
        _most(
            "the same as the first job on a fresh Ray cluster", GOAL_START_ON_RAY, _over_torchrun(found, OURS_ON_RAY)
        ),
        _most(
            "the same as the second job from the same folder",
            GOAL_SECOND_START,
            [comparison.second_start_ratio("torchrun").median for comparison in found.comparisons],
        ),
        _memory_goal(found, "bytes that a rank holds / the formula", accumulates=False),
        _memory_goal(found, "the same where micro-batches are added up", accumulates=True),
        ("MFU of 350 M and 1.3 B parameters on one H100", "≥ 0.50", "measured by benchmarks/gpu/run.sh", "open"),
    ]
    return (
        table(("what", "goal", "reached", ""), rows)
        + "\n\nRatios are medians over the rounds, for the worse of the two cases. The best peer is the one against "
        "which Rayloom's ratio is worst. The sections below explain the misses."
    )


_Ratio = Callable[[Comparison, str, str], Spread]


def _over_peers(found: Findings, ratio: _Ratio, ours: str) -> list[float]:
    """Return the median ratio to each peer in each case."""
    return [ratio(comparison, peer, ours).median for comparison in found.comparisons for peer in PEERS]


def _over_torchrun(found: Findings, ours: str) -> list[float]:
    return [comparison.start_ratio("torchrun", ours).median for comparison in found.comparisons]


def _least(what: str, goal: float, ratios: list[float]) -> tuple[str, ...]:
    return what, f"≥ {goal}", f"{min(ratios):.3f}", verdict(min(ratios) >= goal)


def _most(what: str, goal: float, ratios: list[float]) -> tuple[str, ...]:
    return what, f"≤ {goal}", f"{max(ratios):.3f}", verdict(max(ratios) <= goal)


def _memory_goal(found: Findings, what: str, accumulates: bool) -> tuple[str, ...]:
    measured = [holding for holding in found.holdings if (holding.accumulation > 1) == accumulates]
    largest = max(measured, key=lambda holding: holding.difference)
    return what, f"≤ +{GOAL_MEMORY:.0%}", _described(largest), verdict(largest.difference <= GOAL_MEMORY)


def _described(holding: Holding) -> str:
    return f"{holding.difference:+.1%} (ZeRO {holding.stage} on {holding.workers})"


def _speed(found: Findings) -> str:
    rows = [row for comparison in found.comparisons for row in _speed_rows(comparison)]
    header = (
        *("case", "contender", "steps/s", "Rayloom / it", "CPU, ms a step", "Rayloom / it"),
        *("first step, s", "Rayloom / it", "loss"),
    )
    seconds = ", ".join(f"{comparison.preparation_s:.1f} s" for comparison in found.comparisons)
    return f"""
## Compared with DeepSpeed under torchrun and under accelerate

{table(header, rows)}

Each cell is a median, with the minimum and maximum. Ratios are computed within each round, and the table has their
median. All contenders use two processes and the same GPT, batches, ZeRO stage, clipping and optimizer (AdamW, fused).
They take turns, and each round starts with a different one. Rayloom runs as in normal use, with its log, metrics,
TensorBoard files and watchdog. It runs in two ways: with torchrun and without Ray,
`torchrun -m app.training recipes/stdlib_gpt.yaml KEY=VALUE…`, and as a job on its own Ray cluster on this machine,
`rayloom submit train` with the same arguments. The peers, [bare_deepspeed.py](bare_deepspeed.py) and
[with_accelerate.py](with_accelerate.py), only train and print a loss every 50 steps.

- **steps/s**: steps / wall time, from the first recorded step ≥ {WARM_UP_STEPS} to the last recorded step. The peers'
  scripts record when each step ends. Rayloom's times are those of its TensorBoard records. Validation and checkpoints
  come after the last step.
- **CPU**: CPU time of all processes on the machine between the same two steps, sampled every 50 ms. On Ray it includes
  Ray's own processes.
- **first step**: from the start of the command to the end of step 1. The Ray cluster has started, and has run no job.
  Rayloom's time includes tokenizing the text ({seconds}, measured separately). The peers read blocks that already
  exist.
- **loss**: mean over all ranks and all steps after step {WARM_UP_STEPS}. Rayloom and torchrun train on the same batches
  in the same order, with equal losses. accelerate distributes the samples of each batch differently over the ranks. The
  first four losses agree to four digits. After that, rounding differences grow, because early training is unstable.
  With accelerate's sample assignment, a plain DeepSpeed script reproduces its losses exactly (30 steps of the larger
  case).
- DeepSpeed normally compiles an inference kernel on CPUs, which takes a minute. The peers skip it, as Rayloom does.
  accelerate needs an explicit `gloo` backend. By default, on CPUs, DeepSpeed under accelerate runs each process as a
  world of size 1.

**As a job on Ray** the goal is missed, largely because Ray's own processes share the cores with the workers. They
were sampled for 30 s in a separate run of the larger case on 2026-12-01. They used 0.21 of a core, and 0.10 before
the job. The dashboard, its agent, the GCS, Ray Train's controller and the log monitor used 0.02 each, and ten others
the rest. A timer also wakes every Ray actor 100 times a second. In the larger case a worker had 782 involuntary
context switches a second on Ray, and 299 under torchrun (2026-12-01, over 12 s). The workers wait for each other in
every step, so a delay of one delays both. On another machine, whose CPU trained twice as fast, the ratio was 0.950
(2026-11-25).

Lowering the priority of Ray's processes does not reliably help, so Rayloom does not do it. On 2026-12-01, one run of
each case switched between default and lowered priority every 8 s. With the dashboard, its agents and the log monitor
at nice 10, the median rate was 1.07 times the default in the small case, and 0.99 times in the larger one. With
`SCHED_BATCH` for all of Ray's processes except the workers, it was 1.06 and 1.02 times the default. Each setting was
measured in 10 to 13 intervals. Rates within a setting varied by a factor of up to 1.6."""


def _speed_rows(measured: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            measured.case.name,
            name,
            str(measured.steps_per_s(name)),
            "" if name == OURS else str(measured.speed_ratio(name)),
            f"{1000 * measured.cpu_s_per_step(name).median:.1f}",
            "" if name == OURS else str(measured.cpu_ratio(name)),
            str(measured.first_step_s(name)),
            "" if name == OURS else str(measured.start_ratio(name)),
            f"{measured.loss(name):.3f}",
        )
        for name in CONTENDERS
    ]


def _memory(found: Findings) -> str:
    header = ("ZeRO", "workers", "micro-batches", "paper", "held", "difference", "other tensors")
    rows = [
        (
            str(holding.stage),
            str(holding.workers),
            str(holding.accumulation),
            str(holding.expected),
            str(holding.held),
            f"{holding.difference:+.1%}",
            f"{holding.other_bytes / 2**20:,.0f} MiB" if holding.other_bytes > _MANY_OTHER_BYTES else "",
        )
        for holding in found.holdings
    ]
    return f"""
## Memory of a rank

The table shows bytes per model parameter: parameters + gradients + optimizer state, in bf16 with AdamW, on the rank
that holds the most. They are measured in the running engine between the backward pass and the optimizer step. Each
tensor storage is counted once. The formula is from the ZeRO paper
([arXiv:1910.02054](https://arxiv.org/abs/1910.02054), figure 1): 2 Ψ + 2 Ψ + 12 Ψ. Stage 1 divides the third term by
the number of workers, stage 2 also the second, stage 3 all three. With gradient accumulation the sums are float32, and
the second term is 4 Ψ.

{table(header, rows)}

Differences from the formula:

- **ZeRO 0**: gradients are summed in float32 (4 Ψ) for any number of micro-batches.
- **ZeRO 1 without accumulation**: it holds less. DeepSpeed frees each gradient after reducing it, in stage 1 as in
  stage 2.
- **Gradients of stages 1 and 2 on 4 workers**: a parameter that spans two ranks' partitions is kept whole on both.
- **Several micro-batches**: Rayloom accumulates gradients in float32, and frees each bf16 gradient after adding it.
- **Other tensors of ZeRO 3**: one bucket of `reduce_bucket_size` elements. Rayloom sets it to 1/64 of the model, but at
  least 1 Mi elements. DeepSpeed's default is 5·10⁸ elements. Stages 1 and 2 use such buckets during the backward pass
  only, and two of them with `overlap_comm`. [MEMORY.md](MEMORY.md) has the peak memory of a rank."""


_GPU = """
## On a GPU

`make bench-training` runs on CPUs and does not measure this. On a machine with a GPU, run:

    torchrun --nproc-per-node 1 -m benchmarks.gpu.pretraining benchmarks/gpu/gpt_{350m,1_3b}.yaml

It prints tokens/s, MFU and peak memory of both models in bf16. Try also
`train.plan.activation_checkpointing=true` and `train.torch_compile=false`. The goal is an MFU of at least 0.50 on one
H100-class GPU."""
