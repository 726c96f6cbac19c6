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
{found.conditions} Anything above 0.5 before
means that other work took part of the cores, and that single numbers are worth little; ratios of runs
that follow each other are worth more."""


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
        + "\n\nRatios are medians over the rounds, of the worse case. The best peer is the one beside which Rayloom is "
        "worst. The sections below explain the misses."
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
## Beside torchrun with DeepSpeed, and accelerate with DeepSpeed

{table(header, rows)}

Medians, with the least and the most; a ratio is taken in each round, then its median. Two processes; the same GPT,
batches, ZeRO stage, clipping and optimizer (AdamW, fused). The contenders take turns, each round begins with another.
Rayloom is run as a person runs it, with its log, metrics, TensorBoard files and watchdog: by torchrun and without Ray,
`torchrun -m app.training recipes/stdlib_gpt.yaml KEY=VALUE…`, and as a job on a Ray cluster of its own on this machine,
`rayloom submit train` with the same words. The peers, [bare_deepspeed.py](bare_deepspeed.py) and
[with_accelerate.py](with_accelerate.py), do nothing but train and print a loss every 50 steps.

- **steps/s**: steps / wall time, from the first step ≥ {WARM_UP_STEPS} that a contender tells of to the last. Each
  script stamps the ends of its steps; Rayloom's stamps are those of its TensorBoard records. Validation and
  checkpoints come after the last step.
- **CPU**: time of all processes of the machine between the same two steps, sampled every 50 ms. On Ray it includes
  Ray's own processes.
- **first step**: from the start of the command to the end of step 1, on a Ray cluster that is up already. Rayloom's
  includes making tokens of the text ({seconds}, measured alone); the peers read blocks that are there already.
- **loss**: mean over all ranks and the steps after step {WARM_UP_STEPS}, to see that all train alike: on the same
  batches in the same order. accelerate deals a batch's samples out otherwise, so sums are rounded otherwise.
- The peers skip the kernel for inference that DeepSpeed else compiles for a minute on CPUs, as Rayloom does.
  accelerate has to be told of `gloo`: by default its DeepSpeed takes each process on a CPU for the only one."""


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
## What a rank holds

Bytes for each parameter of the model: parameters + gradients + optimizer state, in bf16 with AdamW, of the rank that
holds most. Measured in the live engine between the backward pass and the step: all storages of its tensors, each
counted once. The formulas are of the ZeRO paper ([arXiv:1910.02054](https://arxiv.org/abs/1910.02054), figure 1):
2 Ψ + 2 Ψ + 12 Ψ, where stage 1 divides the third by the workers, stage 2 also the second, stage 3 all. Where
micro-batches are added up, the sums are float32, and the second term is 4 Ψ.

{table(header, rows)}

Where it is not the formula:

- **ZeRO 0**: gradients are summed in float32 with any number of micro-batches, 4 Ψ.
- **ZeRO 1 without accumulation holds less**: DeepSpeed frees a gradient once it is reduced, in stage 1 as in stage 2.
- **Gradients of stages 1 and 2 on 4 workers**: a parameter that lies across two ranks' parts is kept whole by both.
- **Several micro-batches**: Rayloom adds gradients up in float32, and frees each bf16 gradient once it is added.
- **Other tensors of ZeRO 3**: a bucket of `reduce_bucket_size`. Rayloom sets it to a 64th of the model, but at least
  1 Mi elements. DeepSpeed's default is 5·10⁸ elements. Stages 1 and 2 use such buckets, two with `overlap_comm`, during
  the backward pass only. [MEMORY.md](MEMORY.md) has the peak memory of a rank."""


_GPU = """
## On a GPU

Not measured by `make bench-training`, which runs on CPUs. Where there is a GPU:

    torchrun --nproc-per-node 1 -m benchmarks.gpu.pretraining benchmarks/gpu/gpt_{350m,1_3b}.yaml

prints tokens/s, MFU and peak memory of both models in bf16 (`train.plan.activation_checkpointing=true` and
`train.torch_compile=false` are the options); the goal is an MFU of 0.50 or more on one H100-class GPU."""
