"""A cascade of two models beside the large one alone: python -m benchmarks.serving.cascade"""

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from app.compile.compilation import Compilation
from app.compile.publication import publish
from app.compile.subject import load_subject
from app.compile.variants import wanted_variants
from app.config import load_recipe
from app.data.classification import prepare
from app.data.examples import Split
from app.repository.repository import Repository
from app.serving.batching.rows import by_shape, taken
from app.serving.cascade.plan import calibrate_versions
from app.serving.cascade.routing import route
from app.serving.cascade.rule import CascadeRule
from app.serving.model.loaded import LoadedModel, load_model
from app.storage import to_path
from app.tasks import find_processor
from app.telemetry.flops import flops_per_sample
from app.tensors import OUTPUT, Tensors
from app.training.run_folder import RECIPE_FILE
from app.training.weights import load_weights
from benchmarks.compile.models import Model, train
from benchmarks.machine import load_average, machine, today, versions
from benchmarks.markdown import table, verdict
from benchmarks.rounds import turns
from benchmarks.spread import Spread

RESULTS = Path(__file__).with_name("CASCADE.md")
FLOOR, MOST_COMPUTE = 0.995, 0.5
_RECIPE, _HELD_OUT = "recipes/reviews.yaml", 0.3
_BOTH = (
    "train.workers=1",
    "train.linear_baseline=false",
    "compile={precisions: [fp32], engines: [openvino], batch_sizes: [1, 32]}",
)
_SMALL = ("model.args={layers: 1, width: 32, heads: 2, dropout: 0.2}", "train.optimizer.lr=2.0e-3", "train.epochs=4")
_LARGE = ("train.epochs=3",)
_THREADS = 1
_BATCH_SIZES = (1, 32)
_ROUNDS = 3
_PACKAGES = ("rayloom", "openvino", "torch")


@dataclass(frozen=True)
class Contender:
    """A published model, with the arithmetic that it does on a row."""

    model: LoadedModel
    flops: Callable[[Tensors], float]
    """Of each of the rows that are given, all of one shape."""


@dataclass(frozen=True)
class Half:
    """What a cascade did on rows that it was not calibrated on."""

    rule: CascadeRule
    small_right: NDArray[np.bool_]
    """Of shape (rows), as what follows."""
    large_right: NDArray[np.bool_]
    right: NDArray[np.bool_]
    stages: NDArray[np.intp]
    small_flops: NDArray[np.float64]
    large_flops: NDArray[np.float64]
    seconds: dict[int, Spread]
    """Of the cascade / of the large model, by the rows of a batch."""

    @property
    def flops(self) -> NDArray[np.float64]:
        """Of the cascade, of shape (rows)."""
        return np.where(self.stages == 1, self.large_flops, 0.0) + (self.small_flops if 0 in self.rule.asked else 0.0)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print what was found and keep it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.cascade", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="file that is written")
    arguments = parser.parse_args(argv)
    began, load = time.monotonic(), load_average()
    with tempfile.TemporaryDirectory(prefix="bench-cascade-") as temporary:
        halves = measure(Path(temporary))
    minutes = (time.monotonic() - began) / 60
    text = report(halves, f"Load average: {load} before, {load_average()} after; {minutes:.0f} minutes.")
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


def measure(folder: Path) -> list[Half]:
    """Train and publish both models, calibrate on each half of the rows held out, and measure on the other half."""
    held_out, source = _data(folder)
    small, large = (_contender(name, size, source, folder) for name, size in (("small", _SMALL), ("large", _LARGE)))
    order = np.random.default_rng(0).permutation(len(held_out))
    halves = [
        Split([held_out.inputs[row] for row in part], [held_out.classes[row] for row in part])
        for part in np.array_split(order, 2)
    ]
    return [_half(small, large, *each) for each in (halves, halves[::-1])]


