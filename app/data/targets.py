"""What a model's outputs mean: the protocol that turns labels into targets, and outputs into answers."""

import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel
from upath import UPath

from app.config import DataConfig
from app.data.rows import number_of
from app.data.written import digits_of, label_of, spelling_of
from app.errors import DataError
from app.storage import write_atomically

LABELS_FILE, NUMBERS_FILE = "labels.json", "numbers.json"
_MAX_CONSTANT_LABELS = 50
"""Labels of a constant answer, which is compared with those of fewer labels."""

Answer = Mapping[str, Any]
"""What ``predict`` says of one input: a JSON object."""


class Outputs(Protocol):
    """What a model's outputs mean, kept with its weights and its versions."""

    @property
    def labels(self) -> list[str]:
        """The names of the output's columns; empty if they have none."""
        ...

    @property
    def num_outputs(self) -> int:
        """Columns of the model's output."""
        ...

    @property
    def facts(self) -> Mapping[str, int]:
        """Numbers that a model factory may need, by the name of its argument."""
        ...

    def decode(self, outputs: NDArray[np.float32]) -> list[Answer]:
        """Return what ``predict`` answers for each row of ``outputs``."""
        ...

    def save(self, folder: UPath) -> None:
        """Write everything that ``load`` needs."""
        ...

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """Return what ``save`` wrote. Raises FileNotFoundError."""
        ...


class LabelError(DataError):
    """A label that cannot be read or learned. Preparation adds the file and the row."""

    def __init__(self, message: str, label: str = "") -> None:
        """``label``: the label of a row, or one of several labels of a row."""
        super().__init__(message)
        self.label = label

    def is_of(self, label: str) -> bool:
        """Return whether a row with this label causes the error."""
        return self.label == label or self.label in split_labels(label, "")


@dataclass(frozen=True)
class LabelRule:
    """How labels are read, compared and kept."""

    cell: Literal["label", "labels", "nested"] = "nested"
    """What a cell of the label's column is: one label, a list of labels or a text of them, or any JSON."""
    agree: bool = False
    """Whether equal inputs have equal labels. Cleaning keeps one of them; of classes none, if their labels differ."""
    are_classes: bool = False
    """Whether each split gets rows of each label."""
    kept_as: Literal["class", "classes", "number", "json"] = "json"
    """What a value of ``Targets.read`` is: an index, a list of indices, a number, or what JSON can hold."""
    counted: Callable[[str], str] = str
    """Returns what a label counts as in ``Targets.fit``, so that long labels need not be kept. Default: itself."""
    written: Callable[[str, str], str] = lambda label, separator: label  # noqa: ARG005
    """Returns one text for all labels that mean the same. Gets ``data.columns.separator``, too."""
    named: Callable[[str], str] | None = None
    """Returns the label of a row that has only the class of this name. None: there are no named classes."""
    is_readable: Callable[[str], object] = bool
    """Returns whether a label can be read, whatever the others are."""


class Targets(Outputs, Protocol):
    """Turns the labels of examples into targets, and outputs into answers."""

    rule: ClassVar[LabelRule]

    @classmethod
    def fit(cls, labels: Mapping[str, int], config: DataConfig) -> Self:
        """Return the targets of examples. Raises DataError if nothing can be learned from them; LabelError for one.

        Args:
            labels: the number of rows of each label.
            config: of the source, for messages.
        """
        ...

    def read(self, labels: Sequence[str], config: DataConfig, key: str = "source") -> list[Any]:
        """Return the value of each label, as a split keeps it. ``key``: the one of ``data`` that names their source.

        Raises:
            LabelError: a label cannot be read, or no row of ``data.source`` has it.
        """
        ...

    def fitted(self, values: Sequence[Any], counts: Sequence[int]) -> Self:
        """Return the targets with what is learned from the values of the training split alone.

        Args:
            values: the different values.
            counts: the number of rows of each.
        """
        ...

    def batch(self, values: Sequence[Any]) -> NDArray[Any]:
        """Return targets for training, of shape (rows, …): int64 for classes, else float32."""
        ...


