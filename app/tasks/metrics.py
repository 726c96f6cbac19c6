"""Metrics of a model, computed from sums over batches and ranks, or from all rows of a split."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from app.config.metrics import Mode
from app.data.prepared import IGNORED
from app.data.targets import Outputs
from app.errors import RecipeError

if TYPE_CHECKING:  # an endpoint names a task without torch
    import torchmetrics
    from numpy.typing import NDArray
    from torch import Tensor

    Predicted = tuple[Tensor, Tensor]
    """Outputs, or predictions made from them, and the targets of the same rows."""
    Conversion = Callable[[Tensor, Tensor], Predicted]


class Metric(ABC):
    """A number that a model is judged by. Sums over disjoint rows add up to the sums over all of them."""

    name: str
    """Lower-case, with underscores. Records and recipes call it ``val_NAME``."""

    mode: Mode = "max"
    """Whether more or less of it is better."""

    of_loss: ClassVar[bool] = False
    """Whether validation reuses the sums of the loss, because this metric's sums are the same."""

    size: int = 2
    """The number of sums."""

    def bind(self, targets: Outputs) -> "Metric":  # noqa: ARG002
        """Return the metric for these targets, if it depends on their labels or scale."""
        return self

    @abstractmethod
    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        """Return sums over rows, of shape (``size``,), on the device of ``outputs``.

        Args:
            outputs: what the model returned, float32 of shape (rows, …). There may be no row.
            targets: the targets of these rows.
        """

    def hits(self, outputs: "Tensor", targets: "Tensor") -> "Tensor | None":  # noqa: ARG002
        """Return whether each target is met, of shape (targets,); None if the metric is no share of them."""
        return None

    def value(self, sums: "Tensor") -> float:
        """Return the metric over all rows, from their ``sums``. NaN if there is no row.

        By default it is the first sum divided by the second.
        """
        total, count = sums.tolist()
        return float(total / count) if count else math.nan

    def of(self, outputs: "Tensor", targets: "Tensor") -> float:
        """Return the metric of these rows, given as to ``sums``."""
        return self.value(self.sums(outputs, targets).double())

    def of_subsets(self, outputs: "Tensor", targets: "Tensor") -> "Callable[[NDArray[Any]], float]":
        """Return a function from indices of these rows to the metric of the rows that they choose."""
        import torch

        each = zip(torch.split(outputs, 1), torch.split(targets, 1), strict=True)
        rows = torch.stack([self.sums(*row).double() for row in each])
        return lambda indices: self.value(rows[indices].sum(0))

    def drop(self, before: float, after: float) -> float:
        """Return how much worse ``after`` is, for the gates: of an error (mode ``min``) as a share of it."""
        if self.mode == "max":
            return before - after
        if not before:
            return math.copysign(math.inf, after) if after else 0.0
        return (after - before) / abs(before)


def sum_and_count(values: "Tensor") -> "Tensor":
    """Return the sum of a value of each row and the number of rows, of shape (2,), from which ``value`` is the mean."""
    import torch

    return torch.stack([values.double().sum(), values.new_tensor(len(values), dtype=torch.float64)])


