"""Checkpoints that tests write."""

import torch

from app.checksums import write_checksums
from app.training.checkpoints.names import buffer
from app.training.checkpoints.snapshot import Snapshot
from app.training.checkpoints.state import Position, TrainState
from app.training.checkpoints.store import Checkpoint, CheckpointStore


def state_at(step: int) -> TrainState:
    return TrainState(
        position=Position(step=step), epoch_order="windows-2", records=[], workers=1, tensor=1, pipeline=1,
        optimizer_steps=step, schedule_steps=step, loss_scale=None, precision="fp32", shapes={},
    )  # fmt: skip


def snapshot_at(step: int) -> Snapshot:
    return Snapshot(state_at(step), {buffer("step"): torch.tensor([step])})


def write(store: CheckpointStore, step: int) -> Checkpoint:
    made = store.next(step)
    folder = store.folder_of(made)
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "state.json"):
        (folder / name).write_bytes(f"{name} of {step}".encode() * 9)
    write_checksums(folder)
    return made


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.committed()]
