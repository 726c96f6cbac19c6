"""Fine-tuning beside its peers, one after another in turns: python -m benchmarks.finetuning [--rounds N]"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.finetuning.contenders import (
    BATCH,
    CHAT_BLOCKS,
    CHAT_STEPS,
    CHATS,
    CONTENDERS,
    LORA_STEPS,
    STEPS,
    WARM_UP,
    Figures,
    run,
)
from benchmarks.finetuning.material import write_all
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import Goal, table, verdict
from benchmarks.rounds import turns
from benchmarks.spread import Spread

RESULTS = Path(__file__).with_name("RESULTS.md")
ONCE = "Rayloom from scratch"
"""Its speed is that of the pretrained model."""
Measured = Mapping[str, Sequence[Figures]]


def measure(folder: Path, num_rounds: int) -> dict[str, list[Figures]]:
    """Run every contender in every round. Each begins with another one.

    Processes are forked from a server that has imported everything, since imports take as long as training.
    """
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "2"}
    server = get_context("forkserver")
    server.set_forkserver_preload(["benchmarks.finetuning.contenders"])
    found: dict[str, list[Figures]] = {name: [] for name in CONTENDERS}
    for number, names in enumerate(turns(list(CONTENDERS), num_rounds)):
        for name in names:
            if number and name == ONCE:
                continue
            with ProcessPoolExecutor(1, mp_context=server) as process:
                found[name].append(process.submit(run, name, folder).result())
            print(name, found[name][-1], flush=True)
    return found


def speed(found: Measured, name: str) -> Spread:
    """The optimizer steps per second of each round."""
    return Spread(tuple(figures.steps_per_s for figures in found[name]))


def useful(found: Measured, name: str) -> Spread:
    """The tokens per second that are no padding, of each round."""
    return Spread(tuple(float(figures.useful_tokens_per_s or 0.0) for figures in found[name]))


def goals(found: Measured) -> list[Goal]:
    """The goals, and what was reached."""
    ours, theirs, scratch = (100 * float(found[name][0].accuracy or 0.0) for name in ("Rayloom", "Trainer", ONCE))
    fine, lora = (speed(found, "Rayloom").over(speed(found, "Trainer")),
                  speed(found, "Rayloom LoRA").over(speed(found, "PEFT")))  # fmt: skip
    packed = {name: useful(found, "Rayloom packed").over(useful(found, name)) for name in
              ("padded, random batches", "Rayloom padded")}  # fmt: skip
    losses = [float(found[name][0].loss or 0.0) for name in ("Rayloom packed", "Rayloom padded")]
    apart = abs(losses[0] - losses[1]) / losses[1]
    gap = f"{ours - theirs:+.1f}"
    return [
        Goal("accuracy − from scratch's", "≥ 5 points", f"{ours - scratch:+.1f} points", verdict(ours >= scratch + 5)),
        Goal("accuracy − Trainer's", "within 0.5 points", f"{gap} points", verdict(abs(ours - theirs) <= 0.5)),
        Goal("steps/s ÷ Trainer's", "≥ 1.0", str(fine), verdict(fine.median >= 1.0)),
        Goal("LoRA: steps/s ÷ PEFT's", "≥ 1.0", str(lora), verdict(lora.median >= 1.0)),
        *(
            Goal(f"packed: useful tokens/s ÷ {name}", "≥ 1.5", str(ratio), verdict(ratio.median >= 1.5))
            for name, ratio in packed.items()
        ),
        Goal("packed: loss apart from padded", "equal (1e-5)", f"{apart:.1e}", verdict(apart <= 1e-5)),
    ]


def report(found: Measured, num_rounds: int, conditions: Conditions) -> str:
    """The whole of RESULTS.md."""
    rows = [(goal.what, goal.goal, goal.reached, goal.verdict) for goal in goals(found)]
    figures = [
        (
            name,
            f"{speed(found, name).median:.2f}",
            ", ".join(f"{100 * run.accuracy:.1f} %" for run in measured if run.accuracy is not None) or "–",
            f"{useful(found, name).median:,.0f}" if measured[0].useful_tokens_per_s else "–",
        )
        for name, measured in found.items()
    ]
    return f"""# Fine-tuning: results

`python -m benchmarks.finetuning --rounds {num_rounds}`.
{machine()}. {versions(("torch", "transformers", "peft", "deepspeed"))}.
{conditions}

{table(("what", "goal", "reached", ""), rows)}

Ratios compare runs of the same round. The table has their median, with the minimum and maximum.

{table(("contender", "steps/s", "validation accuracy", "useful tokens/s"), figures)}

Every contender runs as one process with 2 threads, in fp32. AdamW uses a constant learning rate, and gradients are
clipped at 1. The first {WARM_UP} steps are not timed. For chats, accuracy is the share of correctly predicted
tokens.

- **Classifiers** start from all-MiniLM-L6-v2. They predict which of eight packages a docstring of the standard
  library belongs to. They train for {STEPS} steps of {BATCH} samples, with the same head and the same batches in the
  same order. Dropout masks differ.
- **LoRA** has rank 8 in queries and values, and trains for {LORA_STEPS} steps. PEFT runs in a plain PyTorch loop.
  Rayloom also trains the encoder's pooler with the head, and PEFT freezes it. This explains the difference in
  accuracy.
- **Chats** are questions about functions of the standard library, answered by their docstrings. A GPT with 4 layers
  trains for {CHAT_STEPS} steps. A step has {CHAT_BLOCKS} packed blocks, or {CHATS} conversations padded to the
  longest. Rayloom batches conversations of similar length. Random batches run in a plain PyTorch loop.
- **Packing is no faster than Rayloom's own padding**: 96 % of the tokens in batches of similar length are useful,
  compared with 34 % in random batches. So packing has little to gain. A packed block of 256 tokens computes 255
  attention scores per useful token, including masked ones between conversations. Batches of similar length compute
  109.
- **Steps/s compared with Trainer**: a round has 35 timed steps. Its ratio varies by more than the distance to the
  goal.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    conditions = Conditions()
    with tempfile.TemporaryDirectory() as temporary:
        write_all(Path(temporary))
        found = measure(Path(temporary), arguments.rounds)
    arguments.results.write_text(report(found, arguments.rounds, conditions), encoding="utf-8")


if __name__ == "__main__":
    main()