def _data(folder: Path) -> tuple[Split, Path]:
    """Rows that no training sees, not even to choose its best epoch, and a file with all others."""
    recipe = load_recipe(_RECIPE, [f"data.validation_fraction={_HELD_OUT}"])
    data, source = prepare(recipe.data, find_processor(recipe.task)), folder / "reviews.jsonl"
    split = data.train.split
    lines = [
        json.dumps({"text": text, "label": data.labels[number]})
        for text, number in zip(split.inputs, split.classes, strict=True)
    ]
    source.write_text("\n".join(lines), encoding="utf-8")
    return data.validation.split, source


def _contender(name: str, overrides: Sequence[str], source: Path, folder: Path) -> Contender:
    """As a person makes one: trained in a process of its own, compiled for this CPU in float32, and published."""
    compiled, storage = folder / f"compiled-{name}", to_path(folder / "storage")
    weights = train(Model(name, _RECIPE, train, overrides=(f"data.source={source}", *_BOTH, *overrides)), folder)
    compiled.mkdir()
    recipe = load_recipe(str(weights / RECIPE_FILE))
    subject, wanted = load_subject(weights, recipe, _THREADS), wanted_variants(recipe.compile)
    compilation = Compilation(subject, recipe.compile, wanted, compiled, partial(print, flush=True))
    compilation.prove()
    manifest = publish(compilation, compilation.choose(), name, Repository(storage), to_path(folder))
    module = load_weights(weights).model

    def flops(rows: Tensors) -> float:
        inputs = {key: torch.from_numpy(tensor) for key, tensor in rows.items()}
        return flops_per_sample(module, inputs) / 3  # it counts a step of training, thrice the forward pass

    return Contender(load_model(storage, name, manifest.version, _THREADS), flops)


def _half(small: Contender, large: Contender, for_rule: Split, for_test: Split) -> Half:
    """Calibrate on one half and measure on the other."""
    rule = calibrate_versions([small.model, large.model], for_rule, FLOOR)
    print(rule.summary(["the small model", "the large model"]), flush=True)
    order, batches = _batches(for_test, large.model, _BATCH_SIZES[-1])
    classes = np.array(for_test.classes)[order]
    answers = [asyncio.run(_cascade(rule, small, large, batch)) for batch in batches]

    def right(logits: list[Tensors]) -> NDArray[np.bool_]:
        equal: NDArray[np.bool_] = np.concatenate([each[OUTPUT] for each in logits]).argmax(-1) == classes
        return equal

    def flops(contender: Contender) -> NDArray[np.float64]:
        return np.concatenate([np.full(_num_rows(batch), contender.flops(batch)) for batch in batches])

    return Half(
        rule=rule,
        small_right=right([small.model.engine.infer(batch) for batch in batches]),
        large_right=right([large.model.engine.infer(batch) for batch in batches]),
        right=right([outputs for outputs, _ in answers]),
        stages=np.concatenate([stages for _, stages in answers]),
        small_flops=flops(small),
        large_flops=flops(large),
        seconds={size: _times(rule, small, large, _batches(for_test, large.model, size)[1]) for size in _BATCH_SIZES},
    )


def _batches(split: Split, model: LoadedModel, size: int) -> tuple[NDArray[np.intp], list[Tensors]]:
    """Batches of rows that alone are padded to one length, and the place of their rows in the split."""
    alike = by_shape(model.processor.encode([text]) for text in split.inputs)
    cut = [each[start : start + size] for each in alike for start in range(0, len(each), size)]
    return np.concatenate(cut), [model.processor.encode([split.inputs[place] for place in each]) for each in cut]


async def _cascade(
    rule: CascadeRule, small: Contender, large: Contender, batch: Tensors
) -> tuple[Tensors, NDArray[np.intp]]:
    """The cascade as a replica runs it, without its queues."""
    engines = [small.model.engine, large.model.engine]

    async def ask(stage: int, rows: NDArray[np.intp]) -> Tensors:
        return engines[stage].infer(taken(batch, rows))

    return await route(rule, _num_rows(batch), ask)


async def _alone(large: Contender, batch: Tensors) -> Tensors:
    return large.model.engine.infer(batch)


