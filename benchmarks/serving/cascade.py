"""Compare a cascade of a small and a large model with the large one alone: python -m benchmarks.serving.cascade"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from upath import UPath

from app.artifacts import DATA, RECIPE_FILE, WEIGHTS
from app.compile.compilation import Compilation
from app.compile.publication import publish
from app.compile.source_model import load_source_model
from app.compile.variants import requested_variants
from app.config import load_recipe
from app.data.labelled import LabelledData, LabelledDataset, LabelledSplit
from app.data.targets import Classes
from app.published.loaded import LoadedModel, load_model
from app.published.weights import load_weights
from app.repository.repository import Repository
from app.serving.cascade.build import load_validation
from app.serving.cascade.calibration import calibrate
from app.serving.cascade.rule import CascadeRule
from app.serving.cascade.served import route
from app.serving.cascade.stages import require_alike
from app.storage import to_path
from app.telemetry.mfu import flops_per_sample
from app.tensors import OUTPUT, Tensors, select_rows
from benchmarks.compile.models import Model, train
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import table, verdict
from benchmarks.rounds import turns
from benchmarks.serving.tradeoff import Tradeoff, picture
from benchmarks.spread import Spread

RESULTS = Path(__file__).with_name("CASCADE.md")
FLOOR, MAX_COMPUTE, MIN_LEAD = 0.995, 0.5, 0.02
FLOORS = (0.97, 0.98, 0.99, FLOOR, 0.998)
_RECIPE = "recipes/fashion.yaml"
_SMALL = (
    "model={factory: benchmarks.serving.cascade:Perceptron, args: {width: 32}}",
    "train.optimizer.lr=2.0e-3",
    "train.epochs=8",
)
_LARGE = ("train.precision=bf16", "train.epochs=6")
_BOTH = ("train.workers=1", "train.resume=latest", "train.checkpoint.every_steps=100")
_COMPILE = ("compile={precisions: [fp32], engines: [openvino], batch_sizes: [1, 32]}",)
_THREADS = 1
_BATCH_SIZES = (1, 32)
_TIMED_ROWS, _ROUNDS = 1_024, 3
_PACKAGES = ("rayloom", "openvino", "torch")


class Perceptron(nn.Module):
    """The small model: a perceptron with one hidden layer."""

    def __init__(self, num_labels: int, channels: int, image_size: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(channels * image_size**2, width), nn.GELU(), nn.Linear(width, num_labels)
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, labels) for pixels of shape (batch, channels, height, width)."""
        logits: torch.Tensor = self.layers(pixel_values)
        return logits


@dataclass(frozen=True)
class Contender:
    """A published model, and its operations per row."""

    model: LoadedModel
    flops: float

    def logits(self, batches: Sequence[Tensors]) -> NDArray[np.floating]:
        """Return the logits of all rows, of shape (rows, labels)."""
        return np.concatenate([self.model.engine.infer(batch)[OUTPUT] for batch in batches])


@dataclass(frozen=True)
class Findings:
    """The measurements on the test split."""

    tradeoff: Tradeoff
    rules: dict[float, CascadeRule]
    """The rules by accuracy floor, calibrated on the validation split."""
    seconds: dict[int, Spread]
    """Time of the cascade / time of the large model, by batch size."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the report, and write it and its plot to files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.cascade", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="file to write")
    parser.add_argument("--models", type=Path, help="folder of trained models; an interrupted training resumes")
    arguments = parser.parse_args(argv)
    conditions = Conditions()
    with tempfile.TemporaryDirectory(prefix="bench-cascade-") as temporary:
        found = measure((arguments.models or Path(temporary)).absolute())
    curve = arguments.output.with_suffix(".svg")
    curve.write_text(picture(found.tradeoff, {f"floor {FLOOR:g}": found.rules[FLOOR]}), encoding="utf-8")
    text = report(found, conditions, curve.name)
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


def measure(folder: Path) -> Findings:
    """Train and publish both models, calibrate on the validation split, and measure on Fashion-MNIST's test files."""
    small, large = (_contender(name, size, folder) for name, size in (("small", _SMALL), ("large", _LARGE)))
    models = [small.model, large.model]
    require_alike(models)
    validation, test = load_validation(small.model.manifest), _load_test(small.model)
    batches = _batches(large.model, validation, _BATCH_SIZES[-1])
    logits, costs = [small.logits(batches), large.logits(batches)], [small.flops, large.flops]
    rules = {floor: calibrate(logits, np.array(validation.classes), costs, floor) for floor in FLOORS}
    batches = _batches(large.model, test, _BATCH_SIZES[-1])
    return Findings(
        Tradeoff(small.logits(batches), large.logits(batches), np.array(test.classes), small.flops, large.flops),
        rules,
        {size: _times(rules[FLOOR], models, _batches(large.model, test, size)) for size in _BATCH_SIZES},
    )


