"""python -m tests.faults.torn_writes FOLDER KILLS: two ranks write checkpoints without end, and are killed meanwhile.

So many times at random, and once at each of ``MOMENTS``. Prints one JSON object for each kill. Ranks are forked from a
process that has imported everything.
"""

import os
import random
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from upath import UPath

from app.config import CheckpointConfig
from app.training.checkpoints.fragments import Shards
from app.training.checkpoints.snapshot import Snapshot
from app.training.checkpoints.state import Position, TrainState
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.training.checkpoints.writer import CheckpointWriter
from tests.helpers import wait_until
from tests.launch import Launch

ROWS, COLUMNS = 1024, 1024  # float32: 2 MiB of each rank
RANKS = 2


MOMENTS = {
    "before the tensors' index is in place": ("os.rename", r"/\.metadata$"),
    "after the last byte of all parts": ("open", r"/\.SHA256SUMS\.[0-9a-f]+\.tmp$"),
    "before the checksums are in place": ("os.rename", r"/SHA256SUMS$"),
    "before one that is not needed is removed": ("os.remove", r"/SHA256SUMS$"),
    "while it is removed": ("shutil.rmtree", r"/step_"),
}
"""What the first rank was about to do when it was killed: an event of Python's, and the path that it names."""


class Kill(BaseModel):
    """What was there before a kill, and after it."""

    moment: str
    """One of ``MOMENTS``, or a random one."""
    victims: list[int]
    committed: list[Checkpoint]
    """Before."""
    torn: list[Checkpoint]
    """Begun and never finished."""
    newest: Checkpoint | None
    """The newest intact one, after."""
    is_whole: bool
    """Whether every element of it is of that step."""
    left: list[Checkpoint]
    """After the sweep."""


def snapshot(rank: int, step: int) -> Snapshot:
    """Half of a matrix, all of it ``step``."""
    height = ROWS // RANKS
    part = torch.full((height, COLUMNS), float(step))
    state = TrainState(
        position=Position(step=step),
        epoch_order="windows-2",
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
    """Begins with the step of the newest, which is kept again."""
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=RANKS)
    writer = CheckpointWriter(store, CheckpointConfig(num_to_keep=2))
    dist.barrier()  # a rank that is still connecting would wait half an hour for a killed one
    while True:
        writer.save(partial(snapshot, rank, step))
        step += 1


def die_at(event: str, path: str) -> None:
    """Have this process kill itself when it is about to do that."""

    def watch(name: str, arguments: tuple[object, ...]) -> None:
        if name == event and any(re.search(path, str(argument)) for argument in arguments):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def fork(rank: int, meeting_point: Path, store: CheckpointStore, step: int, moment: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if rank == 0 and moment in MOMENTS:
            die_at(*MOMENTS[moment])
        write_without_end(rank, meeting_point, store, step)
    except BaseException as error:  # the other rank was killed
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def is_whole(folder: UPath, step: int) -> bool:
    matrix = torch.empty(ROWS, COLUMNS)
    load({"matrix/weight": matrix}, storage_reader=FileSystemReader(folder.path), no_dist=True)
    return bool((matrix == step).all())


def begun(store: CheckpointStore) -> set[Checkpoint]:
    """Those that have a folder."""
    named = (Checkpoint.named(folder.name) for folder in Path(store.folder.path).glob("*"))
    return {checkpoint for checkpoint in named if checkpoint is not None}


def end(survivor: int) -> None:
    """Wait for the other rank; kill it after 2 seconds, as a launcher would.

    gloo can miss that the peer of a send has died, and then waits for half an hour.
    """
    deadline_s = time.monotonic() + 2.0
    while os.waitpid(survivor, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline_s:
            os.kill(survivor, signal.SIGKILL)
            os.waitpid(survivor, 0)
            return
        time.sleep(0.01)


def kill(folder: Path, number: int, store: CheckpointStore, moment: str) -> Kill:
    newest = store.newest_intact()
    step = newest.step if newest else 1
    committed, before = store.committed(), begun(store)
    pids = [fork(rank, folder / f"meeting_{number}", store, step, moment) for rank in range(RANKS)]
    victims = [0]
    if moment not in MOMENTS:
        wait_until(lambda: bool(begun(store) - before))  # older ones may be removed meanwhile
        time.sleep(random.uniform(0.0, 0.5))
        victims = random.choice([[0], [1], [0, 1]])
        committed = store.committed()
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
    _, status = os.waitpid(pids[victims[0]], 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, moment
    for rank in {*range(RANKS)} - {victims[0]}:
        end(pids[rank])
    torn = sorted(begun(store) - set(store.committed()))
    newest = store.newest_intact()
    store.sweep(after=newest)
    return Kill(
        moment=moment,
        victims=victims,
        committed=committed,
        torn=torn,
        newest=newest,
        is_whole=newest is None or is_whole(store.folder_of(newest), newest.step),
        left=sorted(begun(store)),
    )


def require_survival(launch: Launch, folder: Path, kills: int) -> list[Kill]:
    """So many kills at random and one at each of ``MOMENTS``: no bad checkpoint is left behind, no good one lost."""
    job = launch("python", "-m", "tests.faults.torn_writes", str(folder), str(kills))
    assert job.ends(60 + 10 * kills) == 0, job.output
    found = [Kill.model_validate_json(line) for line in job.output.splitlines() if line.startswith("{")]
    assert len(found) == kills + len(MOMENTS)
    for kill in found:
        assert kill.is_whole, kill
        assert not kill.committed or (kill.newest and kill.newest >= max(kill.committed)), kill
        assert not set(kill.left) & set(kill.torn), kill
        assert all(f"checkpoint {torn.name} was never finished: removed" in job.output for torn in kill.torn)
    return found


def main() -> None:
    torch.set_num_threads(1)
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    store = CheckpointStore(UPath(folder / "checkpoints"))
    for number, moment in enumerate([*["at random"] * kills, *MOMENTS]):
        print(kill(folder, number, store, moment).model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
