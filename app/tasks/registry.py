"""Finds the task that a recipe names: a built-in one, or a class of one's own by its import string."""

from functools import cache
from typing import TYPE_CHECKING, cast

from upath import UPath

from app.config import CHAT, LANGUAGE_MODELING, SENTENCE_EMBEDDING, TENSORS, TOKEN_CLASSIFICATION, Recipe
from app.config.metrics import Mode
from app.data.prepared import PreparedData
from app.data.processor import Processor
from app.data.targets import Classes
from app.errors import RecipeError
from app.import_string import import_attribute
from app.tasks.base import ServedTask, Task
from app.tasks.classification import (
    ImageClassification,
    MultimodalClassification,
    TabularClassification,
    TextClassification,
    classify,
)
from app.tasks.embedding import SentenceEmbedding
from app.tasks.language import Chat, LanguageModeling
from app.tasks.metrics import Metric, TorchMetric
from app.tasks.multilabel import MultimodalMultiLabel, TabularMultiLabel, TextMultiLabel
from app.tasks.regression import MultimodalRegression, TabularRegression, TextRegression
from app.tasks.tagging import TokenClassification

if TYPE_CHECKING:
    from app.data.preparation.prepare import RunUnits

TASKS: dict[str, type[Task]] = {
    "text-classification": TextClassification,
    "image-classification": ImageClassification,
    "tabular-classification": TabularClassification,
    "text-regression": TextRegression,
    "tabular-regression": TabularRegression,
    "text-multilabel": TextMultiLabel,
    "tabular-multilabel": TabularMultiLabel,
    LANGUAGE_MODELING: LanguageModeling,
    CHAT: Chat,
    SENTENCE_EMBEDDING: SentenceEmbedding,
    TOKEN_CLASSIFICATION: TokenClassification,
    "multimodal-classification": MultimodalClassification,
    "multimodal-regression": MultimodalRegression,
    "multimodal-multilabel": MultimodalMultiLabel,
}


@cache
def find_task(name: str) -> Task:
    """Return the built-in task of this name, or the one that an import string names.

    An import string may also name a processor, for a classification of the inputs that it reads.

    Raises:
        RecipeError: there is no such task, or its class is not complete.
    """
    if name == TENSORS:
        raise RecipeError(
            f"task {name} is that of imported models, which take tensors as they are: only 'rayloom models import' "
            f"publishes one; expected {', '.join(TASKS)}, or the import string of a task"
        )
    found = TASKS.get(name) or import_attribute(name)
    if isinstance(found, type) and not issubclass(found, Task) and callable(getattr(found, "fit", None)):
        found = classify(cast(type[Processor], found))
    if not (isinstance(found, type) and issubclass(found, Task)):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise RecipeError(
            f"task {name!r} names {kind}: expected a subclass of app.tasks.Task, or a processor like "
            "app.data.text:TextProcessor"
        )
    if missing := _missing(found):
        raise RecipeError(f"task {name!r} has no {', no '.join(missing)}: add it to the class {found.__name__}")
    if issubclass(found, ServedTask) and hasattr(found, "facts"):
        raise RecipeError(
            f"task {name!r}: the class {found.__name__} has facts, which are not read there: move them to "
            "the facts of its targets"
        )
    try:
        task = found()
    except Exception as error:  # code of the user's own
        raise RecipeError(
            f"task {name!r}: {found.__name__}() fails ({error}): let the class be created without arguments"
        ) from error
    if fault := _fault_of_metrics(task):
        raise RecipeError(f"task {name!r}: {fault}")
    task.name = name
    return task


def find_served_task(name: str) -> ServedTask:
    """Return a task whose models can be compiled and served. Raises RecipeError if it has none, or as ``find_task``."""
    task = find_task(name)
    if not isinstance(task, ServedTask):
        served = [known for known, kind in TASKS.items() if issubclass(kind, ServedTask)]
        raise RecipeError(
            f"task {name} cannot be compiled or served: expected {', '.join(served)}, or the import string of a "
            "app.tasks.ServedTask"
        )
    return task


