"""The part of a checkpoint that is no tensor: the position of the run, and its counters."""

from pydantic import BaseModel, ConfigDict

from app.config import Precision
from app.training.engine.deepspeed_internals import LossScale
from app.training.records import EpochRecord


class Position(BaseModel):
    """The position of a run in the data, and its counts so far."""

    # As null, NaN and infinity could not be read back as numbers.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 1
    """The epoch under way, from 1."""
    batches_done: int = 0
    """Number of global batches of that epoch that are done."""
    loss_sum: float = 0.0
    losses: int = 0
    """Sum and number of their losses."""
    samples: int = 0
    seconds: float = 0.0
    """Number of samples trained on in this epoch so far, and the seconds that they took."""
    offsets: dict[int, int] = {}
    """Of a stream: where the epoch's micro-epoch begins, by partition. Empty: where the run found the stream."""
    left_out: list[tuple[int, int]] = []
    """Batches that rollbacks left out, as (epoch, number)."""


class TrainState(BaseModel):
    """Everything of a checkpoint that is not a tensor."""

    position: Position
    epoch_order: str
    """Name of the order in which the samples were read."""
    records: list[EpochRecord]
    """The epochs so far, for early stopping and for the choice of the best epoch."""
    workers: int
    tensor: int
    pipeline: int
    """With another layout a rank has another part of the data, so random states are not restored."""
    optimizer_steps: int
    """Number of applied updates, with which AdamW corrects its bias. fp16 may have skipped some steps."""
    schedule_steps: int
    loss_scale: LossScale | None
    precision: Precision
    shapes: dict[str, list[int]]
    """Shape of every parameter in the whole model, by name."""

    def is_in_another_order(self, epoch_order: str) -> bool:
        """Whether ``position`` counts batches that contain other samples in ``epoch_order``."""
        epoch, left_out = self.position.epoch, self.position.left_out
        counts_batches = self.position.batches_done > 0 or any(number >= epoch for number, _ in left_out)
        return counts_batches and self.epoch_order != epoch_order
