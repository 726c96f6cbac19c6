"""Checkpoints: DeepSpeed's own files, and the weights that were just validated."""

import tempfile
from pathlib import Path
from typing import Any

from app.errors import TrainingError
from app.training.records import EpochRecord
from app.training.weights import WEIGHTS_FILE, save_weights

_TAG = "state"


def save_checkpoint(engine: Any, records: list[EpochRecord], is_first: bool) -> Path:
    """Write this worker's part of a checkpoint into a new temporary folder.

    Every worker writes its part of the optimizer; the first also writes the model. The parts lie in
    one folder once they are stored. The caller deletes the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="rayloom-checkpoint-"))
    state = {"records": [record.model_dump() for record in records]}
    engine.save_checkpoint(str(folder), tag=_TAG, client_state=state, exclude_frozen_parameters=False)
    for script in folder.glob("zero_to_*.py"):  # DeepSpeed's converters: the weights lie here already
        script.unlink()
    if is_first:
        save_weights(engine.module, folder / WEIGHTS_FILE)
    return folder


def load_checkpoint(engine: Any, folder: Path) -> list[EpochRecord]:
    """Bring ``engine`` to the state of a checkpoint and return the epochs that led there.

    Raises:
        TrainingError: the folder holds no whole checkpoint.
    """
    path, state = engine.load_checkpoint(str(folder), tag=_TAG)
    if path is None:
        raise TrainingError(f"checkpoint {str(folder)!r} cannot be loaded: delete it to start over")
    return [EpochRecord.model_validate(record) for record in state["records"]]
