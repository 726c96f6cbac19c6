"""python -m tests.parity.worker FOLDER SELECTION: print the losses of the selected plans, as a line of JSON.

Checkpoints are written to FOLDER.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial

import cpuinfo  # type: ignore[import-untyped]
import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM
from upath import UPath

from app.config import CheckpointConfig, Layout, TrainConfig
from app.models.adapter import adapt
from app.models.blueprint import Blueprint
from app.models.factory import build_model, logits_of
from app.models.pretrained import with_pretrained_weights
from app.training.activity import Activity
from app.training.checkpoints.reader import load_checkpoint
from app.training.checkpoints.snapshot import take_snapshot
from app.training.checkpoints.state import Position
from app.training.checkpoints.store import Checkpoint, CheckpointStore
from app.training.checkpoints.writer import CheckpointWriter
from app.training.data.feed import MicroBatch
from app.training.data.ranks import DataRank
from app.training.engine import TrainingEngine, create_engine
from app.training.engine.optimizer import lr_factor
from app.training.worker import import_deepspeed, leave_process_group, start_worker
from tests.forks import run_ranks
from tests.parity.plans import (
    BATCH,
    CLIPPING,
    FACTS,
    HALF,
    KEPT,
    LENGTH,
    MODELS,
    OPTIMIZERS,
    SELECTIONS,
    STEPS,
    Row,
    rows_of,
)

PRETRAINED: dict[str, str] = {}
"""The folders with the weights of models that start from some, by the model's name."""


def global_batches() -> list[torch.Tensor]:
    """Two batches of few of the tokens, again and again, so that ten steps learn something."""
    generator = torch.Generator().manual_seed(1)
    two = [torch.randint(40, (BATCH, LENGTH + 1), generator=generator) for _ in range(2)]
    return [two[step % 2] for step in range(STEPS)]


def build(model: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return build_model(MODELS[model], FACTS)


def blueprint(model: str) -> Blueprint:
    """The blueprint of a model, with readers of its weights if it starts from some."""
    torch.manual_seed(0)
    config = MODELS[model]
    if config.adapter:
        made = Blueprint.of(lambda: adapt(build_model(config, FACTS), config.adapter.lora, trains_head=False))
    else:
        made = Blueprint.of(partial(build, model))
    if model not in PRETRAINED:
        return made
    return with_pretrained_weights(made, config.model_copy(update={"pretrained": PRETRAINED[model]}))


def write_pretrained(folder: str) -> None:
    """Write the weights that some models start from."""
    location = f"{folder}-pretrained"
    build("pretrained llama", seed=7).save_pretrained(location)
    PRETRAINED.update(dict.fromkeys(("pretrained llama", "LoRA", "DoRA"), location))


def plain_model(name: str) -> torch.nn.Module:
    """The model as PEFT and transformers build it, with the same fresh values."""
    if name not in PRETRAINED:
        return build(name)
    model = AutoModelForCausalLM.from_pretrained(PRETRAINED[name])
    if (adapter := MODELS[name].adapter) is None:
        return model
    config = PeftConfig(
        r=adapter.lora.rank, lora_alpha=adapter.lora.alpha, use_dora=adapter.lora.dora, target_modules="all-linear"
    )
    adapted = get_peft_model(model, config).base_model.model
    fresh = {key: value for key, value in blueprint(name).make().state_dict().items() if ".lora_A." in key}
    assert not adapted.load_state_dict(fresh, strict=False).unexpected_keys
    return adapted


@cache
def plain_losses(model_name: str, optimizer_name: str) -> list[float]:
    """The loss of each step, then of validation, in one process of plain PyTorch in float32.

    Nothing of the trainer is used but its schedule.
    """
    config = TrainConfig.model_validate({"optimizer": OPTIMIZERS[optimizer_name]})
    model = plain_model(model_name)
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.ndim > 1], "weight_decay": 0.01},
        {"params": [parameter for parameter in model.parameters() if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if config.optimizer.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=config.optimizer.lr, momentum=config.optimizer.momentum)
    else:
        optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr)
    losses = []
    for step, tokens in enumerate(global_batches()):
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * lr_factor(step, STEPS, config.schedule)
        logits = logits_of(model(tokens[:, :-1]))
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        tokens = global_batches()[0]
        logits = logits_of(model(tokens[:, :-1]))
        losses.append(functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item())
    return losses


def planned(row: Row) -> tuple[TrainingEngine, Layout]:
    layout = row.config.layout(torch.distributed.get_world_size())
    torch.manual_seed(0)
    return create_engine(blueprint(row.model), row.config, layout, STEPS), layout


