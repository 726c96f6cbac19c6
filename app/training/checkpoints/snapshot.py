"""A snapshot of a running engine: a checkpoint's content, in memory."""

from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from app.config import Layout, Precision
from app.training.checkpoints import names
from app.training.checkpoints.fragments import Fragment, Shards, by_master, fragments_of, shards_of
from app.training.checkpoints.state import Position, TrainState
from app.training.data.order import SampleOrder
from app.training.engine import TrainingEngine
from app.training.engine.deepspeed_internals import loss_scale_of, read_from_nvme
from app.training.engine.engine import buffers_of, mean_buffers
from app.training.records import EpochRecord
from app.training.worker import gather, random_state

Content = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """This process's part of a checkpoint, copied from the engine."""

    state: TrainState
    content: Content
    """Tensors by ``names``: trained parameters in float32 with their optimizer state, buffers, and this process's own
    view of the buffers and random states."""
    frozen: Content = field(default_factory=dict)
    """Parameters that training never changes, also in float32. Empty if an earlier checkpoint has them."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        items = (self.content | self.frozen).values()
        tensors = [[*item.parts.values()] if isinstance(item, Shards) else [item] for item in items]
        return sum(tensor.nbytes for tensor in chain.from_iterable(tensors))


def take_snapshot(
    engine: TrainingEngine,
    layout: Layout,
    position: Position,
    records: list[EpochRecord],
    precision: Precision,
    with_frozen: bool = True,
) -> Snapshot:
    """Copy the part of the engine's state that this process writes, or only what training changes. Collective."""
    fragments = fragments_of(engine, layout)
    optimizer = engine.deepspeed.basic_optimizer
    content, frozen = Content(), Content()
    copied = [fragment for fragment in fragments if fragment.is_owned and (fragment.is_trained or with_frozen)]
    for group in by_master(copied):
        with read_from_nvme(engine.deepspeed, group[0].master):
            for fragment in group:
                for key, flat in master_tensors(optimizer, fragment).items():
                    kind = content if fragment.is_trained else frozen
                    kind[names.parameter(fragment.name, key)] = shards_of(fragment, flat, copy=True)
    rank = torch.distributed.get_rank()

    # Two views: the mean for the export and for other layouts, and this rank's own to resume with the same bits.
    shared, buffers = (
        {names.buffer(name): buffer.detach().to("cpu", copy=True) for name, buffer in found.items()}
        for found in (mean_buffers(engine), buffers_of(engine))
    )
    own = buffers | {names.random(name): state for name, state in random_state(engine.deepspeed.device).items()}
    content |= {names.own(rank, name): tensor for name, tensor in own.items()}
    # One writer for each pipeline stage: the means are equal in its other ranks.
    if layout.data_rank(rank) == layout.tensor_rank(rank) == 0:
        content |= shared

    state = TrainState(
        # The loop counts on while the snapshot is written.
        position=position.model_copy(deep=True),
        epoch_order=SampleOrder.name,
        records=records,
        workers=layout.workers,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        optimizer_steps=_optimizer_steps(optimizer),
        schedule_steps=engine.deepspeed.lr_scheduler.last_epoch,
        loss_scale=loss_scale_of(engine.deepspeed),
        precision=precision,
        shapes=_shapes(fragments),
    )
    return Snapshot(state, content, frozen)


def master_tensors(optimizer: torch.optim.Optimizer, fragment: Fragment) -> dict[str, Tensor]:
    """Return a fragment's master weight, and its optimizer state of the same shape."""
    state = optimizer.state.get(fragment.master, {})
    same_shape = {key: value for key, value in state.items() if key != "step" and torch.is_tensor(value)}
    return {names.WEIGHT: fragment.master, **same_shape}


def _shapes(fragments: list[Fragment]) -> dict[str, list[int]]:
    """Return the shapes of all parameters of the model. Collective."""
    shapes = {fragment.name: list(fragment.tensor_slice.whole_shape) for fragment in fragments}
    return {name: shape for part in gather(shapes) for name, shape in part.items()}


def _optimizer_steps(optimizer: torch.optim.Optimizer) -> int:
    steps = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(steps, default=0)
