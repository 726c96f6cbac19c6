"""Distil the model of the reviews into the small stage of a cascade: python -m benchmarks.finetuning.distillation

Each student is trained twice on the same batches, from the same weights: on the labels alone, and with a teacher.
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

from upath import UPath

from app.compile.compilation import Compilation
from app.compile.publication import publish
from app.compile.reference import Reference
from app.compile.source_model import SourceModel, load_source_model
from app.compile.variants import requested_variants
from app.config import load_recipe
from app.engines.architecture import usable_cores
from app.engines.base import EngineSettings
from app.errors import StorageError
from app.published.weights import load_weights
from app.repository.repository import Repository
from app.runs import CONFIG_FILE, latest_result
from app.storage import to_path
from benchmarks.compile.models import Model, train
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import Goal, table, verdict

RESULTS = Path(__file__).with_name("DISTILLATION.md")
RECIPE = "recipes/reviews.yaml"
COMMON = (
    "data.test_fraction=0.25",
    "train.workers=1",
    "train.linear_baseline=false",
    "train.resume=latest",
    "train.early_stopping.patience=100",
    "train.report_samples=0",
    "compile.engines=[onnxruntime]",
    "compile.precisions=[fp32]",
)
LARGE = ("train.epochs=10",)
SMALL = ("train.epochs=20", "train.optimizer.lr=3.0e-3")
PLAIN = (
    "model.args={layers: 1, width: 8, heads: 1, dropout: 0.3, embedding_dropout: 0.3}",
    "train.label_smoothing=0.0",
)
"""The best of three settings on the validation split with seed 0."""
TAUGHT = (
    "model.args={layers: 1, width: 8, heads: 1, dropout: 0.1, embedding_dropout: 0.1}",
    "train.label_smoothing=0.0",
    "train.teacher={model: large/1, temperature: 2.0, weight: 1.0}",
)
SEEDS = (0, 1, 2)
GOAL = 0.5


@dataclass(frozen=True)
class Student:
    """The accuracies of a small model on the test split, without and with the teacher, with one seed."""

    seed: int
    plain: float
    taught: float


@dataclass(frozen=True)
class Findings:
    """The measurements on the test split."""

    large: float
    students: list[Student]
    parameters: tuple[int, int]
    """Of the large and the small model."""
    rows: int

    @property
    def closed(self) -> float:
        """The share of the mean gap between small and large that the teacher closes."""
        plain, taught = (mean(getattr(student, name) for student in self.students) for name in ("plain", "taught"))
        share: float = (taught - plain) / (self.large - plain)
        return share


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the report, and write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetuning.distillation", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="file to write")
    parser.add_argument("--models", type=Path, help="folder of trained models, of which those that exist are kept")
    arguments = parser.parse_args(argv)
    conditions = Conditions()
    with tempfile.TemporaryDirectory(prefix="bench-distillation-") as temporary:
        found = measure((arguments.models or Path(temporary)).absolute())
    text = report(found, conditions)
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


def measure(folder: Path) -> Findings:
    """Train the large model, publish it, and train each student twice."""
    large = _trained("large", folder, *LARGE)
    repository = Repository(to_path(folder / "storage"))
    if "large" not in repository.names():
        _publish("large", large, repository)
    students, small = [], large
    for seed in SEEDS:
        small = _trained(f"plain-{seed}", folder, *SMALL, *PLAIN, f"train.seed={seed}")
        taught = _trained(f"taught-{seed}", folder, *SMALL, *TAUGHT, f"train.seed={seed}")
        students.append(Student(seed, _on_test(small)[0], _on_test(taught)[0]))
        print(students[-1], flush=True)
    accuracy, rows = _on_test(large)
    return Findings(accuracy, students, (_parameters(large), _parameters(small)), rows)


def _trained(name: str, folder: Path, *overrides: str) -> UPath:
    """Return the weights of a model, which is trained in a new process unless it was before."""
    try:
        return to_path(latest_result(to_path(folder / "storage"), "train", name).artifacts["weights"])
    except StorageError:
        return train(Model(name, RECIPE, train, overrides=(f"name={name}", *COMMON, *overrides)), folder)


def _publish(name: str, weights: UPath, repository: Repository) -> None:
    source, config = _source(weights), load_recipe(str(weights.parent / CONFIG_FILE)).compile
    with tempfile.TemporaryDirectory(prefix="bench-distillation-") as compiled:
        compilation = Compilation(
            source, config, requested_variants(config), Path(compiled), partial(print, flush=True)
        )
        compilation.evaluate()
        publish(compilation, compilation.choose(), name, repository, to_path(compiled))


def _source(weights: UPath) -> SourceModel:
    return load_source_model(weights, load_recipe(str(weights.parent / CONFIG_FILE)), usable_cores())


def _on_test(weights: UPath) -> tuple[float, int]:
    """Return the accuracy in PyTorch on the test split, which no training saw, and its rows."""
    source = _source(weights)
    test = source.load_test()
    assert test
    with closing(source.open_module(EngineSettings(threads=source.threads))) as engine:
        score = Reference.of(engine, test, source.reference.judge).score
    assert score
    return score.value, len(test)


def _parameters(weights: UPath) -> int:
    return sum(parameter.numel() for parameter in load_weights(weights).model.parameters())


def report(found: Findings, conditions: Conditions) -> str:
    """Return the page."""
    plain, taught = (mean(getattr(student, name) for student in found.students) for name in ("plain", "taught"))
    goals = [
        Goal(
            "gap between small and large that the teacher closes",
            f"≥ {GOAL:.0%}",
            f"{found.closed:.0%}",
            verdict(found.closed >= GOAL),
        ),
    ]
    rows = [
        ("large, the teacher", f"{found.parameters[0]:,}", f"{found.large:.4f}"),
        ("small, labels alone", f"{found.parameters[1]:,}", f"{plain:.4f} ({_each(found, 'plain')})"),
        ("small, with the teacher", f"{found.parameters[1]:,}", f"{taught:.4f} ({_each(found, 'taught')})"),
    ]
    keys = [("both", _keys(SMALL)), ("labels alone", _keys(PLAIN)), ("with the teacher", _keys(TAUGHT))]
    error = (found.large * (1 - found.large) / found.rows) ** 0.5
    return f"""# Distillation of the reviews

`python -m benchmarks.finetuning.distillation` wrote this. {machine()}.
{versions(("rayloom", "onnxruntime", "torch"))}.
{conditions}

{table(("what", "goal", "reached", ""), [(goal.what, goal.goal, goal.reached, goal.verdict) for goal in goals])}

{table(("model", "parameters", "accuracy on the test split"), rows)}

The large model is the one of `{RECIPE}`, trained for 10 epochs. The students use these keys:

{table(("student", "keys"), keys)}

All models keep the epoch with the best validation accuracy. The results of seeds {", ".join(map(str, SEEDS))} are in
brackets. With the same
seed, both students start from the same weights and see the same batches. The large model was trained with one seed.

The keys were chosen on the validation split with seed 0. With labels alone, a dropout of 0.1 was worse, and label
smoothing of 0.1 with a dropout of 0.3 was no better. With the teacher, only one setting was tried.

The test split has {found.rows:,} reviews, which were not used in training. The standard error of one
accuracy is {error:.4f}. All models are measured on the same reviews.
"""


def _keys(keys: Sequence[str]) -> str:
    return " ".join(f"`{key}`" for key in keys)


def _each(found: Findings, name: str) -> str:
    return ", ".join(f"{getattr(student, name):.4f}" for student in found.students)


if __name__ == "__main__":
    main()
