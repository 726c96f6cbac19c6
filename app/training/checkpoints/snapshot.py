"""From a running engine to a checkpoint's content."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from app.config import Layout, Precision
from app.training.checkpoints import names
from app.training.checkpoints.fragments import Fragment, boxes_of, by_master, fragments_of, matrix_shape
from app.training.checkpoints.rng import random_state
from app.training.checkpoints.shards import Shards
from app.training.checkpoints.state import LossScale, Position, TrainState
from app.training.data.batches import EPOCH_ORDER
from app.training.engine import TrainingEngine
from app.training.engine.buffers import buffers_of, mean_buffers
from app.training.engine.loss_scale import scaler_of
from app.training.engine.nvme import read_from_nvme
from app.training.records import EpochRecord
from app.training.worker import gather

Content = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """This process's part of a checkpoint, in memory of its own."""

    state: TrainState
    content: Content
    """By ``names``: parameters with their optimizer state, in float32 what is trained; buffers; and what is this
    process's own, its view of the buffers and its random numbers."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        items = self.content.values()
        tensors = [[*item.parts.values()] if isinstance(item, Shards) else [item] for item in items]
        return sum(tensor.nbytes for tensor in chain.from_iterable(tensors))


def take_snapshot(
    engine: TrainingEngine, layout: Layout, position: Position, records: list[EpochRecord], precision: Precision
) -> Snapshot:
    """Copy what this process writes of the engine's state. Every process calls it."""
    fragments = fragments_of(engine, layout)
    optimizer = engine.deepspeed.basic_optimizer
    content: Content = {}
    for alike in by_master(fragment for fragment in fragments if fragment.is_owned):
        with read_from_nvme(engine.deepspeed, alike[0].master):
            for fragment in alike:
                for key, flat in master_tensors(optimizer, fragment).items():
                    content[names.parameter(fragment.name, key)] = shards_of(fragment, flat, copy=True)
    rank = torch.distributed.get_rank()
    shared, buffers = (
        {names.buffer(name): buffer.detach().to("cpu", copy=True) for name, buffer in found.items()}
        for found in (mean_buffers(engine), buffers_of(engine))
    )
    own = buffers | {names.random(name): state for name, state in random_state(engine.deepspeed.device).items()}
    content |= {names.own(rank, name): tensor for name, tensor in own.items()}
    if layout.data_rank(rank) == layout.tensor_rank(rank) == 0:
        content |= shared
    state = TrainState(
        position=position.model_copy(deep=True),
        epoch_order=EPOCH_ORDER,
        records=records,
        workers=layout.workers,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        optimizer_steps=_optimizer_steps(optimizer),
        schedule_steps=engine.deepspeed.lr_scheduler.last_epoch,
        loss_scale=_loss_scale(engine.deepspeed),
        precision=precision,
        shapes=_shapes(fragments),
    )
    return Snapshot(state, content)


def master_tensors(optimizer: torch.optim.Optimizer, fragment: Fragment) -> dict[str, Tensor]:
    """The weight and the state of a fragment's master that have its shape."""
    state = optimizer.state.get(fragment.master, {})
    alike = {key: value for key, value in state.items() if key != "step" and torch.is_tensor(value)}
    return {names.WEIGHT: fragment.master, **alike}


def shards_of(fragment: Fragment, flat: Tensor, copy: bool) -> Shards:
    parts = {corner: part.to("cpu", copy=True) if copy else part for corner, part in boxes_of(fragment, flat)}
    return Shards(matrix_shape(fragment.cut.whole_shape), parts)


def _shapes(fragments: list[Fragment]) -> dict[str, list[int]]:
    """The shapes of all parameters, whoever holds them."""
    shapes = {fragment.name: list(fragment.cut.whole_shape) for fragment in fragments}
    return {name: shape for part in gather(shapes) for name, shape in part.items()}


def _optimizer_steps(optimizer: torch.optim.Optimizer) -> int:
    steps = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(steps, default=0)


def _loss_scale(deepspeed: Any) -> LossScale | None:
    scaler = scaler_of(deepspeed)
    if scaler is None:
        return None
    return LossScale(
        scale=float(scaler.cur_scale),
        iteration=int(getattr(scaler, "cur_iter", 0)),
        last_overflow=int(getattr(scaler, "last_overflow_iter", -1)),
        hysteresis=int(getattr(scaler, "cur_hysteresis", 1)),
    )