def _missing(task: type[Task]) -> list[str]:
    """Return what the class lacks, in the words of its attributes."""
    parts = sorted(getattr(task, "__abstractmethods__", ()))
    if task.loss is Task.loss and task.batch_loss is Task.batch_loss and not task.learns_classes:
        parts.append("loss")
    if not task.metrics or not all(isinstance(metric, Metric) for metric in task.metrics):
        parts.append("metrics")
    if issubclass(task, ServedTask):
        parts += [part for part in ("processor", "targets") if not hasattr(task, part)]
        needed = ("facts", "rule") if task.prepare is ServedTask.prepare else ("facts",)
        if "targets" not in parts:
            parts += [f"targets.{name}" for name in needed if not _declares(task.targets, name)]
    return parts


def _declares(kind: type, name: str) -> bool:
    """Return whether a class has an attribute, or is annotated with one that each instance gets."""
    return hasattr(kind, name) or any(name in vars(base).get("__annotations__", ()) for base in kind.__mro__)


def _fault_of_metrics(task: Task) -> str | None:
    """Return what is wrong with the metrics of a task, and what to do; None if nothing is."""
    names = [getattr(metric, "name", "") for metric in task.metrics]
    if unnamed := [type(metric).__name__ for metric, name in zip(task.metrics, names, strict=True) if not name]:
        return f"the metric {unnamed[0]} has no name: give the class a name"
    if "loss" in names:
        return "a metric is called loss, but val_loss is the loss itself: choose another name"
    if twice := [name for name in names if names.count(name) > 1]:
        return f"two metrics are called {twice[0]}: choose another name for one"
    if not isinstance(task, ServedTask) and any(isinstance(metric, TorchMetric) for metric in task.metrics):
        return "a TorchMetric needs targets, which only a ServedTask has: write a Metric"
    return None


def prepare(recipe: Recipe, run_units: "RunUnits" = map) -> PreparedData:
    """Load, clean and split the data of a recipe. Raises RecipeError or DataError.

    ``run_units`` does the work on the parts of the source, in this process unless it is given.
    """
    require_keys(recipe)
    task = find_task(recipe.task)
    return task.prepare_stream(recipe) if recipe.data.stream else task.prepare(recipe, run_units)


def require_keys(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe has keys for classes, and the task has none, or metrics that the task has not.

    ``prepare`` calls it. Call it where data are prepared already.
    """
    task = find_task(recipe.task)
    if not (isinstance(task, ServedTask) and task.learns_classes and issubclass(task.targets, Classes)):
        for key, is_set in (
            ("train.class_weights", recipe.train.class_weights is not None),
            ("train.label_smoothing", recipe.train.label_smoothing > 0.0 and not task.learns_classes),
            ("train.teacher", recipe.train.teacher is not None),
            ("train.augment.mix", recipe.train.augment is not None and recipe.train.augment.mix is not None),
            ("data.sampling", recipe.data.sampling != "natural"),
            ("serve.cascade", recipe.serve.cascade is not None),
        ):
            if is_set:
                raise RecipeError(
                    f"{key} is for rows with one label each, and task {recipe.task} has none: leave it out"
                )
    _require_metrics(recipe, task)


def _require_metrics(recipe: Recipe, task: Task) -> None:
    """Raise RecipeError if the recipe selects by a metric that the task has not, or in the wrong direction."""
    modes: dict[str, Mode] = {"val_loss": "min"}
    modes |= {f"val_{metric.name}": metric.mode for metric in task.metrics}
    selection = recipe.train.selection
    objectives = recipe.tune.objectives if recipe.tune else []
    wanted = [("train.early_stopping", selection.metric, selection.mode)]
    wanted += [("tune", objective.metric, objective.mode) for objective in objectives]
    for key, metric, mode in wanted:
        if metric.startswith("val_") and metric not in modes:
            raise RecipeError(f"{key}.metric is {metric}, and task {recipe.task} has {', '.join(modes)}: name one")
        if modes.get(metric, mode) != mode:
            raise RecipeError(f"{key}.mode is {mode}, and {metric} is better at its {modes[metric]}: set it to that")


def load_prepared(recipe: Recipe, folder: UPath) -> PreparedData:
    """Load the data that a run of the recipe has saved in ``folder``."""
    return find_task(recipe.task).load(recipe, folder)


def load_with_test(recipe: Recipe, folder: UPath) -> PreparedData:
    """Load the data of a recipe with its test split, so that a run can save all of it again."""
    return find_task(recipe.task).load_with_test(recipe, folder)
