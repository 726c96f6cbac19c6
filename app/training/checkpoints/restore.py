"""Restoring a running engine from a checkpoint's content."""

import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from app.config import Layout
from app.training.checkpoints import names
from app.training.checkpoints.fragments import Fragment, by_master, fragments_of, shards_of
from app.training.checkpoints.snapshot import Content, master_tensors
from app.training.checkpoints.state import TrainState
from app.training.engine import TrainingEngine
from app.training.engine.deepspeed_internals import (
    is_on_nvme,
    recall_cpu_adam_steps,
    refresh_weights,
    set_loss_scale,
    set_step,
    written_to_nvme,
)
from app.training.engine.engine import buffers_of
from app.training.worker import restore_random_state


def destinations(engine: TrainingEngine, layout: Layout, state: TrainState, saved: frozenset[str]) -> Iterator[Content]:
    """Yield the engine's own tensors, by their names in the checkpoint. Fill each content before taking the next.

    State on NVMe comes group by group, and is written back when the next content is taken. ``saved`` are the names of
    the checkpoint's tensors.
    """
    optimizer = engine.deepspeed.basic_optimizer

    def content_of(fragments: Iterable[Fragment]) -> Content:
        return {
            names.parameter(fragment.name, key): shards_of(fragment, flat, copy=False)
            for fragment in fragments
            for key, flat in _master_tensors(optimizer, fragment, state, saved).items()
        }

    fragments = fragments_of(engine, layout)
    for group in by_master(fragment for fragment in fragments if is_on_nvme(engine.deepspeed, fragment.master)):
        with written_to_nvme(engine.deepspeed, group[0].master):
            yield content_of(group)
    in_memory = content_of(fragment for fragment in fragments if not is_on_nvme(engine.deepspeed, fragment.master))
    yield in_memory | {names.buffer(name): buffer for name, buffer in buffers_of(engine).items()}


def apply_state(engine: TrainingEngine, state: TrainState) -> None:
    """After the tensors are filled, set the model's weights from the optimizer's, and set the counters."""
    deepspeed = engine.deepspeed
    engine.forget_gradients()
    refresh_weights(deepspeed)
    set_step(deepspeed, state.position.step)
    recall_cpu_adam_steps(deepspeed.basic_optimizer, state.optimizer_steps)
    # The scheduler sets the learning rates only when it steps, which adds one.
    deepspeed.lr_scheduler.last_epoch = state.schedule_steps - 1
    with warnings.catch_warnings():
        # torch warns that the optimizer made no step before. An earlier process did.
        warnings.filterwarnings("ignore", message="Detected call of .lr_scheduler.step")
        deepspeed.lr_scheduler.step()
    if state.loss_scale:
        set_loss_scale(deepspeed, state.loss_scale)


def apply_own(engine: TrainingEngine, own: Mapping[str, Tensor]) -> None:
    """Restore the process's own tensors: its random states, and its view of the model's buffers."""
    for name, buffer in buffers_of(engine).items():
        buffer.copy_(own[names.buffer(name)])
    prefix = names.random("")
    states = {name.removeprefix(prefix): state for name, state in own.items() if name.startswith(prefix)}
    restore_random_state(states, engine.deepspeed.device)


def _master_tensors(
    optimizer: torch.optim.Optimizer, fragment: Fragment, state: TrainState, saved: frozenset[str]
) -> dict[str, Tensor]:
    keys = names.keys_of(fragment.name, saved) - {names.WEIGHT}
    _prepare_state(optimizer, fragment.master, keys, state.optimizer_steps)
    return master_tensors(optimizer, fragment)


def _prepare_state(optimizer: torch.optim.Optimizer, master: Tensor, keys: set[str], steps: int) -> None:
    """Create the state that the optimizer would create on its first step, and set its step count."""
    state = optimizer.state[master] if keys else {}
    for key in keys - state.keys():
        state[key] = torch.zeros_like(master, requires_grad=False)
    if "exp_avg" in keys:
        # torch's optimizers count steps in tensors, and DeepSpeed's in integers.
        counts_in_tensors = type(optimizer).__module__.startswith("torch.")
        state["step"] = torch.tensor(float(steps), device=master.device) if counts_in_tensors else steps