def _times(rule: CascadeRule, small: Contender, large: Contender, batches: Sequence[Tensors]) -> Spread:
    """Time of the cascade / time of the large model, round by round; in a round they take turns."""
    contenders: dict[str, Callable[[Tensors], Awaitable[object]]] = {
        "large": partial(_alone, large),
        "cascade": partial(_cascade, rule, small, large),
    }

    async def run(name: str) -> float:
        began = time.perf_counter()
        for batch in batches:
            await contenders[name](batch)
        return time.perf_counter() - began

    for name in contenders:  # the first call of a shape is slower
        asyncio.run(run(name))
    rounds = [{name: asyncio.run(run(name)) for name in names} for names in turns(list(contenders), _ROUNDS)]
    return Spread(tuple(each["cascade"] / each["large"] for each in rounds))


def _num_rows(batch: Tensors) -> int:
    return len(next(iter(batch.values())))


def report(halves: Sequence[Half], circumstances: str) -> str:
    """What was reached, beside the goals."""
    header = ("calibrated on", "measured on", "threshold", "small answers", "small", "large", "cascade", "lost, gained")
    rows = [
        (
            f"{each.rule.rows:,} rows",
            f"{len(each.stages):,} rows",
            "none" if each.rule.thresholds[0] is None else f"{each.rule.thresholds[0]:.4f}",
            f"{(each.stages == 0).mean():.1%}, expected {each.rule.expected_shares[0]:.1%}",
            f"{each.small_right.mean():.4f}",
            f"{each.large_right.mean():.4f}",
            f"{each.right.mean():.4f}",
            f"{(each.large_right & ~each.right).sum()}, {(each.right & ~each.large_right).sum()}",
        )
        for each in halves
    ]
    return f"""# A cascade of two models

`python -m benchmarks.serving.cascade` wrote this on {today()}. {machine()}.
{versions(_PACKAGES)}. {circumstances}

{table(("of the large model's", "goal", "reached", ""), list(_goals(halves)))}

{table(header, rows)}

A small and a large model of `{_RECIPE}` are trained on {1 - _HELD_OUT:.0%} of its reviews, compiled in float32
and run by OpenVINO with {_THREADS} thread. The other {_HELD_OUT:.0%} no training saw, not even to choose its epoch.
Their first half gives the threshold, with which all is measured on the second; then the other way round; the first
table is of both together. A threshold is taken if its half shows the floor of {FLOOR} with confidence
{halves[0].rule.confidence:g}; ± is a standard error. **small**, **large**, **cascade**: accuracy. **lost**, **gained**:
rows that only the large model, or only the cascade, answers right. Operations are counted by PyTorch. Time is that of
all rows, in batches of rows of one length; the median of {_ROUNDS} rounds of each half, and the range.

The small model: `{" ".join(_SMALL)}`. The large one is the recipe's, `{" ".join(_LARGE)}`.
"""


def _goals(halves: Sequence[Half]) -> Iterator[tuple[str, ...]]:
    large_right = sum(int(each.large_right.sum()) for each in halves)
    accuracy = sum(int(each.right.sum()) for each in halves) / large_right
    error = math.sqrt(sum(int((each.right != each.large_right).sum()) for each in halves)) / large_right
    yield "accuracy", f"≥ {FLOOR}", f"{accuracy:.4f} ± {error:.4f}", verdict(accuracy >= FLOOR)
    large_flops = sum(each.large_flops.sum() for each in halves)
    compute = sum(each.flops.sum() for each in halves) / large_flops
    least = sum(each.small_flops.sum() for each in halves) / large_flops
    reached = f"{compute:.3f}, of which the small model {least:.3f}"
    yield "operations", f"≤ {MOST_COMPUTE}", reached, verdict(bool(compute <= MOST_COMPUTE))
    for size in _BATCH_SIZES:
        ratio = Spread(tuple(value for each in halves for value in each.seconds[size].values))
        yield f"time, batches of {size}", f"≤ {MOST_COMPUTE}", str(ratio), verdict(ratio.median <= MOST_COMPUTE)


if __name__ == "__main__":
    main()