class Accuracy(Metric):
    """Share of the targets that are the model's first choice: a class of each row, or of each of its tokens."""

    name = "accuracy"

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        import torch

        correct = (outputs.argmax(-1) == targets).sum()  # no class is ``IGNORED``
        return torch.stack([correct, (targets != IGNORED).sum()])

    def hits(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        return (outputs.argmax(-1) == targets)[targets != IGNORED]


@dataclass(frozen=True)
class TorchMetric(Metric):
    """A metric of torchmetrics. Its sums are the number of rows, then the states that torchmetrics adds over ranks.

    It measures only after ``bind``, which a training and a compilation of a ``ServedTask`` call.
    """

    name: str
    make: Callable[[Any], "torchmetrics.Metric"]
    """Returns the metric for the task's targets."""

    mode: Mode = "max"
    inputs: "Conversion | None" = None
    """Turns outputs and targets into those that the metric expects. None: pass them unchanged.

    A metric of probabilities needs it, because torchmetrics guesses for each batch whether outputs are logits.
    """

    size: int = field(default=0, init=False)
    metric: "torchmetrics.Metric" = field(init=False, repr=False, compare=False)

    def bind(self, targets: Outputs) -> "TorchMetric":
        """Return the metric for these targets.

        Raises:
            RecipeError: a state of the metric is not a sum, its value is not a number, or ``mode`` is wrong.
        """
        metric = self.make(targets)
        if fault := _fault_of(metric, self.mode):
            raise RecipeError(f"the metric {self.name} of the task is {type(metric).__name__}, {fault}").of(
                "metric.no_sums"
            )
        bound = replace(self)
        object.__setattr__(bound, "metric", metric)
        object.__setattr__(bound, "size", 1 + sum(state.numel() for state in metric.metric_state.values()))
        return bound

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the number of rows and the states after an update with these rows, float64 of shape (``size``,)."""
        import torch

        metric = self.metric.to(outputs.device)
        metric.reset()
        if len(outputs):  # many metrics fail without a row
            metric.update(*_convert(self.inputs, outputs, targets))
        rows = torch.tensor([len(outputs)], dtype=torch.float64, device=outputs.device)
        return torch.cat([rows, *(state.double().flatten() for state in metric.metric_state.values())])

    def value(self, sums: "Tensor") -> float:
        """Return what the metric computes from the summed states. NaN if there is no row."""
        import torch

        if not sums[0]:
            return math.nan
        metric = self.metric.to(sums.device)
        metric.reset()
        states = metric.metric_state
        parts = torch.split(sums[1:], [state.numel() for state in states.values()])
        for (name, state), part in zip(states.items(), parts, strict=True):
            # Floats stay float64, because sums over many rows lose digits in float32.
            kind = part.dtype if state.is_floating_point() else state.dtype
            setattr(metric, name, part.reshape(state.shape).to(kind))
        return float(_compute(metric))


@dataclass(frozen=True)
class SklearnMetric(Metric):
    """A function of ``sklearn.metrics``, or one like it, that is called once with all rows of a split.

    It has no sums. Each rank gets the rows of all ranks, so the value is exact and memory grows with the split.
    """

    name: str
    function: Callable[["NDArray[Any]", "NDArray[Any]"], float]
    """Returns the metric from the targets and the predictions, in scikit-learn's order."""

    mode: Mode = "max"
    inputs: "Conversion | None" = None
    """Converts outputs and targets to the predictions and targets that the function expects, such as
    ``lambda outputs, targets: (outputs.argmax(-1), targets)``. None: pass them unchanged.
    """

    size: int = field(default=0, init=False)

    def sums(self, outputs: "Tensor", targets: "Tensor") -> "Tensor":  # noqa: ARG002
        """Return no sums, of shape (0,)."""
        return outputs.new_zeros(0)

    def value(self, sums: "Tensor") -> float:  # noqa: ARG002
        """Return NaN: without rows there is no value."""
        return math.nan

    def rows(self, outputs: "Tensor", targets: "Tensor") -> "Predicted":
        """Return predictions and targets, on the CPU. For token targets, each token that is not padding is a row."""
        if targets.dim() > 1 and targets.shape == outputs.shape[:-1]:
            counted = targets != IGNORED
            outputs, targets = outputs[counted], targets[counted]
        predictions, targets = _convert(self.inputs, outputs, targets)
        return predictions.cpu(), targets.cpu()

    def of(self, outputs: "Tensor", targets: "Tensor") -> float:
        return self.value_of([self.rows(outputs, targets)])

    def of_subsets(self, outputs: "Tensor", targets: "Tensor") -> "Callable[[NDArray[Any]], float]":
        return lambda indices: self.of(outputs[indices], targets[indices])

    def value_of(self, parts: "Sequence[Predicted]") -> float:
        """Return the metric over the rows of all ``parts``. NaN if there is no row.

        Raises:
            RecipeError: the function fails, or does not return a number.
        """
        import torch

        filled = [part for part in parts if len(part[1])]
        if not filled:
            return math.nan
        predictions, targets = (torch.cat(tensors).numpy() for tensors in zip(*filled, strict=True))
        try:
            return float(self.function(targets, predictions))
        except Exception as error:
            given = " and ".join(f"{array.dtype} of shape {array.shape}" for array in (targets, predictions))
            raise RecipeError(
                f"the metric {self.name} of the task fails on targets and predictions, which are {given}: {error}; "
                "give inputs that convert them, or a function that returns one number"
            ).of("metric.fails") from error


def _convert(inputs: "Conversion | None", outputs: "Tensor", targets: "Tensor") -> "Predicted":
    return inputs(outputs, targets) if inputs else (outputs, targets)


def _compute(metric: "torchmetrics.Metric") -> Any:
    # The states are those of all ranks already. By default, torchmetrics would wait for the other ranks and add theirs.
    metric.distributed_available_fn = lambda: False
    with warnings.catch_warnings():  # that ``update`` was not called
        warnings.simplefilter("ignore", UserWarning)
        return metric.compute()


def _fault_of(metric: "torchmetrics.Metric", mode: Mode) -> str | None:
    """Return why batches and ranks cannot share a metric, and what to do; None if they can."""
    import torchmetrics
    from torch import Tensor
    from torchmetrics.utilities import dim_zero_sum

    # A composition has no states, and a collection keeps those of others.
    if not isinstance(metric, torchmetrics.Metric) or not metric.metric_state:
        return "which is not a single metric of torchmetrics: give one"
    for name, state in metric.metric_state.items():
        if not isinstance(state, Tensor) or metric._reductions[name] is not dim_zero_sum or state.any():
            return (
                f"whose state {name} is not a sum, so batches and ranks cannot be added up: give a metric whose states "
                "are sums, such as a binned one (thresholds=100)"
            )
    if metric.higher_is_better is not None and metric.higher_is_better != (mode == "max"):
        return f"whose better direction is not {mode}: set mode to {'min' if mode == 'max' else 'max'}"
    try:
        value = _compute(metric)
    except Exception:  # without rows, some have no value
        return None
    if not isinstance(value, Tensor) or value.numel() != 1:
        return "whose value is not one number: let it average, such as with average='macro'"
    return None
