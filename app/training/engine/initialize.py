"""DeepSpeed's engine around a model, with the recipe's optimizer and schedule."""

import io
from contextlib import redirect_stdout
from typing import Any

import torch

from app.config import Layout, TrainConfig
from app.models.traits import ModelKind
from app.training.engine.deepspeed_config import deepspeed_config, with_bounded_buffers
from app.training.engine.nvme import load_asynchronous_io, require_aligned_gradients, with_own_folder
from app.training.engine.optimizer import create_optimizer, create_scheduler, num_elements
from app.training.worker import import_deepspeed


def initialize(model: Any, config: TrainConfig, layout: Layout, total_steps: int, kind: ModelKind) -> Any:
    """The engine for ``model``, cut from a model of ``kind``."""
    swaps = config.plan.offload == "nvme"
    if swaps:
        load_asynchronous_io()
        config = with_own_folder(config)
    optimizer = create_optimizer(model, config)
    num_parameters = sum(map(num_elements, model.parameters()))
    skipped = optimizer.register_step_pre_hook(_without_gradients) if config.plan.zero_stage == 0 else None
    with redirect_stdout(io.StringIO()):  # some of its optimizers print what memory they take
        engine, *_ = import_deepspeed().initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=create_scheduler(optimizer, config, total_steps),
            config=with_bounded_buffers(deepspeed_config(config, layout, kind), num_parameters),
        )
    if skipped:
        skipped.remove()
    if engine.fp16_enabled() and hasattr(engine.optimizer, "loss_scaler"):
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False  # the loop does, and names step and rank
    if swaps:
        require_aligned_gradients(engine)
    return engine


def _without_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Clear the gradients, so that a step of ``optimizer`` does nothing.

    Without ZeRO, in bf16 or fp16, DeepSpeed creates the optimizer state with a step on gradients of zeros. AdamW would
    count that step and decay the weights. The gradients would also take 4 bytes per parameter.
    """
    optimizer.zero_grad(set_to_none=True)
