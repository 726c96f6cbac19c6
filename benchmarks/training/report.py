"""RESULTS.md: what was reached, beside the goals."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.machine import machine, today
from benchmarks.markdown import table, verdict
from benchmarks.training.contenders import CONTENDERS, OURS, OURS_ON_RAY, WARM_UP_STEPS
from benchmarks.training.memory import Holding
from benchmarks.training.throughput import Comparison

GOAL_SPEED, GOAL_START, GOAL_MEMORY = 0.97, 1.3, 0.1
PEERS = tuple(name for name in CONTENDERS if name not in (OURS, OURS_ON_RAY))
_MANY_OTHER_BYTES = 2**20


@dataclass(frozen=True)
class Findings:
    """All that a run of the benchmark found."""

    comparisons: Sequence[Comparison]
    holdings: Sequence[Holding]
    versions: str
    load_before: str
    load_after: str
    minutes: float


def report(found: Findings) -> str:
    """The whole of RESULTS.md."""
    sections = (_title(found), _goals(found), _speed(found), _memory(found), _GPU)
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _title(found: Findings) -> str:
    rounds = len(found.comparisons[0].rounds)
    return f"""
# Training: results

`python -m benchmarks.training --rounds {rounds}`, {today()}, {found.minutes:.1f} minutes.
{machine()}. {found.versions}.
Load average over 1, 5 and 15 minutes: {found.load_before} before, {found.load_after} after. Anything above
0.5 before means that other work took part of the cores, and that single numbers are worth little; ratios of runs
that follow each other are worth more."""


def _goals(found: Findings) -> str:
    rows = [
        _speed_goal(found, "steps/s after start-up / the best peer's", OURS),
        _speed_goal(found, "the same as a job on a Ray cluster", OURS_ON_RAY),
        _start_goal(found, "time to the first step / torchrun's", OURS),
        _start_goal(found, "the same as a job on a Ray cluster", OURS_ON_RAY),
        _memory_goal(found, "bytes that a rank holds / the ZeRO paper's", accumulates=False),
        _memory_goal(found, "the same where micro-batches are added up", accumulates=True),
        ("MFU of 350 M and 1.3 B parameters on one H100", "≥ 0.50", "measured by benchmarks.training.gpu", "open"),
    ]
    return (
        table(("what", "goal", "reached", ""), rows)
        + "\n\nRatios are medians, of the worst case. Why a rank holds what it holds is said below its table."
    )


def _speed_goal(found: Findings, what: str, ours: str) -> tuple[str, ...]:
    least = min(each.speed_ratio(peer, ours).median for each in found.comparisons for peer in PEERS)
    return what, f"≥ {GOAL_SPEED}", f"{least:.3f}", verdict(least >= GOAL_SPEED)


def _start_goal(found: Findings, what: str, ours: str) -> tuple[str, ...]:
    most = max(each.start_ratio("torchrun", ours).median for each in found.comparisons)
    prepared = max(each.start_ratio_prepared("torchrun", ours).median for each in found.comparisons)
    return what, f"≤ {GOAL_START}", f"{most:.2f}; {prepared:.2f} without preparing data", verdict(most <= GOAL_START)


def _memory_goal(found: Findings, what: str, accumulates: bool) -> tuple[str, ...]:
    """To hold less than the paper says misses it as well."""
    among = [each for each in found.holdings if (each.accumulation > 1) == accumulates]
    least, most = (choose(among, key=lambda each: each.difference) for choose in (min, max))
    holds = all(abs(each.difference) <= GOAL_MEMORY for each in among)
    return what, f"within {GOAL_MEMORY:.0%}", f"{_described(least)} to {_described(most)}", verdict(holds)


def _described(holding: Holding) -> str:
    return f"{holding.difference:+.1%} (ZeRO {holding.stage} on {holding.workers})"


def _speed(found: Findings) -> str:
    rows = [row for each in found.comparisons for row in _speed_rows(each)]
    header = ("case", "contender", "steps/s", "Rayloom / it", "first step, s", "Rayloom / it", "loss")
    seconds = ", ".join(f"{each.preparation_s:.1f} s" for each in found.comparisons)
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
- **first step**: from the start of the command to the end of step 1, on a Ray cluster that is up already. Rayloom's
  includes making tokens of the text ({seconds}, measured alone); the peers read blocks that are there already.
- **loss**: mean over all ranks and the steps after step {WARM_UP_STEPS}, to see that all train alike: on the same
  batches in the same order. accelerate deals a batch's samples out otherwise, so sums are rounded otherwise.
- The peers skip the kernel for inference that DeepSpeed else compiles for a minute on CPUs, as Rayloom does.
  accelerate has to be told of `gloo`: by default its DeepSpeed takes each process on a CPU for the only one."""


def _speed_rows(each: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            each.case.name,
            name,
            str(each.steps_per_s(name)),
            "" if name == OURS else str(each.speed_ratio(name)),
            str(each.first_step_s(name)),
            "" if name == OURS else str(each.start_ratio(name)),
            f"{each.loss(name):.3f}",
        )
        for name in CONTENDERS
    ]


def _memory(found: Findings) -> str:
    header = ("ZeRO", "workers", "micro-batches", "paper", "held", "difference", "other tensors")
    rows = [
        (
            str(each.stage),
            str(each.workers),
            str(each.accumulation),
            str(each.expected),
            str(each.held),
            f"{each.difference:+.1%}",
            f"{each.other_bytes / 2**20:,.0f} MiB" if each.other_bytes > _MANY_OTHER_BYTES else "",
        )
        for each in found.holdings
    ]
    return f"""
## What a rank holds

Bytes for each parameter of the model: parameters + gradients + optimizer state, in bf16 with AdamW, of the rank that
holds most. Measured in the live engine between the backward pass and the step: all storages of its tensors, each
counted once. The formulas are of the ZeRO paper ([arXiv:1910.02054](https://arxiv.org/abs/1910.02054), figure 1):
2 Ψ + 2 Ψ + 12 Ψ, where stage 1 divides the third by the workers, stage 2 also the second, stage 3 all.

{table(header, rows)}

Where it is not the formula:

- **ZeRO 1 holds less**, and the more workers the less: DeepSpeed frees a gradient once it is reduced, in stage 1 as in
  stage 2, so a rank holds what the paper says of stage 2. That misses the goal and harms nobody.
- **Gradients of stages 1 and 2 on 4 workers**: a parameter that lies across two ranks' parts is kept whole by both.
- **Several micro-batches**: Rayloom adds gradients up in float32, 4 bytes for each. DeepSpeed's stage 1 then
  keeps a bf16 optimizer (`BF16_Optimizer`) that holds the whole float32 gradient in each rank, and a bf16 one beside
  it; stages 2 and 3 hold their part. Without accumulation gradients stay in bf16.
- **Other tensors of ZeRO 3**: a bucket of `reduce_bucket_size`. Rayloom sets it to a 64th of the model, but at least
  1 Mi elements; DeepSpeed's default is 5·10⁸ elements. Stages 1 and 2 use such buckets, two with `overlap_comm`, during
  the backward pass only. [MEMORY.md](MEMORY.md) has the peak memory of a rank."""


_GPU = """
## On a GPU

Not measured by `make bench-training`, which runs on CPUs. Where there is a GPU:

    torchrun --nproc-per-node 1 -m benchmarks.training.gpu benchmarks/training/gpt_{350m,1_3b}.yaml

prints tokens/s, MFU and peak memory of both models in bf16 (`train.plan.activation_checkpointing=true` and
`train.torch_compile=false` are the options); the goal is an MFU of 0.50 or more on one H100-class GPU."""
