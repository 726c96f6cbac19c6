"""The small part of a checkpoint: where training stands."""

from pydantic import BaseModel, ConfigDict

from app.config import Precision
from app.training.data.batches import EPOCH_ORDER
from app.training.records import EpochRecord


class Position(BaseModel):
    """Where in the data a run stands, and what it has counted so far."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # null is no number when it is read again

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 1
    """The epoch under way, from 1."""
    batches_done: int = 0
    """Global batches of that epoch that are done."""
    loss_sum: float = 0.0
    losses: int = 0
    """Sum and number of their losses."""
    samples: int = 0
    seconds: float = 0.0
    """Samples trained on in this epoch so far, and the time that they took."""
    left_out: list[tuple[int, int]] = []
    """Batches, as (epoch, number), that a roll-back leaves out."""


class LossScale(BaseModel):
    """fp16's dynamic loss scale."""

    scale: float
    iteration: int
    last_overflow: int
    hysteresis: int


class TrainState(BaseModel):
    """Everything of a checkpoint that is not a tensor."""

    position: Position
    epoch_order: str | None = None
    """``EPOCH_ORDER`` of the version that wrote the checkpoint. None for versions that did not record it."""
    records: list[EpochRecord]
    """Epochs so far: early stopping and the choice of the best read them."""
    workers: int
    tensor: int
    pipeline: int
    """With another layout a process plays another part, and its random numbers are not its own."""
    optimizer_steps: int
    """Updates applied, by which AdamW corrects its bias; fp16 may have skipped some."""
    schedule_steps: int
    loss_scale: LossScale | None
    precision: Precision
    shapes: dict[str, list[int]]
    """The shape of every parameter in the whole model, by name."""

    @property
    def is_in_another_order(self) -> bool:
        """True if ``position`` counts batches that contain other samples in this version."""
        epoch, left_out = self.position.epoch, self.position.left_out
        counts_batches = self.position.batches_done > 0 or any(number >= epoch for number, _ in left_out)
        return counts_batches and self.epoch_order != EPOCH_ORDER
