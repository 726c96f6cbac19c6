"""The DeepSpeed engine of one worker."""

from typing import Any

import torch
from torch import nn

from app.config import OptimizerConfig, TrainConfig
from app.training.plan import deepspeed_config
from app.training.schedule import lr_factor
from app.training.worker import import_deepspeed


def create_engine(model: nn.Module, config: TrainConfig, total_steps: int) -> Any:
    """DeepSpeed's engine around ``model``, with the recipe's optimizer and schedule over ``total_steps``."""
    optimizer = _optimizer(model, config.optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, total_steps, config.schedule))
    engine, *_ = import_deepspeed().initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=deepspeed_config(config)
    )
    return engine


def _optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer; vectors (biases, norms) are not decayed."""
    groups = [
        {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