def _load_test(model: LoadedModel) -> LabelledSplit:
    """Return the images of the test files, which no training and no calibration saw."""
    test = LabelledData.load_test(_train_run(model) / DATA, type(model.natural_processor), Classes)
    assert isinstance(test, LabelledDataset)
    return test.split


def _train_run(model: LoadedModel) -> UPath:
    assert model.manifest.lineage.train_run is not None
    return to_path(model.manifest.lineage.train_run)


def _contender(name: str, overrides: Sequence[str], folder: Path) -> Contender:
    """Return the version in production. If there is none, train one in a new process and compile it in float32."""
    storage = to_path(folder / "storage")
    repository = Repository(storage)
    if name not in repository.names():
        source = Model(name, _RECIPE, train, overrides=(f"name={name}", *_BOTH, *_COMPILE, *overrides))
        _publish(name, train(source, folder), repository)
    manifest = repository.manifest(name, repository.production(name))
    model = load_model(storage, name, manifest.version, _THREADS)
    module = load_weights(_train_run(model) / WEIGHTS).model
    row = {spec.name: torch.zeros(1, *spec.shape[1:]) for spec in model.inputs}
    return Contender(model, flops_per_sample(module, row) / 3)  # a training step is three forward passes


def _publish(name: str, weights: UPath, repository: Repository) -> None:
    recipe = load_recipe(str(weights / RECIPE_FILE))
    with tempfile.TemporaryDirectory(prefix="bench-cascade-") as compiled:
        subject, wanted = load_source_model(weights, recipe, _THREADS), requested_variants(recipe.compile)
        compilation = Compilation(subject, recipe.compile, wanted, Path(compiled), partial(print, flush=True))
        compilation.evaluate()
        publish(compilation, compilation.choose(), name, repository, to_path(compiled))


def _batches(model: LoadedModel, split: LabelledSplit, size: int) -> list[Tensors]:
    processor = model.natural_processor
    return [processor.encode(split.inputs[start : start + size]) for start in range(0, len(split), size)]


async def _cascade(rule: CascadeRule, models: Sequence[LoadedModel], batch: Tensors) -> None:
    """Run the cascade as a replica does, without its queues."""

    async def ask(stage: int, rows: NDArray[np.intp]) -> Tensors:
        return models[stage].engine.infer(select_rows(batch, rows))

    await route(rule, _num_rows(batch), ask)


async def _alone(models: Sequence[LoadedModel], batch: Tensors) -> None:
    models[-1].engine.infer(batch)


