"""The base classes of tasks. ``Task`` is trained. ``ServedTask`` is also served with batches of rows."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import Recipe, TrainConfig
from app.config.metrics import MODES, Mode, Selection
from app.data.examples import Natural
from app.data.prepared import Dataset, PreparedData, SplitData
from app.data.processor import Processor
from app.data.targets import Answer, Outputs, Targets
from app.errors import RecipeError
from app.import_string import suggestion
from app.tasks.agreement import SCORES, same_answer
from app.tasks.features import MODEL, PREPARED, READ, Features, require_supported
from app.tasks.metrics import Metric
from app.tensors import OUTPUT, Tensors, TensorSpec

if TYPE_CHECKING:  # an endpoint answers without torch
    from torch import Tensor

    from app.data.preparation.prepare import RunUnits
    from app.data.preparation.samples import SampleKind
    from app.tasks.judgement import Judge


ServedAs = Literal["rows", "tokens"]
"""How models answer when they are served: rows of tensors, or generated tokens."""


class Loss(Protocol):
    """The loss of a batch, for training as a mean, and for validation as sums."""

    @property
    def num_sums(self) -> int:
        """The length of ``sums``."""
        ...

    def mean(self, output: object, targets: "Tensor", taught: "Tensor | None" = None) -> "Tensor":
        """Return the mean loss per target, float32 of shape (). ``taught``: a teacher's logits, (batch, classes)."""
        ...

    def sums(self, output: object, targets: "Tensor") -> "Tensor":
        """Return sums that add up over batches and ranks, float64 of shape (``num_sums``,)."""
        ...

    def value(self, sums: "Tensor") -> float:
        """Return the loss over all of them, from their ``sums``."""
        ...


@dataclass(frozen=True)
class Encoded:
    """Natural inputs, and the tensors that the processor made of them."""

    inputs: Sequence[Natural]
    tensors: Tensors
    processor: Processor


