"""How the rows of a source become samples: which columns are read, and what each row is to the task."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from app.config import CleanConfig, ColumnsConfig, DataConfig, Recipe
from app.data.conversations import MESSAGES, TOOLS, ChatEncoder, read_chat, stored_chat, write_chat
from app.data.examples import Input, Modality, Natural, Reason
from app.data.pairs import Pair, join_pair, split_pair
from app.data.preparation.chats import ChatWriter, pack
from app.data.preparation.writers import BlockWriter, SplitWriter
from app.data.rows import RowColumns
from app.data.sharded import InputColumns
from app.data.shards import ShardPlace
from app.data.sources.cells import Column, Columns, Rows
from app.data.sources.formats.base import CHATS, DOCUMENTS, PAIRS, TAGGED, SourceFile
from app.data.sources.labelled import (
    GROUP,
    INPUT,
    LABEL,
    group_columns,
    inputs_of,
    labelled_columns,
    records_of,
    resolve_columns,
    table_of,
)
from app.data.sources.tagged import resolve_tagged, tagged_columns, tags_of, texts_of
from app.data.sources.units import Contents
from app.data.tags import Tags
from app.data.targets import LabelRule, Targets
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError
from app.pretrained import open_pretrained

_ANCHOR, _POSITIVE = "data.columns.anchor", "data.columns.positive"


class SampleKind(ABC):
    """What a sample of a task is. It can be pickled."""

    what: ClassVar[Literal["examples", "documents", "texts", "pairs", "conversations"]]
    """What a sample is called in reports."""
    strips: ClassVar[bool]
    """Whether white space around a text is dropped."""
    contents: Contents
    """What the source holds."""
    targets: type[Targets] | None = None
    """What the labels mean; None if there are none."""

    @property
    def is_text(self) -> bool:
        """Whether a sample is a text, or has nothing but texts."""
        return self.contents in ("text", DOCUMENTS, TAGGED, PAIRS)

    @property
    def unread(self) -> Reason:
        """Why a row without an input is dropped."""
        return "not_text" if self.is_text else "unreadable"

    @property
    def labels_agree(self) -> bool:
        """Whether equal inputs have equal labels. Otherwise only rows with equal inputs and labels are duplicates."""
        return True

    @property
    def are_classes(self) -> bool:
        """Whether each split gets rows of each label."""
        return False

    @property
    def drops_conflicts(self) -> bool:
        """Whether inputs with several labels are dropped. Otherwise the first of equal inputs is kept."""
        return self.are_classes and self.labels_agree

    min_held_out: ClassVar[int] = 1
    """Samples of a validation split, at least."""

    def deduplicates(self, config: CleanConfig) -> bool:
        """Return whether one of several equal rows is kept. By default, rows of tables may be equal."""
        return self.contents not in ("row", "record") if config.deduplicate is None else config.deduplicate

    def resolve(self, files: Sequence[SourceFile], columns: ColumnsConfig, group: str | None) -> ColumnsConfig:  # noqa: ARG002
        """Return the columns with all that are read. A stream has no files. The column ``group`` is not an input.

        Raises:
            DataError: the files lack one, or the recipe has to name it.
        """
        return columns

    @abstractmethod
    def columns(self, config: DataConfig) -> Columns:
        """Return the columns that are read of one source."""

    def lengths(self, config: DataConfig, inputs: Sequence[Any]) -> Sequence[int]:  # noqa: ARG002
        """Return the length of each input: batches of similar lengths need little padding. 0: all have one size."""
        return [len(item) for item in inputs] if self.is_text else [0] * len(inputs)

    @abstractmethod
    def inputs(self, rows: Rows, config: DataConfig, verify: bool) -> Iterator[Input | None]:
        """Yield the input of each row; None if it cannot be read. ``verify``: decode files to see it."""

    def kept(self, columns: ColumnsConfig) -> InputColumns:  # noqa: ARG002
        """Return the columns that rows or records have in shards, once their kinds are decided; None for others."""
        return None

    def labels(self, rows: Rows, config: DataConfig) -> list[str] | None:  # noqa: ARG002
        """Return the label of each row, "" for none. None: the task has no labels."""
        return None

    def parts(self, item: Input) -> Sequence[Input]:
        """Return the parts of an input that are cleaned, and learned from, one by one."""
        return (item,)

    def sizes(self, inputs: Sequence[Input], tokenizer: LanguageTokenizer | None) -> Sequence[int]:  # noqa: ARG002
        """Return the size of each row in its split, for ``count``."""
        return [1] * len(inputs)

    def count(self, sizes: NDArray[np.int64], length: int) -> int:  # noqa: ARG002
        """Return the number of samples that rows of these sizes become. ``length``: ``data.block_length``."""
        return len(sizes)

    def unused(self, sizes: NDArray[np.int64], count: int, length: int) -> int:  # noqa: ARG002
        """Return how many tokens of such rows are in none of ``count`` samples."""
        return 0

    @property
    def rule(self) -> LabelRule | None:
        """How labels are read; None if there are none."""
        return self.targets.rule if self.targets else None

    def counted(self, label: str) -> str:
        """Return the label that a row with this label counts as."""
        return self.rule.counted(label) if label and self.rule else label

    def written(self, rows: Rows, config: DataConfig) -> Iterator[Natural | None]:
        """Yield what shards get of each row."""
        return self.inputs(rows, config, verify=False)


class TokenKind(SampleKind):
    """Samples that are kept as tokens, which the tokenizer of the data reads."""

    @abstractmethod
    def writer(self, place: ShardPlace, tokenizer: LanguageTokenizer) -> SplitWriter:
        """Return a writer of shards."""


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

    def resolve(self, files: Sequence[SourceFile], columns: ColumnsConfig, group: str | None) -> ColumnsConfig:
        return resolve_columns(files, columns, self.contents, group)

    def columns(self, config: DataConfig) -> Columns:
        return labelled_columns(config.columns, self.contents, config.group_column, self.targets.rule.cell)

    def lengths(self, config: DataConfig, inputs: Sequence[Any]) -> Sequence[int]:
        if self.contents != "record":
            return super().lengths(config, inputs)
        from app.data.records import RecordProcessor  # other samples do not need every processor

        lengths: list[int] = RecordProcessor.of_fields(config.columns).measure(inputs)[0].tolist()
        return lengths

    def inputs(self, rows: Rows, config: DataConfig, verify: bool) -> Iterator[Input | None]:
        return inputs_of(rows, self.columns(config), config.columns, verify)

    def labels(self, rows: Rows, config: DataConfig) -> list[str]:
        written, separator = self.targets.rule.written, config.columns.separator
        return [written(label, separator) if label else "" for label in rows.cells[LABEL].to_pylist()]

    def written(self, rows: Rows, config: DataConfig) -> Iterator[Natural | None]:
        if self.contents == "row":
            return iter(table_of(rows, self.columns(config).values, config.columns))
        if self.contents == "record":
            return records_of(rows, self.columns(config), config.columns, verify=False)
        return super().written(rows, config)

    def kept(self, columns: ColumnsConfig) -> InputColumns:
        if self.contents == "row":
            return RowColumns.of(columns.features or (), columns.categories)
        if self.contents == "record":
            from app.data.records import kept_columns  # other samples do not need every processor

            return kept_columns(columns)
        return None


@dataclass(frozen=True)
class TaggedTexts(SampleKind):
    """Texts whose words are tagged."""

    contents: Contents = TAGGED
    targets: type[Targets] = Tags
    what: ClassVar[Literal["texts"]] = "texts"
    strips: ClassVar[bool] = True

    def resolve(self, files: Sequence[SourceFile], columns: ColumnsConfig, group: str | None) -> ColumnsConfig:  # noqa: ARG002
        return resolve_tagged(files, columns)

    def columns(self, config: DataConfig) -> Columns:
        return tagged_columns(config.columns, config.group_column)

    def inputs(self, rows: Rows, config: DataConfig, verify: bool) -> Iterator[Input | None]:  # noqa: ARG002
        return texts_of(rows, config.columns)

    def labels(self, rows: Rows, config: DataConfig) -> list[str]:
        return [json.dumps(tags, ensure_ascii=False) if tags else "" for tags in tags_of(rows, config.columns)]


@dataclass(frozen=True)
class Pairs(SampleKind):
    """Pairs of texts that belong together. None has a text that is in a held-out pair."""

    contents: Contents = PAIRS
    what: ClassVar[Literal["pairs"]] = "pairs"
    min_held_out: ClassVar[int] = 2
    strips: ClassVar[bool] = True

    def columns(self, config: DataConfig) -> Columns:
        anchor, positive = config.columns.anchor, config.columns.positive
        return Columns(PAIRS, (Column(_ANCHOR, anchor, "text"), Column(_POSITIVE, positive, "text")))

    def parts(self, item: Input) -> Pair:
        return split_pair(item)

    def lengths(self, config: DataConfig, inputs: Sequence[Input]) -> Sequence[int]:  # noqa: ARG002
        return [max(map(len, split_pair(item))) for item in inputs]

    def inputs(self, rows: Rows, config: DataConfig, verify: bool) -> Iterator[Input | None]:  # noqa: ARG002
        for pair in zip(*(rows.cells[key].to_pylist() for key in (_ANCHOR, _POSITIVE)), strict=True):
            yield None if None in pair else join_pair(*pair)


@dataclass(frozen=True)
class Documents(TokenKind):
    """Documents of language modelling."""

    contents: Contents = DOCUMENTS
    what: ClassVar[Literal["documents"]] = "documents"
    strips: ClassVar[bool] = False

    def columns(self, config: DataConfig) -> Columns:
        text = Column(INPUT, config.columns.input, "text")
        return Columns(DOCUMENTS, (text, *group_columns(config.group_column)))

    def inputs(self, rows: Rows, config: DataConfig, verify: bool) -> Iterator[Input | None]:  # noqa: ARG002
        yield from rows.cells[INPUT].to_pylist()

    def sizes(self, inputs: Sequence[Input], tokenizer: LanguageTokenizer | None) -> Sequence[int]:
        """Return the tokens of each document with its end; an upper bound as long as no tokenizer is learned."""
        if tokenizer is None:
            return [len(str(item).encode()) + 1 for item in inputs]
        return [len(tokenizer.join([str(item)])) for item in inputs]

    def count(self, sizes: NDArray[np.int64], length: int) -> int:
        return max(int(sizes.sum()) - 1, 0) // length  # the last token is only a target

    def unused(self, sizes: NDArray[np.int64], count: int, length: int) -> int:
        return int(sizes.sum()) - 1 - count * length

    def writer(self, place: ShardPlace, tokenizer: LanguageTokenizer) -> SplitWriter:
        return BlockWriter(place, tokenizer)


@dataclass(frozen=True)
class Conversations(TokenKind):
    """Conversations of a chat, as JSON."""

    encoder: ChatEncoder
    is_packed: bool
    contents: Contents = CHATS
    unread: ClassVar[Reason] = "no_answer"
    what: ClassVar[Literal["conversations"]] = "conversations"
    strips: ClassVar[bool] = False

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """Return the conversations of a recipe. Raises RecipeError if its model has no chat template."""
        assert recipe.model.source is not None
        pretrained = open_pretrained(recipe.model.source)
        tokenizer = LanguageTokenizer.from_pretrained(pretrained, recipe.data)
        return cls(ChatEncoder(pretrained, tokenizer), recipe.data.chat.packing)

    def columns(self, config: DataConfig) -> Columns:
        return Columns(CHATS, (MESSAGES, TOOLS, *group_columns(config.group_column)))

    def inputs(self, rows: Rows, config: DataConfig, verify: bool) -> Iterator[Input | None]:  # noqa: ARG002
        """Yield each conversation, in the same words if it is the same; None if no answer begins early enough."""
        cells = (rows.cells[column.key].to_pylist() for column in (MESSAGES, TOOLS))
        for number, (messages, tools) in enumerate(zip(*cells, strict=True)):
            try:
                chat = read_chat(messages, tools)
                has_answer = not verify or self.encoder.encode(chat).learned.any()
            except DataError as error:
                raise DataError(f"{rows.place(number)}: {error}").of(error.rule, error.key) from error
            yield write_chat(chat) if has_answer else None

    def sizes(self, inputs: Sequence[Input], tokenizer: LanguageTokenizer | None) -> Sequence[int]:  # noqa: ARG002
        return [len(self.encoder.encode(stored_chat(str(item))).tokens) - 1 for item in inputs]

    def count(self, sizes: NDArray[np.int64], length: int) -> int:
        return len(pack(sizes.tolist(), length)) if self.is_packed else len(sizes)

    def writer(self, place: ShardPlace, tokenizer: LanguageTokenizer) -> SplitWriter:
        return ChatWriter(place, tokenizer, self.encoder, self.is_packed)


def groups_in(rows: Rows) -> list[str] | None:
    """Return the group of each row; None if they have none."""
    found: list[str] | None = rows.cells[GROUP].to_pylist() if GROUP in rows.cells else None
    return found