@runtime_checkable
class HasTargets(Protocol):
    """Data that say what the outputs mean."""

    @property
    def targets(self) -> Outputs: ...


@runtime_checkable
class HasConstants(Protocol):
    """Targets with constant answers, as baselines."""

    def constants(self, values: Sequence[Any]) -> Mapping[str, NDArray[np.float32]]:
        """Return the output row of each constant answer by its name, from the values of training rows."""
        ...


@dataclass(frozen=True)
class _Labels:
    """Labels that are known by name. Nothing else is learned from the training split."""

    labels: list[str]

    @property
    def num_outputs(self) -> int:
        return len(self.labels)

    @property
    def facts(self) -> Mapping[str, int]:
        return {"num_labels": self.num_outputs}

    def fitted(self, values: Sequence[Any], counts: Sequence[int]) -> Self:  # noqa: ARG002
        return self

    def save(self, folder: UPath) -> None:
        save_labels(self.labels, folder)

    @classmethod
    def load(cls, folder: UPath) -> Self:
        return cls(load_labels(folder))


@dataclass(frozen=True)
class Classes(_Labels):
    """Each row has one of several labels. The output has a logit for each, of shape (rows, labels)."""

    rule: ClassVar[LabelRule] = LabelRule("label", agree=True, are_classes=True, kept_as="class", named=str)

    @classmethod
    def fit(cls, labels: Mapping[str, int], config: DataConfig) -> Self:
        found = sorted({*map(spelling_of(labels), labels)})
        if len(found) < 2:
            raise DataError(f"data.source {config.source!r} has the classes {found} after cleaning: expected two").of(
                "labels.too_few", "data.source"
            )
        _require_distinct(found, config)
        return cls(found)

    def read(self, labels: Sequence[str], config: DataConfig, key: str = "source") -> list[int]:
        """Return the class of each label: its index."""
        return indices_of(self.labels, labels, config, key)

    def batch(self, values: Sequence[int]) -> NDArray[np.int64]:
        return np.array(values, np.int64)

    def constants(self, values: Sequence[int]) -> Mapping[str, NDArray[np.float32]]:
        """Return the answer with the most frequent label."""
        counts = np.bincount(np.asarray(values, np.int64), minlength=self.num_outputs)
        return {"the majority class": (np.arange(self.num_outputs) == counts.argmax()).astype(np.float32)}

    def decode(self, outputs: NDArray[np.float32]) -> list[Answer]:
        """Return the most likely label of each row, and the probability of each label."""
        return [
            {"label": self.labels[int(row.argmax())], "scores": _by_label(self.labels, row)} for row in softmax(outputs)
        ]


def _write_set(label: str, separator: str) -> str:
    return json.dumps(sorted(set(split_labels(label, separator))), ensure_ascii=False)


def _set_of(label: str) -> str:
    return json.dumps([label], ensure_ascii=False)


