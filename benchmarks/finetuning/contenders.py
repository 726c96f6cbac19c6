"""Everyone who trains, each in a process of its own.

All have the same model, the same batches in the same order, AdamW with a constant rate, and two threads of one process.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

from app.config import Recipe, load_recipe
from app.data.chat import LEARNED, ChatBlocks, ChatData
from app.data.prepared import IGNORED, Dataset
from app.runs import Run
from app.tasks import prepare
from app.training.data.order import SampleOrder
from app.training.data.rules import Rules
from app.training.data.samples import samples_of
from app.training.run import open_run, prepare_run
from app.training.session import train
from app.training.worker import start_worker
from benchmarks.finetuning.material import BLOCK_LENGTH

WARM_UP = 5
STEPS, BATCH, RATE = 40, 16, 1e-4
LORA_STEPS, LORA_RATE = 24, 1e-3
CHAT_STEPS, CHAT_BLOCKS, CHATS = 16, 8, 32


@dataclass(frozen=True)
class Figures:
    """What one contender reached."""

    steps_per_s: float
    """Over the steps after the first ``WARM_UP``."""
    accuracy: float | None = None
    """On the validation split, after the last step."""
    useful_tokens_per_s: float | None = None
    loss: float | None = None


class _Clock:
    """The time of each optimizer step of this process."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        register_optimizer_step_post_hook(lambda *_: self.ends.append(time.monotonic()))

    @property
    def steps_per_s(self) -> float:
        return (len(self.ends) - 1 - WARM_UP) / (self.ends[-1] - self.ends[WARM_UP])


def classifier_recipe(folder: Path, steps: int, rate: float, *overrides: str) -> Recipe:
    """The recipe of the docstrings."""
    keys = [f"data.source={folder / 'docstrings.jsonl'}", f"model.pretrained={folder / 'encoder'}"]
    return _recipe("docstrings", steps, rate, *keys, f"train.global_batch_size={BATCH}", *overrides)


def chat_recipe(folder: Path, packing: bool) -> Recipe:
    """The recipe of the conversations about the standard library."""
    batch = CHAT_BLOCKS if packing else CHATS
    source = f"data.source={folder / 'chats.jsonl'}"
    keys = [
        source,
        f"model.pretrained={folder / 'gpt'}",
        f"data.chat.packing={packing}",
        f"data.block_length={BLOCK_LENGTH}",
    ]
    return _recipe("conversations", CHAT_STEPS, RATE, *keys, f"train.global_batch_size={batch}")


def _recipe(name: str, steps: int, rate: float, *overrides: str) -> Recipe:
    keys = [f"train.max_steps={steps}", f"train.optimizer.lr={rate}"]
    return load_recipe(Path(__file__).with_name(f"{name}.yaml"), [*keys, *overrides])


def ours(recipe: Recipe) -> Figures:
    """Train with Rayloom. Nothing is published."""
    with tempfile.TemporaryDirectory() as storage:
        clock = _Clock()
        run = Run.start("train", recipe.model_copy(update={"storage": storage}))
        plan, data = prepare_run(run)
        open_run(run, plan, data)
        ending = train(plan, data, start_worker(run.recipe.train), run.folder)
        run.until_result.close()
        return Figures(clock.steps_per_s, ending.records[-1].val_accuracy)


def _from_scratch(folder: Path) -> Figures:
    """The same sizes with fresh weights, and the tokenizer of the encoder."""
    config = json.loads((folder / "encoder/config.json").read_text(encoding="utf-8"))
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fresh = folder / "fresh"
    if not fresh.exists():
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        labels = len(config["id2label"])
        model = BertForSequenceClassification(BertConfig(**{name: config[name] for name in sizes}, num_labels=labels))
        model.save_pretrained(fresh)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (fresh / name).write_bytes((folder / "encoder" / name).read_bytes())
    return ours(classifier_recipe(folder, STEPS, RATE, f"model.pretrained={fresh}"))


def _order(data: Dataset, batch: int) -> list[int]:
    """The samples of Rayloom's first epoch, in order."""
    return [row for rows in _batches(data, batch) for row in rows]


def _tensors(data: Dataset, indices: list[int]) -> dict[str, torch.Tensor]:
    batch = data.batch(indices)
    return {name: torch.from_numpy(array) for name, array in {**batch.inputs, "labels": batch.targets}.items()}


class _Rows(torch.utils.data.Dataset[int]):
    """The numbers of samples: the collator makes tensors of them, with Rayloom's tokenizer."""

    def __init__(self, order: list[int]) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: int) -> int:
        return self._order[place]


class _InOrder(Trainer):  # type: ignore[misc]
    """A Trainer that takes the samples in the given order."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.SequentialSampler:
        return torch.utils.data.SequentialSampler(range(len(self.train_dataset)))


def _trainer(folder: Path) -> Figures:
    """Transformers' Trainer."""
    data = prepare(classifier_recipe(folder, STEPS, RATE))
    model = AutoModelForSequenceClassification.from_pretrained(folder / "encoder")
    clock = _Clock()
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=RATE, weight_decay=0.01,
            lr_scheduler_type="constant", max_grad_norm=1.0, report_to=[], save_strategy="no", logging_strategy="no",
            use_cpu=True, remove_unused_columns=False, disable_tqdm=True, seed=0, optim="adamw_torch_fused",
        )  # fmt: skip
        rows = _Rows(_order(data.train, BATCH))
        _InOrder(model, arguments, lambda indices: _tensors(data.train, indices), rows).train()
    return Figures(clock.steps_per_s, _accuracy(model.eval(), data.validation))


