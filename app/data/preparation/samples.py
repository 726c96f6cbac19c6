"""How the rows of a source become samples: which columns are read, and what each row is to the task."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from app.config import DataConfig
from app.data.examples import Input, Modality
from app.data.sources.cells import Columns, Rows
from app.data.sources.documents import document_columns
from app.data.sources.formats.base import DOCUMENTS
from app.data.sources.labelled import GROUP, INPUT, LABEL, inputs_of, labelled_columns
from app.data.sources.units import Contents
from app.data.targets import Targets


class SampleKind(ABC):
    """What a sample of a task is. It can be pickled."""

    what: ClassVar[Literal["examples", "documents"]]
    """What a sample is called in reports."""
    strips: ClassVar[bool]
    """Whether white space around a text is dropped."""
    contents: Contents
    """What the source holds."""
    targets: type[Targets] | None = None
    """What the labels mean; None if there are none."""

    @property
    def is_text(self) -> bool:
        """Whether a sample is one text."""
        return self.contents in ("text", DOCUMENTS)

    @property
    def has_labels(self) -> bool:
        """Whether rows have labels."""
        return self.targets is not None

    @property
    def labels_agree(self) -> bool:
        """Whether equal inputs have equal labels. Otherwise only rows with equal inputs and labels are duplicates."""
        return True

    @property
    def are_classes(self) -> bool:
        """Whether each split gets rows of each label."""
        return False

    @abstractmethod
    def columns(self, config: DataConfig) -> Columns:
        """Return the columns that are read of one source."""

    def lengths(self, config: DataConfig, inputs: Sequence[Input]) -> Sequence[int]:  # noqa: ARG002
        """Return the length of each input: batches of similar lengths need little padding. 0: all have one size."""
        return [len(item) for item in inputs] if self.is_text else [0] * len(inputs)

    @abstractmethod
    def inputs(self, rows: Rows, config: DataConfig, verify: bool) -> Iterator[Input | None]:
        """Yield the input of each row; None if it cannot be read. ``verify``: decode files to see it."""


@dataclass(frozen=True)
class Labelled(SampleKind):
    """An input of one kind with its label."""

    contents: Modality
    targets: type[Targets]
    what: ClassVar[Literal["examples"]] = "examples"
    strips: ClassVar[bool] = True

    @property
    def labels_agree(self) -> bool:
        """Rows of measured values may be equal and have several labels. A record may lack what tells them apart."""
        return self.targets.rule.agree and self.contents not in ("row", "record")

    @property
    def are_classes(self) -> bool:
        return self.targets.rule.are_classes

    def columns(self, config: DataConfig) -> Columns:
        return labelled_columns(config.columns, self.contents, config.group_column, self.targets.rule.cell)

    def lengths(self, config: DataConfig, inputs: Sequence[Input]) -> Sequence[int]:
        if self.contents != "record":
            return super().lengths(config, inputs)
        from app.data.records import RecordProcessor  # other samples do not need every processor

        lengths: list[int] = RecordProcessor.of_fields(config.columns).measure(inputs)[0].tolist()
        return lengths

    def inputs(self, rows: Rows, config: DataConfig, verify: bool) -> Iterator[Input | None]:
        return inputs_of(rows, self.columns(config), config.columns, verify)


@dataclass(frozen=True)
class Documents(SampleKind):
    """Documents of language modelling."""

    contents: Contents = DOCUMENTS
    what: ClassVar[Literal["documents"]] = "documents"
    strips: ClassVar[bool] = False

    def columns(self, config: DataConfig) -> Columns:
        return document_columns(config.columns, config.group_column)

    def inputs(self, rows: Rows, config: DataConfig, verify: bool) -> Iterator[Input | None]:  # noqa: ARG002
        yield from rows.cells[INPUT].to_pylist()


def labels_in(rows: Rows) -> list[str] | None:
    """Return the label of each row; None if they have none."""
    return [label or "" for label in rows.cells[LABEL].to_pylist()] if LABEL in rows.cells else None


def groups_in(rows: Rows) -> list[str] | None:
    """Return the group of each row; None if they have none."""
    found: list[str] | None = rows.cells[GROUP].to_pylist() if GROUP in rows.cells else None
    return found