@dataclass(frozen=True)
class LabelSets(_Labels):
    """Each row has any number of labels. The output has a logit for each label, of shape (rows, labels).

    Labels are given as a list, or as one text in which ``data.columns.separator`` is between them.
    """

    rule: ClassVar[LabelRule] = LabelRule("labels", kept_as="classes", written=_write_set, named=_set_of)
    separator: str = "|"

    @classmethod
    def fit(cls, labels: Mapping[str, int], config: DataConfig) -> Self:
        separator = config.columns.separator
        written = {label for given in labels for label in split_labels(given, separator)}
        found = sorted({*map(spelling_of(written), written)})
        _require_distinct(found, config)
        if not found:
            raise DataError(f"data.source {config.source!r} has no labels: expected one or more in some rows").of(
                "labels.too_few", "data.source"
            )
        return cls(found, separator)

    def read(self, labels: Sequence[str], config: DataConfig, key: str = "source") -> list[list[int]]:
        """Return the indices of the labels of each row, ascending."""
        return [sorted(indices_of(self.labels, split_labels(given, self.separator), config, key)) for given in labels]

    def batch(self, values: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return 1 where a row has the label, else 0, of shape (rows, labels)."""
        targets = np.zeros((len(values), len(self.labels)), np.float32)
        for row, classes in enumerate(values):
            targets[row, list(classes)] = 1.0
        return targets

    def constants(self, values: Sequence[Sequence[int]]) -> Mapping[str, NDArray[np.float32]]:
        """Return the answers with the most frequent label, with the two most frequent ones, and so on."""
        rank = np.argsort(np.argsort(-self.batch(values).sum(axis=0), kind="stable"))
        return {
            f"the {f'{count} ' if count > 1 else ''}most frequent label{'s' * (count > 1)}": np.where(
                rank < count, 1.0, -1.0
            ).astype(np.float32)
            for count in range(1, min(self.num_outputs, _MAX_CONSTANT_LABELS) + 1)
        }

    def decode(self, outputs: NDArray[np.float32]) -> list[Answer]:
        """Return the labels of each row whose probability is at least a half, and the probability of each label."""
        return [
            {
                "labels": [label for label, score in zip(self.labels, row, strict=True) if score >= 0.5],
                "scores": _by_label(self.labels, row),
            }
            for row in 1.0 / (1.0 + np.exp(-outputs))
        ]


def _write_number(label: str, separator: str) -> str:  # noqa: ARG001
    number = number_of(label)
    return label if number is None else digits_of(number, str(number))


ROUNDING = 1e-12
"""A standard deviation below this share of the largest number comes from rounding: all numbers are the same."""


class Scale(BaseModel):
    """The mean and the standard deviation of the training split's numbers."""

    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, numbers: ArrayLike) -> "Scale":
        """Measure finite numbers. The deviation is 0 if all are the same, or there are none."""
        values = np.asarray(numbers, np.float64)
        if not values.size:
            return Scale(std=0.0)
        # A power of 2 scales exactly, and no square overflows or vanishes.
        exponent = int(np.frexp(np.abs(values).max())[1])
        scaled = np.ldexp(values, -exponent)
        std = float(scaled.std())
        return Scale(
            mean=math.ldexp(float(scaled.mean()), exponent), std=math.ldexp(std, exponent) if std > ROUNDING else 0.0
        )


def _is_number(label: str) -> bool:
    return number_of(label) is not None


