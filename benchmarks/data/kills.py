"""Training that is killed at random with 1, 2, 4 and again 1 process: python -m benchmarks.data.kills

A model counts the texts that it was trained on. Its checkpoints keep the counts, so they tell what is in the weights.
"""

import argparse
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.data.counted import CountedRun, kill_one, write_digits
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import Goal, goals_table, table, verdict

RESULTS = Path(__file__).with_name("KILLS.md")
_WORLDS = (1, 2, 4, 1)
_MAX_PAUSE_S = 1.0
"""Maximum seconds from the first new checkpoint after a start to the kill."""


@dataclass(frozen=True)
class Phase:
    """The results with one number of processes."""

    world: int
    first: int
    """Step of the checkpoint from which it resumed."""
    last: int
    """Step of its newest checkpoint at the end."""
    kills: tuple[tuple[int, int], ...]
    """Each killed rank, and the step of the newest checkpoint at the kill."""
    is_equal: bool
    """Whether losses and gradient norms are bit-identical to those of the undisturbed run."""


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=5, help="with each number of processes")
    parser.add_argument("--seed", type=int, default=0, help="of the random times and ranks")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    arguments = parser.parse_args()
    conditions = Conditions()
    with tempfile.TemporaryDirectory(prefix="bench-kills-") as temporary:
        folder = Path(temporary)
        write_digits(folder / "digits.parquet")
        run, choose = CountedRun(folder / "digits.parquet", folder / "killed"), np.random.default_rng(arguments.seed)
        phases = [
            _phase(run, world, arguments.kills, choose, is_last=place == len(_WORLDS) - 1)
            for place, world in enumerate(_WORLDS)
        ]
        counts, expected = run.counts(), run.expected_counts()
    lost = sum((expected - counts).values())
    twice = sum((counts - expected).values())
    text = _page(phases, int(sum(expected.values())), int(lost), int(twice), arguments.seed, conditions)
    arguments.results.write_text(text, encoding="utf-8")
    print(text)


def _phase(run: CountedRun, world: int, kills: int, choose: np.random.Generator, is_last: bool) -> Phase:
    """Kill a run with some number of processes several times. Compare it with an undisturbed one."""
    first = run.step
    undisturbed = CountedRun(run.source, run.storage.with_name(f"undisturbed-{first}"))
    if run.storage.exists():
        shutil.copytree(run.storage, undisturbed.storage)
    killed: list[tuple[int, int]] = []
    while len(killed) < kills:
        process = run.start(world)
        if not run.wait_for(run.step + 1, process):
            raise RuntimeError(f"a run ended before it was killed: {run.log_end}")
        time.sleep(choose.uniform(0, _MAX_PAUSE_S))
        rank = kill_one(process, choose)
        killed.append((rank, run.step))
    if is_last:
        run.finish(world)
    last = run.step
    undisturbed.finish(world, max_steps=last)
    is_equal = run.losses(first, last) == undisturbed.losses(first, last)
    if is_last:
        is_equal = is_equal and run.counts() == undisturbed.counts()
    return Phase(world, first, last, tuple(killed), is_equal)


def _page(phases: list[Phase], total: int, lost: int, twice: int, seed: int, conditions: Conditions) -> str:
    kills, equal = sum(len(phase.kills) for phase in phases), sum(phase.is_equal for phase in phases)
    goals = [
        Goal(f"samples lost in {kills} kills", "0", f"{lost} of {total:,}", verdict(lost == 0)),
        Goal("samples trained on twice", "0", f"{twice} of {total:,}", verdict(twice == 0)),
        Goal(
            "phases whose steps are bit-identical to the undisturbed run", f"{len(phases)}", f"{equal}",
            verdict(equal == len(phases)),
        ),
    ]  # fmt: skip
    rows = [
        [
            str(phase.world),
            f"{phase.first:,} to {phase.last:,}",
            ", ".join(f"{step:,} (rank {rank})" for rank, step in phase.kills),
            "yes" if phase.is_equal else "**no**",
        ]
        for phase in phases
    ]
    return f"""# Killed training runs

Written by `python -m benchmarks.data.kills --seed {seed}`. A small model trains on texts in shards, with a checkpoint
every five steps. After each start, a random rank gets SIGKILL up to {_MAX_PAUSE_S:g} s after the first new
checkpoint. The run resumes from its newest complete checkpoint. After five kills, the number of processes changes.

The model counts its texts in a buffer that checkpoints include. The counts are compared with the batches of all
epochs. For each phase, an undisturbed run begins with a copy of the storage and trains with the same number of
processes. Losses and gradient norms of all steps are compared.

{machine()}.
{versions(["torch", "deepspeed", "pyarrow"])}.
{conditions}

{goals_table(goals)}

{table(["processes", "steps", "newest checkpoint at each kill", "bit-identical"], rows)}
"""


if __name__ == "__main__":
    main()
