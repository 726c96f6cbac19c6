"""RESULTS.md: what was reached, beside the goals."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.machine import machine, today, versions
from benchmarks.markdown import table, verdict
from benchmarks.training.contenders import CONTENDERS
from benchmarks.training.memory import Holding
from benchmarks.training.throughput import WARM_UP_STEPS, Comparison

GOAL_SPEED, GOAL_START, GOAL_MEMORY = 0.97, 1.3, 0.1
PEERS = tuple(name for name in CONTENDERS if name != "Rayloom")
_PACKAGES = ("rayloom", "torch", "deepspeed", "accelerate")
_MANY_OTHER_BYTES = 2**20


@dataclass(frozen=True)
class Findings:
    """All that a run of the benchmark found."""

    comparisons: Sequence[Comparison]
    holdings: Sequence[Holding]
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
{machine()}. {versions(_PACKAGES)}.
Load average over 1, 5 and 15 minutes: {found.load_before} before, {found.load_after} after. Anything above
0.5 before means that other work took part of the cores, and that single numbers are worth little; ratios of runs
that follow each other are worth more."""


def _goals(found: Findings) -> str:
    speed = min(each.speed_ratio(peer).median for each in found.comparisons for peer in PEERS)
    start = max(each.start_ratio("torchrun").median for each in found.comparisons)
    prepared = max(each.start_ratio_prepared("torchrun").median for each in found.comparisons)
    started = f"{start:.2f}; {prepared:.2f} without preparing data"
    rows = [
        ("steps/s after start-up / the best peer's", f"≥ {GOAL_SPEED}", f"{speed:.3f}", verdict(speed >= GOAL_SPEED)),
        ("time to the first step / torchrun's", f"≤ {GOAL_START}", started, verdict(start <= GOAL_START)),
        _memory_goal(found, "bytes that a rank holds / the ZeRO paper's", accumulates=False),
        _memory_goal(found, "the same where micro-batches are added up", accumulates=True),
        ("MFU of 350 M and 1.3 B parameters on one H100", "≥ 0.50", "measured by benchmarks.training.gpu", "open"),
    ]
    return (
        table(("what", "goal", "reached", ""), rows)
        + "\n\nRatios are medians, of the worst case; a rank may hold less than the paper says."
    )


def _memory_goal(found: Findings, what: str, accumulates: bool) -> tuple[str, ...]:
    """To hold less than the paper says is no fault."""
    differences = [each.difference for each in found.holdings if (each.accumulation > 1) == accumulates]
    least, most = min(differences), max(differences)
    return what, f"within {GOAL_MEMORY:.0%}", f"{least:+.1%} to {most:+.1%}", verdict(most <= GOAL_MEMORY)


def _speed(found: Findings) -> str:
    rows = [row for each in found.comparisons for row in _speed_rows(each)]
    header = ("case", "contender", "steps/s", "Rayloom / it", "first step, s", "Rayloom / it", "loss")
    seconds = ", ".join(f"{each.preparation_s:.1f} s" for each in found.comparisons)
    return f"""
## Beside torchrun with DeepSpeed, and accelerate with DeepSpeed

{table(header, rows)}

Medians, with the least and the most; a ratio is taken in each round, then its median. Two processes; the same GPT,
tokens, global batch, ZeRO stage, clipping and optimizer (AdamW, fused). The contenders take turns, each round begins
with another. Rayloom is run as a person runs it, `torchrun -m app.training recipes/stdlib_gpt.yaml KEY=VALUE…`, with
its log, metrics, TensorBoard files and watchdog; the peers, [bare_deepspeed.py](bare_deepspeed.py) and
[with_accelerate.py](with_accelerate.py), do nothing but train and print a loss every 50 steps.

- **steps/s**: steps / wall time, from the first step ≥ {WARM_UP_STEPS} of which Rayloom tells to the last. Each script
  stamps the ends of its steps; Rayloom's stamps are those of its TensorBoard records. Validation and checkpoints come
  after the last step.
- **first step**: from the start of the command to the end of step 1. Rayloom's includes making tokens of the text
  ({seconds}, measured alone); the peers read tokens that are there already.
- **loss**: mean over the steps that were timed, to see that all train alike; batches are drawn in another order.
- The peers skip the kernel for inference that DeepSpeed else compiles for a minute on CPUs, as Rayloom does.
  accelerate has to be told of `gloo`: by default its DeepSpeed takes each process on a CPU for the only one."""


def _speed_rows(each: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            each.case.name,
            name,
            str(each.steps_per_s(name)),
            "" if name == "Rayloom" else str(each.speed_ratio(name)),
            str(each.first_step_s(name)),
            "" if name == "Rayloom" else str(each.start_ratio(name)),
            f"{each.loss(name):.2f}",
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

- **ZeRO 1 holds less**: DeepSpeed frees a gradient once it is reduced, in stage 1 as in stage 2.
- **Gradients of stages 1 and 2 on 4 workers**: a parameter that lies across two ranks' parts is kept whole by both.
- **Several micro-batches**: Rayloom adds gradients up in float32, 4 bytes for each. DeepSpeed's stage 1 then
  keeps a bf16 optimizer (`BF16_Optimizer`) that holds the whole float32 gradient in each rank, and a bf16 one beside
  it; stages 2 and 3 hold their part. Without accumulation gradients stay in bf16.
- **Other tensors of ZeRO 3**: a bucket of `reduce_bucket_size`, by default 5·10⁸ elements, 954 MiB in bf16, whatever
  the model's size. `train.deepspeed.zero_optimization.reduce_bucket_size` makes it smaller. Stages 1 and 2 take such
  buckets, two with `overlap_comm`, during the backward pass only."""


_GPU = """
## On a GPU

Not measured by `make bench-training`, which runs on CPUs. Where there is a GPU:

    torchrun --nproc-per-node 1 -m benchmarks.training.gpu benchmarks/training/gpt_{350m,1_3b}.yaml

prints tokens/s, MFU and peak memory of both models in bf16 (`train.plan.activation_checkpointing=true` and
`train.torch_compile=false` are the options); the goal is an MFU of 0.50 or more on one H100-class GPU."""