@dataclass(frozen=True)
class Numbers:
    """Each row has a number. The output is that number, scaled to mean 0 and deviation 1, of shape (rows, 1)."""

    rule: ClassVar[LabelRule] = LabelRule("label", kept_as="number", written=_write_number, is_readable=_is_number)
    labels: ClassVar[list[str]] = []
    num_outputs: ClassVar[int] = 1
    facts: ClassVar[Mapping[str, int]] = {"num_labels": num_outputs}
    scale: Scale

    @classmethod
    def fit(cls, labels: Mapping[str, int], config: DataConfig) -> Self:
        targets = cls(Scale())
        if len(set(targets.read(list(labels), config))) < 2:
            raise DataError(
                f"data.source {config.source!r} has one and the same number in all rows: expected several"
            ).of("labels.too_few", "data.source")
        return targets

    def read(self, labels: Sequence[str], config: DataConfig, key: str = "source") -> list[float]:
        return [_number(label, f"data.{key} {getattr(config, key)!r}") for label in labels]

    def fitted(self, values: Sequence[float], counts: Sequence[int]) -> Self:
        scale = Scale.of(np.repeat(values, counts))
        # Answers are scaled back, and other numbers may follow, so no deviation is 0.
        return replace(self, scale=scale if scale.std else Scale(mean=scale.mean))

    def batch(self, values: Sequence[float]) -> NDArray[np.float32]:
        """Return scaled numbers, of shape (rows,)."""
        return ((np.array(values) - self.scale.mean) / self.scale.std).astype(np.float32)

    def constants(self, values: Sequence[float]) -> Mapping[str, NDArray[np.float32]]:
        """Return the mean and the median."""
        found = {"the mean's error": np.mean(values), "the median's error": np.median(values)}
        return {name: self.batch([float(number)]) for name, number in found.items()}

    def decode(self, outputs: NDArray[np.float32]) -> list[Answer]:
        """Return the number of each row."""
        return [{"value": float(value) * self.scale.std + self.scale.mean} for value in outputs[:, 0]]

    def save(self, folder: UPath) -> None:
        write_atomically(folder / NUMBERS_FILE, self.scale.model_dump_json().encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        return cls(Scale.model_validate_json((folder / NUMBERS_FILE).read_bytes()))


def save_labels(labels: list[str], folder: UPath) -> None:
    """Write the labels, in the order of the classes."""
    write_atomically(folder / LABELS_FILE, json.dumps(labels, ensure_ascii=False, indent=1).encode())


def load_labels(folder: UPath) -> list[str]:
    """Return the labels that ``save_labels`` wrote."""
    labels: list[str] = json.loads((folder / LABELS_FILE).read_bytes())
    return labels


def split_labels(given: str, separator: str) -> list[str]:
    """Return the labels of one row: of a list in JSON, as tables give lists, or of a text with separators.

    Empty labels and null are left out.
    """
    if given.startswith("["):
        with suppress(ValueError, TypeError):
            return [name for label in json.loads(given) if (name := label_of(label))]
    return [name for part in (given.split(separator) if separator else [given]) if (name := label_of(part))]


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the softmax over the last axis. SciPy's would add 0.1 s of import to the start of every replica."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)  # type: ignore[no-any-return]


def _require_distinct(labels: Iterable[str], config: DataConfig) -> None:
    """Raise LabelError if two labels are one number, such as 1 and 1.0, or look alike: they would be two classes."""
    written: dict[float | str, str] = {}
    for label in sorted(labels):
        meaning, what = _meaning_of(label)
        if (other := written.setdefault(meaning, label)) != label:
            raise LabelError(
                f"data.source {config.source!r} has the labels {other!r} and {label!r}, which are the same {what}: "
                "write it in one way",
                label,
            ).of("labels.alike", "data.source")


def _meaning_of(label: str) -> tuple[float | str, str]:
    if (number := number_of(label)) is not None:
        return number, "number"
    # A letter with an accent is one character or two, and looks alike.
    return unicodedata.normalize("NFC", label), f"text in other characters ({label!a})"


def _by_label(labels: Sequence[str], scores: NDArray[np.float32]) -> dict[str, float]:
    return {label: round(float(score), 6) for label, score in zip(labels, scores, strict=True)}


def indices_of(known: Sequence[str], labels: Sequence[str], config: DataConfig, key: str) -> list[int]:
    """Return the place of each label among those that are known. Raises LabelError for any other."""
    spelled = spelling_of(known)
    class_of = {spelled(label): index for index, label in enumerate(known)}
    if unknown := sorted(label for label in set(labels) if spelled(label) not in class_of):
        raise LabelError(
            f"data.{key} {getattr(config, key)!r} has the label {unknown[0]!r}, but data.source {config.source!r} has "
            f"only {', '.join(known)}: give a source with these labels only",
            unknown[0],
        ).of("labels.unknown", f"data.{key}")
    return [class_of[spelled(label)] for label in labels]


def _number(label: str, source: str) -> float:
    if (number := number_of(label)) is None:
        raise LabelError(
            f"{source} has the label {label!r}: a regression learns numbers; give numbers, or another task", label
        ).of("label.not_a_number")
    return number
