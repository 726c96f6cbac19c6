"""python -m tests.faults.torn_writes FOLDER KILLS: two ranks write checkpoints without end, and are killed meanwhile.

Prints one JSON object for each kill. Ranks are forked from a process that has imported everything.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from upath import UPath

from app.config import CheckpointConfig
from app.training.checkpoints.shards import Shards
from app.training.checkpoints.snapshot import Snapshot
from app.training.checkpoints.state import Position, TrainState
from app.training.checkpoints.store import CheckpointStore
from app.training.checkpoints.writer import CheckpointWriter
from tests.helpers import wait_until
from tests.launch import Launch

ROWS, COLUMNS = 1024, 1024  # float32: 2 MiB of each rank
RANKS = 2


class Kill(BaseModel):
    """What was there before a kill, and after it."""

    victims: list[int]
    committed: list[int]
    """Steps before."""
    torn: list[int]
    """Steps that were begun and never finished."""
    newest: int | None
    """The newest intact one, after."""
    is_whole: bool
    """Whether every element of it is of that step."""
    left: list[int]
    """Steps after the sweep."""
    survivor_s: float
    """How long the other rank lived on."""


def snapshot(rank: int, step: int) -> Snapshot:
    """Half of a matrix, all of it ``step``."""
    height = ROWS // RANKS
    part = torch.full((height, COLUMNS), float(step))
    state = TrainState(
        position=Position(step=step),
        records=[],
        workers=RANKS,
        tensor=1,
        pipeline=1,
        optimizer_steps=step,
        schedule_steps=step,
        loss_scale=None,
        precision="fp32",
        shapes={"matrix": [ROWS, COLUMNS]},
    )
    return Snapshot(state, {"matrix/weight": Shards((ROWS, COLUMNS), {(rank * height, 0): part})})


def write_without_end(rank: int, meeting_point: Path, store: CheckpointStore, step: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=RANKS)
    writer = CheckpointWriter(store, CheckpointConfig(num_to_keep=2))
    while True:
        step += 1
        writer.save(snapshot(rank, step), best=None)


def fork(rank: int, meeting_point: Path, store: CheckpointStore, step: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        write_without_end(rank, meeting_point, store, step)
    except BaseException as error:  # the other rank was killed
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def is_whole(folder: UPath, step: int) -> bool:
    matrix = torch.empty(ROWS, COLUMNS)
    load({"matrix/weight": matrix}, storage_reader=FileSystemReader(folder.path), no_dist=True)
    return bool((matrix == step).all())


def begun(store: CheckpointStore) -> set[int]:
    """Steps that have a folder."""
    return {int(each.name.removeprefix("step_")) for each in Path(store.folder.path).glob("step_*")}


def kill(folder: Path, number: int, store: CheckpointStore) -> Kill:
    newest = store.newest_intact()
    pids = [fork(rank, folder / f"meeting_{number}", store, newest or 0) for rank in range(RANKS)]
    wait_until(lambda: max(begun(store), default=0) > (newest or 0))
    time.sleep(random.uniform(0.0, 0.5))
    victims = random.choice([[0], [1], [0, 1]])
    committed = store.committed()
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    killed = time.monotonic()
    for pid in pids:
        os.waitpid(pid, 0)
    survivor_s = time.monotonic() - killed
    torn = sorted(begun(store) - set(store.committed()))
    newest = store.newest_intact()
    store.sweep(after=newest)
    return Kill(
        victims=victims,
        committed=committed,
        torn=torn,
        newest=newest,
        is_whole=newest is None or is_whole(store.folder_of(newest), newest),
        left=sorted(begun(store)),
        survivor_s=survivor_s,
    )


def require_survival(launch: Launch, folder: Path, kills: int) -> list[Kill]:
    """So many kills, none of which leaves a bad checkpoint behind or loses a good one."""
    job = launch("python", "-m", "tests.faults.torn_writes", str(folder), str(kills))
    assert job.ends(60 + 10 * kills) == 0, job.output
    found = [Kill.model_validate_json(line) for line in job.output.splitlines() if line.startswith("{")]
    assert len(found) == kills
    for each in found:
        assert each.is_whole, each
        assert (each.newest or 0) >= max(each.committed, default=0), each
        assert not set(each.left) & set(each.torn), each
        assert each.survivor_s < 5.0, each
        assert all(f"checkpoint step_{step:08d} was never finished: removed" in job.output for step in each.torn)
    return found


def main() -> None:
    torch.set_num_threads(1)
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    store = CheckpointStore(UPath(folder / "checkpoints"))
    for number in range(kills):
        print(kill(folder, number, store).model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