def train(engine: TrainingEngine, layout: Layout, steps: range) -> list[float]:
    """The loss of each step, mean over the ranks."""
    data_rank = DataRank(layout.data_rank(torch.distributed.get_rank()), layout.data)

    def stream(tokens: torch.Tensor) -> Iterator[MicroBatch]:
        for indices in np.array_split(np.arange(BATCH)[data_rank.rank :: data_rank.size], layout.gradient_accumulation):
            yield MicroBatch({"input_ids": tokens[indices][:, :-1]}, tokens[indices][:, 1:])

    losses = []
    for step in steps:
        loss = engine.train_step(stream(global_batches()[step]), Activity()).loss.double()
        torch.distributed.all_reduce(loss)
        losses.append(loss.item() / layout.workers)
    return losses


def validate(engine: TrainingEngine, layout: Layout) -> float:
    """The mean loss over the first batch, in two uneven parts."""
    share = list(range(BATCH))[layout.data_rank(torch.distributed.get_rank()) :: layout.data]
    tokens = global_batches()[0]
    parts = [share[:-1], share[-1:]]
    sums = engine.evaluate(
        MicroBatch({"input_ids": tokens[indices][:, :-1]}, tokens[indices][:, 1:]) for indices in parts if indices
    ).sums
    torch.distributed.all_reduce(sums)
    return engine.objective.values(sums)["val_loss"]


def compare(row: Row, folder: UPath) -> dict[str, list[float]]:
    """The plan's losses beside plain PyTorch's; its state after half of the steps is kept, if others go on from it."""
    engine, layout = planned(row)
    writer = CheckpointWriter(CheckpointStore(folder / row.slug), CheckpointConfig())
    losses = train(engine, layout, range(HALF))
    if row.name in KEPT:
        take = partial(take_snapshot, engine, layout, Position(step=HALF), [], row.config.precision)
        writer.save(take)
    losses += train(engine, layout, range(HALF, STEPS))
    writer.wait()
    found = {"plan": [*losses, validate(engine, layout)], "plain": plain_losses(row.model, row.config.optimizer.name)}
    return found | ({"state": [state_per_trained_value(engine, row)]} if MODELS[row.model].adapter else {})


def state_per_trained_value(engine: TrainingEngine, row: Row) -> float:
    """The optimizer's numbers for each trained value, over all ranks that share them."""
    states = engine.deepspeed.basic_optimizer.state.values()
    held = torch.tensor([float(sum(value.numel() for state in states for value in state.values() if value.ndim))])
    torch.distributed.all_reduce(held)
    copies = 1 if row.config.plan.zero_stage else row.config.workers
    return held.item() / copies / blueprint(row.model).num_trained


def go_on(row: Row, folder: UPath) -> dict[str, list[float]]:
    """Losses of the second half from each state in ``folder`` that the same optimizer left."""
    found = {}
    for kept in sorted(path.name for path in folder.iterdir() if path.name.endswith(row.config.optimizer.name)):
        engine, layout = planned(row)
        load_checkpoint(engine, layout, CheckpointStore(folder / kept).folder_of(Checkpoint(HALF)))
        found[kept] = train(engine, layout, range(HALF, STEPS))
    return found


Losses = dict[str, list[float]]
"""By whose they are."""
Found = dict[str, Losses]
"""By row."""


def work(make: Callable[[Row, UPath], Losses], folder: str, wanted: list[str]) -> Found:
    """One rank's part."""
    torch.set_num_threads(1)
    start_worker(TrainConfig())
    rows = rows_of(torch.distributed.get_world_size())
    found = {name: make(row, UPath(folder)) for name, row in rows.items() if name in wanted}
    torch.distributed.barrier()
    leave_process_group()
    return found


def launch(make: Callable[[Row, UPath], Losses], folder: str, wanted: dict[int, list[str]]) -> dict[int, Found]:
    """Run each number of processes, and return the findings of the first rank of each.

    The processes are forked, because importing takes longer than training.
    """
    return {processes: run_ranks(processes, work, make, folder, names) for processes, names in wanted.items()}


def _prepare_forks() -> None:
    """Do once what every rank would otherwise repeat: import the models' modules, and identify the processor.

    DeepSpeed identifies the processor whenever an optimizer is offloaded. That takes more than a second, in another
    process.
    """
    for model in MODELS:
        build(model)
    cpuinfo.get_cpu_info = partial(dict, cpuinfo.get_cpu_info())


def main() -> None:
    warnings.filterwarnings("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_deepspeed()
    _prepare_forks()
    folder, selected = sys.argv[1], SELECTIONS[sys.argv[2]]
    write_pretrained(folder)
    found = {"compare": launch(compare, folder, selected.compared), "go on": launch(go_on, folder, selected.goes_on)}
    print("LOSSES " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