@torch.inference_mode()
def _accuracy(model: Any, split: Dataset) -> float:
    correct = 0
    for first in range(0, len(split), 32):
        batch = _tensors(split, list(range(first, min(first + 32, len(split)))))
        correct += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return correct / len(split)


def _peft(folder: Path) -> Figures:
    """PEFT's model in a plain loop, as its examples train it."""
    data = prepare(classifier_recipe(folder, LORA_STEPS, LORA_RATE))
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "value"])
    model = get_peft_model(AutoModelForSequenceClassification.from_pretrained(folder / "encoder"), lora).train()
    clock, order = _Clock(), _order(data.train, BATCH)
    _loop(model, lambda step: _tensors(data.train, order[step * BATCH : (step + 1) * BATCH]), LORA_STEPS, LORA_RATE)
    return Figures(clock.steps_per_s, _accuracy(model.eval(), data.validation))


def _loop(model: Any, batch_of: Callable[[int], dict[str, torch.Tensor]], steps: int, rate: float) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01, fused=True)
    for step in range(steps):
        batch = batch_of(step)
        targets = batch.pop("labels")
        logits = model(**batch).logits.flatten(0, -2)
        loss: Any = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _chats(folder: Path, packing: bool) -> Figures:
    recipe = chat_recipe(folder, packing)
    figures, data = ours(recipe), prepare(recipe)
    assert isinstance(data, ChatData)
    batch = CHAT_BLOCKS if packing else CHATS
    return _useful(figures, data.train, _batches(data.train, batch)[:CHAT_STEPS], _loss(folder, data.validation))


def _padded(folder: Path) -> Figures:
    """A plain loop over random batches, each padded to its longest conversation."""
    data = prepare(chat_recipe(folder, packing=False))
    assert isinstance(data, ChatData)
    order = np.random.default_rng(0).permutation(len(data.train)).tolist()
    batches = [order[step * CHATS : (step + 1) * CHATS] for step in range(CHAT_STEPS)]
    model = AutoModelForCausalLM.from_pretrained(folder / "gpt", use_cache=False).train()
    clock = _Clock()
    _loop(model, lambda step: _tensors(data.train, batches[step]), CHAT_STEPS, RATE)
    return _useful(Figures(clock.steps_per_s), data.train, batches, None)


def _batches(split: Dataset, size: int) -> list[list[int]]:
    order = SampleOrder(samples_of(split), Rules(size), seed=0)
    return [order.batch(1, number).tolist() for number in range(order.num_batches(1))]


def _useful(figures: Figures, split: ChatBlocks, batches: list[list[int]], loss: float | None) -> Figures:
    """Add the tokens that are no padding, in the steps that were timed."""
    timed = batches[WARM_UP + 1 : CHAT_STEPS]
    mean = float(np.mean([split.lengths[np.array(batch)].sum() for batch in timed]))
    return Figures(figures.steps_per_s, figures.accuracy, figures.steps_per_s * mean, loss)


@torch.inference_mode()
def _loss(folder: Path, split: ChatBlocks) -> float:
    """The mean loss of the model before training, over the targets of the validation split."""
    model, total = AutoModelForCausalLM.from_pretrained(folder / "gpt", use_cache=False).eval(), 0.0
    for batch in _in_parts(split):
        targets = batch.pop("labels")
        logits = model(**batch).logits.flatten(0, 1)
        total += float(functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"))
    return total / split.shards.total(LEARNED)


def _in_parts(split: ChatBlocks) -> Iterator[dict[str, torch.Tensor]]:
    order = np.argsort(list(split.lengths), kind="stable").tolist()
    return (_tensors(split, order[first : first + 8]) for first in range(0, len(order), 8))


CONTENDERS: dict[str, Callable[[Path], Figures]] = {
    "Rayloom": lambda folder: ours(classifier_recipe(folder, STEPS, RATE)),
    "Rayloom from scratch": _from_scratch,
    "Trainer": _trainer,
    "Rayloom LoRA": lambda folder: ours(
        classifier_recipe(
            folder, LORA_STEPS, LORA_RATE, "model.adapter={lora: {rank: 8, alpha: 16, targets: [query, value]}}"
        )
    ),
    "PEFT": _peft,
    "Rayloom packed": lambda folder: _chats(folder, packing=True),
    "Rayloom padded": lambda folder: _chats(folder, packing=False),
    "padded, random batches": _padded,
}


def run(name: str, folder: Path) -> Figures:
    """Train as one contender, in this process, on what ``material`` has written to ``folder``."""
    torch.set_num_threads(2)
    return CONTENDERS[name](folder)
