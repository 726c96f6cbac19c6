"""Exact resume: runs of the same recipe, one of them stopped and resumed, compared bit for bit."""

import tempfile
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.runs import TrainedRun, trained

_STEPS, _STOPPED_AFTER = 16, 7
_COMMON = (f"train.max_steps={_STEPS}", "train.checkpoint.every_steps=1", "train.early_stopping=null", "tune=null")
_STOP = f"alerts=[{{metric: step, above: {_STOPPED_AFTER}, do: [stop]}}]"


def measure(bench: Bench) -> None:
    """Record for a Transformer and a convolutional network whether a resumed run has the bits of an uninterrupted one.

    If it does not, a second uninterrupted run shows whether the device reproduces its own bits.
    """
    reviews = [f"data.source={bench.corpus}", "train.linear_baseline=false", "data.buckets=[64]"]
    if bench.is_small:
        reviews += ["model.args={layers: 1, width: 32, heads: 2, dropout: 0.4}", "train.global_batch_size=8"]
    precision = "train.precision=" + ("fp32" if bench.is_small else "bf16")
    for recipe, overrides in (("recipes/reviews.yaml", reviews), ("recipes/digits.yaml", [])):
        with tempfile.TemporaryDirectory() as folder:
            common = (f"train.device={bench.device}", precision, *_COMMON, *overrides)
            _compare(bench, recipe, common, Path(folder))


def _compare(bench: Bench, recipe: str, common: tuple[str, ...], folder: Path) -> None:
    whole = trained(recipe, [*common, "alerts=[]"], folder / "whole")
    again = trained(recipe, [*common, "alerts=[]"], folder / "again")
    trained(recipe, [*common, _STOP], folder / "parts")
    resumed = trained(recipe, [*common, "alerts=[]", "train.resume=latest"], folder / "parts")
    name = Path(recipe).stem
    repeats = _difference(whole, again)
    bench.figure(f"{name}: largest difference of losses, trained twice", repeats)
    difference = _difference(whole, resumed)
    reason = "" if repeats == 0 or difference == 0 else "; the device does not reproduce its own bits"
    bench.figure(f"{name}: largest difference of losses, resumed{reason}", difference, reached=difference <= repeats)


def _difference(expected: TrainedRun, given: TrainedRun) -> float:
    """Return the largest difference of the losses of two runs. Raises RuntimeError if their numbers of steps differ."""
    if len(expected.losses) != _STEPS or len(given.losses) != _STEPS:
        raise RuntimeError(
            f"{len(expected.losses)} and {len(given.losses)} steps were recorded, expected {_STEPS} each"
        )
    return max(abs(one - other) for one, other in zip(expected.losses, given.losses, strict=True))