class Task(ABC):
    """A kind of data that models are trained on, with the loss and the metrics of these models."""

    name: str = ""
    """The recipe's ``task``. ``find_task`` sets it."""

    metrics: ClassVar[Sequence[Metric]] = ()
    """What a model is validated by, beside its loss. Recipes call them ``val_NAME``."""

    served_as: ClassVar[ServedAs | None] = None
    """How compiled models answer. None: they are only trained."""

    learns_classes: ClassVar[bool] = False
    """Whether targets are classes. Their loss is cross-entropy, with the recipe's label smoothing and teacher."""

    supports: ClassVar[Features] = frozenset()
    """The features that recipes of this task may use, in the words of ``app.tasks.features``."""

    def require(self, recipe: Recipe) -> None:
        """Raise RecipeError for keys or metrics that the task does not support, and for what it needs and lacks."""
        require_supported(recipe, self.supports)
        self._require_metrics(recipe)

    def selection(self, config: TrainConfig) -> Selection:
        """Return the metric by which epochs are compared: that of early stopping, else the task's first."""
        stopping = config.early_stopping
        metric = (stopping and stopping.metric) or f"val_{self.metrics[0].name if self.metrics else 'loss'}"
        return Selection(metric, (stopping and stopping.mode) or self._modes.get(metric, "min"))

    @property
    def _modes(self) -> dict[str, Mode]:
        """Whether more or less of the loss and of each metric is better."""
        return {"val_loss": "min", **{f"val_{metric.name}": metric.mode for metric in self.metrics}}

    def _require_metrics(self, recipe: Recipe) -> None:
        """Raise RecipeError if the recipe selects by a metric that the task lacks, or in the wrong direction."""
        modes, selection = self._modes, self.selection(recipe.train)
        of_trial = {name: mode for name, mode in MODES.items() if not name.startswith("val_")}
        objectives = recipe.tune.objectives if recipe.tune else []
        wanted = [("train.early_stopping", selection.metric, selection.mode)]
        wanted += [("tune", objective.metric, objective.mode) for objective in objectives]
        for key, metric, mode in wanted:
            if metric.startswith("val_") and metric not in modes:
                known = f"task {recipe.task} has {', '.join(modes)}"
                raise RecipeError(f"{key}.metric is {metric}, and {known}: name one{suggestion(metric, modes)}").of(
                    "metric.unknown", f"{key}.metric"
                )
            if (better := (modes | of_trial)[metric]) != mode:
                raise RecipeError(
                    f"{key}.mode is {mode}, and {metric} is better at its {better}: set it to {better}"
                ).of("metric.direction", f"{key}.mode")

    @abstractmethod
    def prepare(self, recipe: Recipe, run_units: "RunUnits" = map) -> PreparedData:
        """Load, clean and split the data of a recipe. Raises RecipeError or DataError.

        ``run_units`` does the work on the parts of the source, in this process unless it is given.
        """

    @abstractmethod
    def load(self, recipe: Recipe, folder: UPath) -> PreparedData:
        """Load the data that a run of the recipe has saved in ``folder``."""

    def samples(self, recipe: Recipe) -> "SampleKind":
        """Return how the task reads the rows of a source. A task that supports ``stream`` overrides it."""
        raise NotImplementedError

    def load_with_test(self, recipe: Recipe, folder: UPath) -> PreparedData:
        """Load the data with its test split, if it has one, so that a run can save all of it again."""
        return self.load(recipe, folder)

    def judge(self, recipe: Recipe, data: PreparedData) -> "Judge | None":  # noqa: ARG002
        """Return what judges models that were trained on ``data``. None: they get no verdict."""
        return None

    def loss(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the loss of each row, of shape (rows,). Training minimizes the mean.

        A task that ``learns_classes`` needs none.

        Args:
            outputs: what the model returned, float32 of shape (rows, …).
            targets: ``Batch.targets`` of these rows. Rows that do not count are left out.
        """
        raise NotImplementedError

    def batch_loss(self, config: TrainConfig, data: PreparedData) -> Loss | None:  # noqa: ARG002
        """Return a loss that is not a mean over rows, such as one that compares them. None: ``loss`` is used."""
        return None


class ServedTask(Task):
    """A task of labelled examples, whose models can be compiled and served.

    A task with data of another kind overrides ``data`` and ``prepare``.
    """

    served_as = "rows"

    processor: ClassVar[type[Processor]]
    """Turns natural inputs into tensors, the same in training and behind the endpoint."""

    targets: ClassVar[type[Outputs]]
    """Turns labels into targets, and outputs into what ``predict`` answers."""

    supports: ClassVar[Features] = PREPARED | MODEL | READ

    ignored: ClassVar[Collection[str]] = SCORES
    """Keys of an answer, and of objects in it, that do not count when two answers are compared."""

    @property
    def gate(self) -> Metric | None:
        """The metric that compile keeps within ``compile.gates``. None: outputs are only compared with each other."""
        return next(iter(self.metrics), None)

    def gate_of(self, targets: Outputs) -> Metric | None:
        """Return the gate for these targets."""
        return self.gate.bind(targets) if self.gate else None

    def output(self, targets: Outputs) -> TensorSpec:
        """Return the model's output, whose first dimension is the rows."""
        return TensorSpec(OUTPUT, np.dtype(np.float32), (-1, targets.num_outputs))

    def answer(self, outputs: NDArray[np.float32], targets: Outputs) -> list[Answer]:
        """Return what ``predict`` answers for each row of the model's output: a JSON object."""
        return targets.decode(outputs)

    def answer_natural(self, outputs: NDArray[np.float32], targets: Outputs, given: Encoded) -> list[Answer]:  # noqa: ARG002
        """Return ``answer`` for natural inputs, which it may look at."""
        return self.answer(outputs, targets)

    def agrees(self, ours: Answer, theirs: Answer, targets: Outputs) -> bool:  # noqa: ARG002
        """Return whether two versions' answers to an input agree. The metric of a shadow counts this.

        Args:
            theirs: the answer that the client got.
            targets: the targets of the version that answered the client.
        """
        return same_answer(ours, theirs, ignored=self.ignored)

    def judge(self, recipe: Recipe, data: PreparedData) -> "Judge | None":
        from app.tasks.judgement.examples import ExampleJudge  # an endpoint judges no models

        return ExampleJudge.of(recipe, self, data.train)

    @property
    def _targets(self) -> type[Targets]:
        """The type of the targets, of a task of labelled examples."""
        return cast(type[Targets], self.targets)

    @property
    def data(self) -> type[SplitData]:
        """The type of the data that ``prepare`` returns and runs keep."""
        from app.data.labelled import LabelledData  # an endpoint reads no data

        return LabelledData

    def samples(self, recipe: Recipe) -> "SampleKind":  # noqa: ARG002
        from app.data.preparation.samples import Labelled

        return Labelled(self.processor.modality, self._targets)

    def prepare(self, recipe: Recipe, run_units: "RunUnits" = map) -> PreparedData:
        from app.data.preparation.data import prepare_labelled

        return prepare_labelled(recipe, self.samples(recipe), self.processor, run_units)

    def load(self, recipe: Recipe, folder: UPath) -> SplitData:  # noqa: ARG002
        return self.data.load(folder, self.processor, self.targets)

    def load_with_test(self, recipe: Recipe, folder: UPath) -> SplitData:
        return replace(self.load(recipe, folder), test=self.load_test(recipe, folder))

    def load_test(self, recipe: Recipe, folder: UPath) -> Dataset | None:  # noqa: ARG002
        """Load the test split; None if there is none. Only compile calls it, for the published version."""
        return self.data.load_test(folder, self.processor, self.targets)
