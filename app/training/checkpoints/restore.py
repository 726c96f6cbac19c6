"""From a checkpoint's content back into a running engine."""

import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from app.config import Layout
from app.training.checkpoints import names
from app.training.checkpoints.fragments import Fragment, by_master, fragments_of
from app.training.checkpoints.rng import restore_random_state
from app.training.checkpoints.snapshot import Content, master_tensors, shards_of
from app.training.checkpoints.state import TrainState
from app.training.engine import TrainingEngine
from app.training.engine.buffers import buffers_of
from app.training.engine.loss_scale import scaler_of
from app.training.engine.masters import master_pairs
from app.training.engine.nvme import is_swapped, read_from_nvme, written_to_nvme
from app.training.engine.optimizer import recall_steps


def destinations(engine: TrainingEngine, layout: Layout, state: TrainState, saved: frozenset[str]) -> Iterator[Content]:
    """Where the tensors of a checkpoint go: into the engine's own memory, each content to be filled when it comes.

    ``saved``: the names that the checkpoint has.
    """
    optimizer = engine.deepspeed.basic_optimizer

    def content_of(fragments: Iterable[Fragment]) -> Content:
        return {
            names.parameter(fragment.name, key): shards_of(fragment, flat, copy=False)
            for fragment in fragments
            for key, flat in _master_tensors(optimizer, fragment, state, saved).items()
        }

    fragments = fragments_of(engine, layout)
    for alike in by_master(fragment for fragment in fragments if is_swapped(engine.deepspeed, fragment.master)):
        with written_to_nvme(engine.deepspeed, alike[0].master):
            yield content_of(alike)
    in_memory = content_of(fragment for fragment in fragments if not is_swapped(engine.deepspeed, fragment.master))
    yield in_memory | {names.buffer(name): buffer for name, buffer in buffers_of(engine).items()}


def apply_state(engine: TrainingEngine, state: TrainState) -> None:
    """After the tensors are in place: the model's weights from the optimizer's, and the counters."""
    deepspeed = engine.deepspeed
    _refresh_weights(engine)
    deepspeed.global_steps = state.position.step
    deepspeed.global_samples = state.position.step * deepspeed.train_batch_size()
    deepspeed.micro_steps = state.position.step * deepspeed.gradient_accumulation_steps()
    recall_steps(deepspeed.basic_optimizer, state.optimizer_steps)
    deepspeed.lr_scheduler.last_epoch = state.schedule_steps - 1
    with warnings.catch_warnings():
        # It asks for a step of the optimizer first, which another process has done.
        warnings.filterwarnings("ignore", message="Detected call of .lr_scheduler.step")
        deepspeed.lr_scheduler.step()
    if state.loss_scale and (scaler := scaler_of(deepspeed)):
        scaler.cur_scale, scaler.cur_iter = state.loss_scale.scale, state.loss_scale.iteration
        scaler.last_overflow_iter, scaler.cur_hysteresis = state.loss_scale.last_overflow, state.loss_scale.hysteresis


def apply_own(engine: TrainingEngine, own: Mapping[str, Tensor]) -> None:
    """What this very process had: its random numbers, and its own view of the model's buffers."""
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
    """Make the state that the optimizer would make on its first step, to be read into; and set its count."""
    state = optimizer.state[master] if keys else {}
    for key in keys - state.keys():
        state[key] = torch.zeros_like(master, requires_grad=False)
    if "exp_avg" in keys:
        counts_in_tensors = type(optimizer).__module__.startswith("torch.")
        state["step"] = torch.tensor(float(steps), device=master.device) if counts_in_tensors else steps


@torch.no_grad()
def _refresh_weights(engine: TrainingEngine) -> None:
    """Copy the optimizer's float32 weights into the model."""
    optimizer = engine.deepspeed.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        _refresh_zero_3(engine)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    else:
        for low, master in master_pairs(optimizer):
            low.copy_(master)


def _refresh_zero_3(engine: TrainingEngine) -> None:
    optimizer = engine.deepspeed.optimizer
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
    for group, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        with read_from_nvme(engine.deepspeed, master):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
