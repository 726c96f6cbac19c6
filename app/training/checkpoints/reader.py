"""Reading of checkpoints, under the plan that wrote them or any other."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from upath import UPath

from app.checksums import VerifiedFolder
from app.config import Layout
from app.errors import RayloomError, TrainingError
from app.models.precision import TORCH_DTYPES
from app.models.safetensors_file import Form, write_safetensors
from app.storage import ProgressCallback, no_op
from app.training.checkpoints import names
from app.training.checkpoints.restore import apply_own, apply_state, destinations
from app.training.checkpoints.state import TrainState
from app.training.checkpoints.writer import STATE_FILE
from app.training.engine import TrainingEngine
from app.training.worker import run_on_all

Own = dict[str, Tensor]


def load_checkpoint(
    engine: TrainingEngine, layout: Layout, folder: UPath, on_progress: ProgressCallback = no_op
) -> TrainState:
    """Restore ``engine`` from a checkpoint. Collective: an error of one process is raised in all of them.

    Each process reads and verifies the part that its plan assigns to it, whatever plan wrote the checkpoint. The random
    number generators are restored if the number of processes is the same.

    Raises:
        TrainingError: the checkpoint is of another model, or storage cannot be read at the moment.
        StorageError: the checkpoint is damaged. The engine's state is then a mixture of old and new.
    """
    state, own = run_on_all(partial(_read, engine, layout, folder, on_progress))
    apply_state(engine, state)
    if own:
        apply_own(engine, own)
    return state


def _read(
    engine: TrainingEngine, layout: Layout, folder: UPath, on_progress: ProgressCallback
) -> tuple[TrainState, Own]:
    """Read the tensors into ``engine``. Return the rest of the state, and the tensors that only this rank had."""
    from app.training.checkpoints.parts import SavedParts

    try:
        files = VerifiedFolder(folder)
        state, saved = read_state(files), SavedParts(files, on_progress)
        for content in destinations(engine, layout, state, saved.names):
            if missing := sorted(content.keys() - saved.names):
                raise TrainingError(
                    f"checkpoint {str(folder)!r} has no {missing[0]!r}: it is of another model; set train.resume to a "
                    "run of this recipe"
                ).of("checkpoint.other_model", "train.resume")
            saved.read_into(content)
        has_same_layout = all(
            getattr(state, name) == getattr(layout, name) for name in ("workers", "tensor", "pipeline")
        )
        prefix = names.own(dist.get_rank(), "")
        # What a rank alone had is of use only to a rank in the same place.
        own = saved.read({name for name in saved.names if name.startswith(prefix)}) if has_same_layout else {}
    except RayloomError:
        raise
    except Exception as error:  # each protocol's driver has errors of its own
        raise TrainingError(f"checkpoint {str(folder)!r} cannot be read: {error}").of(
            "checkpoint.unreadable"
        ) from error
    return state, {name.removeprefix(prefix): tensor for name, tensor in own.items()}


def read_state(folder: VerifiedFolder) -> TrainState:
    """Read the state that is no tensor. Raises StorageError if the file does not match its checksum."""
    return TrainState.model_validate_json(folder.read(STATE_FILE))


def export_weights(folder: UPath, path: Path) -> None:
    """Write a checkpoint of any plan as one safetensors file, equal to the weights of a single process.

    The file is float32. After training in bf16 or fp16 its parameters are rounded, as validation used them. Only one
    tensor is in memory at a time.
    """
    from app.training.checkpoints.parts import SavedParts

    files = VerifiedFolder(folder)
    state, saved = read_state(files), SavedParts(files)
    key_of = {name: key for key in saved.in_file_order() if (name := names.in_model(key)) is not None}

    def read(name: str) -> Tensor:
        key = key_of[name]
        (tensor,) = saved.read({key}).values()
        if tensor.is_floating_point():
            # Training rounds parameters, and keeps buffers as they are.
            rounded = TORCH_DTYPES[state.precision] if key == names.parameter(name, names.WEIGHT) else tensor.dtype
            tensor = tensor.to(rounded).float()
        return tensor.reshape(state.shapes.get(name, tensor.shape))

    def form_of(name: str) -> Form:
        form = saved.form_of(key_of[name])
        dtype = torch.float32 if form.dtype.is_floating_point else form.dtype
        return Form(dtype, tuple(state.shapes.get(name, form.shape)))

    write_safetensors(path, {name: form_of(name) for name in key_of}, read)