def _times(rule: CascadeRule, models: Sequence[LoadedModel], batches: Sequence[Tensors]) -> Spread:
    """Return the time of the cascade / the time of the large model in each round; the two take turns."""
    timed = batches[: _TIMED_ROWS // _num_rows(batches[0])]
    contenders: dict[str, Callable[[Tensors], Awaitable[None]]] = {
        "large": partial(_alone, models),
        "cascade": partial(_cascade, rule, models),
    }

    async def run(name: str) -> float:
        began = time.perf_counter()
        for batch in timed:
            await contenders[name](batch)
        return time.perf_counter() - began

    for name in contenders:  # the first call of a shape is slower
        asyncio.run(run(name))
    rounds = [{name: asyncio.run(run(name)) for name in names} for names in turns(list(contenders), _ROUNDS)]
    return Spread(tuple(seconds["cascade"] / seconds["large"] for seconds in rounds))


def _num_rows(batch: Tensors) -> int:
    return len(next(iter(batch.values())))


def report(found: Findings, conditions: Conditions, curve: str) -> str:
    """Return the report: the measurements and the goals."""
    tradeoff, rule = found.tradeoff, found.rules[FLOOR]
    small, large = tradeoff.small_alone, tradeoff.large_alone
    shares = ("small answers, validation", "small answers, test")
    header = ("", "threshold", *shares, "accuracy", "accuracy / large", "operations per row, / large")
    rows = [
        ("small alone", "", "", "100%", f"{small.accuracy:.4f}", f"{small.accuracy / large.accuracy:.4f}",
         f"{small.compute:.3f}"),
        *(_row(tradeoff, *chosen) for chosen in sorted(found.rules.items())),
        ("large alone", "", "", "0%", f"{large.accuracy:.4f}", "1.0000", "1.000"),
    ]  # fmt: skip
    return f"""# A cascade of two models

`python -m benchmarks.serving.cascade` wrote this. {machine()}.
{versions(_PACKAGES)}.
{conditions}

{table(("what", "goal", "reached", ""), list(_goals(found)))}

![Accuracy against operations]({curve})

The blue curve shows the cascade at every threshold. The dashed line shows a cascade that passes rows on at random.

{table(header, rows)}

The data is Fashion-MNIST. Both models are trained on its training files, compiled in float32 and run by OpenVINO with
{_THREADS} thread. The thresholds are chosen on the {rule.rows:,} images of the validation split. Each floor is met
there with confidence {rule.confidence:g} (`app/serving/cascade/calibration.py`). Accuracy is measured on the
{len(tradeoff.classes):,} images of the test files. Neither training nor calibration uses them. ± is a standard error.

Operations are counted by PyTorch: {tradeoff.small_flops / 1e6:.2f} million per image in the small model,
{tradeoff.large_flops / 1e6:.1f} million in the large one. A row that is passed on costs both. Times are the median and
the range of {_ROUNDS} rounds with {_TIMED_ROWS:,} images each.

The small model is a perceptron with one hidden layer: `{" ".join(_SMALL)}`.
The large one is the network of `{_RECIPE}`: `{" ".join(_LARGE)}`.
"""


def _row(tradeoff: Tradeoff, floor: float, rule: CascadeRule) -> tuple[str, ...]:
    point, (relative, error) = tradeoff.under(rule), tradeoff.relative_accuracy(rule)
    threshold = rule.thresholds[0]
    return (
        f"cascade, floor {floor:g}",
        "none" if threshold is None else f"{threshold:.4f}",
        f"{rule.expected_shares[0]:.1%}",
        f"{1 - tradeoff.is_passed_on(rule).mean():.1%}",
        f"{point.accuracy:.4f}",
        f"{relative:.4f} ± {error:.4f}",
        f"{point.compute:.3f}",
    )


def _goals(found: Findings) -> Iterator[tuple[str, ...]]:
    """Yield a row for each goal. They are for the cascade with the accuracy floor ``FLOOR``."""
    tradeoff, rule = found.tradeoff, found.rules[FLOOR]
    lead = tradeoff.large_alone.accuracy - tradeoff.small_alone.accuracy
    yield "accuracy, large − small, points", f"≥ {100 * MIN_LEAD:g}", f"{100 * lead:.1f}", verdict(lead >= MIN_LEAD)
    relative, error = tradeoff.relative_accuracy(rule)
    yield "accuracy, cascade / large", f"≥ {FLOOR}", f"{relative:.4f} ± {error:.4f}", verdict(relative >= FLOOR)
    compute = tradeoff.under(rule).compute
    yield "operations per row, cascade / large", f"≤ {MAX_COMPUTE}", f"{compute:.3f}", verdict(compute <= MAX_COMPUTE)
    for size, ratio in found.seconds.items():
        what = f"time, cascade / large, batches of {size}"
        yield what, f"≤ {MAX_COMPUTE}", str(ratio), verdict(ratio.median <= MAX_COMPUTE)


if __name__ == "__main__":
    main()
