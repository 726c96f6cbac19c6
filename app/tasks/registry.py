"""Finds the task that a recipe names: a built-in one, or a class of one's own by its import string."""

from functools import cache
from typing import TYPE_CHECKING, cast

from upath import UPath

from app.config import BUILT_IN_TASKS, TENSORS, Recipe
from app.data.prepared import PreparedData
from app.data.processor import Processor
from app.errors import RecipeError
from app.import_string import did_you_mean, import_attribute
from app.tasks.base import ServedTask, Task
from app.tasks.features import FEATURES
from app.tasks.metrics import Metric, TorchMetric

if TYPE_CHECKING:
    from app.data.preparation.prepare import RunUnits


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
            f"publishes one; expected {', '.join(BUILT_IN_TASKS)}, or the import string of a task"
        ).of("task.only_imported")
    found = import_attribute(BUILT_IN_TASKS.get(name, name))
    if isinstance(found, type) and not issubclass(found, Task) and callable(getattr(found, "fit", None)):
        from app.tasks.classification import classify  # it imports every processor

        found = classify(cast(type[Processor], found))
    if not (isinstance(found, type) and issubclass(found, Task)):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise RecipeError(
            f"task {name!r} names {kind}: expected a subclass of app.tasks.Task, or a processor like "
            "app.data.text:TextProcessor"
        ).of("task.not_a_task")
    if missing := _missing(found):
        raise RecipeError(f"task {name!r} has no {', no '.join(missing)}: add it to the class {found.__name__}").of(
            "task.incomplete"
        )
    if issubclass(found, ServedTask) and hasattr(found, "facts"):
        raise RecipeError(
            f"task {name!r}: the class {found.__name__} has facts, which are not read there: move them to "
            "the facts of its targets"
        ).of("task.facts")
    if unknown := sorted({*found.supports} - FEATURES):
        raise RecipeError(
            f"task {name!r} supports {unknown[0]!r}, which is no feature; {did_you_mean(unknown[0], FEATURES)}"
        ).of("task.no_feature")
    try:
        task = found()
    except Exception as error:  # code of the user's own
        raise RecipeError(
            f"task {name!r}: {found.__name__}() fails ({error}): let the class be created without arguments"
        ).of("task.not_created") from error
    if fault := _fault_of_metrics(task):
        raise RecipeError(f"task {name!r}: {fault}").of("task.metrics")
    task.name = name
    return task


def find_compiled_task(name: str) -> Task:
    """Return a task whose models can be compiled and served. Raises RecipeError if it has none, or as ``find_task``."""
    task = find_task(name)
    if task.served_as is None:
        raise RecipeError(
            f"task {name} cannot be compiled or served: expected {', '.join(BUILT_IN_TASKS)}, or the import string of "
            "a app.tasks.ServedTask"
        ).of("task.not_served")
    return task


def find_served_task(name: str) -> ServedTask:
    """Return a task whose models answer rows. Raises RecipeError if it is another, or as ``find_task``."""
    task = find_task(name)
    if not isinstance(task, ServedTask):
        served = [known for known in BUILT_IN_TASKS if isinstance(find_task(known), ServedTask)]
        raise RecipeError(
            f"models of task {name} do not answer rows: expected {', '.join(served)}, or the import string of a "
            "app.tasks.ServedTask"
        ).of("task.not_served")
    return task


def _missing(task: type[Task]) -> list[str]:
    """Return what the class lacks, in the words of its attributes."""
    parts = sorted(getattr(task, "__abstractmethods__", ()))
    if task.loss is Task.loss and task.batch_loss is Task.batch_loss and not task.learns_classes:
        parts.append("loss")
    if not task.metrics or not all(isinstance(metric, Metric) for metric in task.metrics):
        parts.append("metrics")
    if _prepares_unsaid(task):
        parts.append("supports")
    if "stream" in task.supports and task.samples is Task.samples:
        parts.append("samples")
    if issubclass(task, ServedTask):
        parts += [part for part in ("processor", "targets") if not hasattr(task, part)]
        needed = ("facts", "rule") if task.prepare is ServedTask.prepare else ("facts",)
        if "targets" not in parts:
            parts += [f"targets.{name}" for name in needed if not _declares(task.targets, name)]
    return parts


def _prepares_unsaid(task: type[Task]) -> bool:
    """Return whether a class prepares its own data, and only a base that prepares other data says what is supported."""
    prepares, says = (
        next(place for place, base in enumerate(task.__mro__) if name in vars(base)) for name in ("prepare", "supports")
    )
    return says > prepares


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
    task = find_task(recipe.task)
    task.require(recipe)
    return task.prepare(recipe, run_units)


def load_prepared(recipe: Recipe, folder: UPath) -> PreparedData:
    """Load the data that a run of the recipe has saved in ``folder``."""
    return find_task(recipe.task).load(recipe, folder)


def load_with_test(recipe: Recipe, folder: UPath) -> PreparedData:
    """Load the data of a recipe with its test split, so that a run can save all of it again."""
    return find_task(recipe.task).load_with_test(recipe, folder)
