"""Sources of a recipe: their columns, and several sources that a model learns from together."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, Self

from pydantic import Field, model_validator

from app.config.section import IMPORT_STRING, LOCATION, NAME, Section
from app.errors import RecipeError

JOINED = " + "
"""Between the sources in ``data.source``, where there are several."""


class FieldConfig(Section):
    """A field of samples that have several, such as a text with a picture."""

    kind: Annotated[str, Field(pattern=rf"^(text|image|audio|row|{IMPORT_STRING})$")] = Field(
        description="text; image, or audio: the column has the path or URI of a file; row: numbers and "
        "categories of several columns; or the import path of a processor of your own, whose column has the path or "
        "URI of a file"
    )
    column: str | None = Field(default=None, description="column of the field; default: the field's name")
    columns: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None, description="for kind row, in place of column: the columns that are read"
    )

    @model_validator(mode="after")
    def _row_has_columns(self) -> Self:
        if self.kind == "row" and (self.columns is None or self.column is not None):
            raise ValueError("kind row reads several columns: name them in columns, and leave column out")
        if self.kind != "row" and self.columns is not None:
            raise ValueError(f"columns is for kind row, and kind {self.kind} reads one: name it in column")
        return self


class ColumnsConfig(Section):
    """The columns of a csv, jsonl or parquet source."""

    input: str = Field(default="text", description="column of the text")
    label: str = Field(
        default="label", description="column of the class, the number or the labels; language modelling has none"
    )
    separator: Annotated[str, Field(min_length=1)] = Field(
        default="|", description="for several labels in one text: what is between them"
    )
    features: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="for tabular tasks: columns that the model reads; default: all but label and data.group_column",
    )
    categories: list[str] = Field(
        default=[],
        description="for tabular and multimodal tasks: columns of categories although they look like numbers, such as "
        "postal codes",
    )
    numbers: list[str] = Field(
        default=[],
        description="for tabular and multimodal tasks: columns of numbers; a cell that is none is refused with its "
        "row; default: a column is one of numbers if all cells that have a value are numbers",
    )
    fields: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], FieldConfig] = Field(
        default={},
        description="for multimodal tasks: fields of a sample, by the name that predict takes, each with its kind",
    )
    anchor: str = Field(default="anchor", description="for sentence-embedding: column of a text, such as a question")
    positive: str = Field(
        default="positive",
        description="for sentence-embedding: column of the text that belongs to it, such as the answer",
    )
    tokens: str | None = Field(
        default="tokens",
        description="for token-classification: field of a text's words, a list; null: texts have spans",
    )
    tags: str = Field(default="tags", description="for token-classification: field of the class of each of these words")
    tag_names: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None,
        description="for token-classification with tags that are numbers: the name of each, in the order of the "
        "numbers, such as [O, B-PER, I-PER]",
    )
    spans: str = Field(
        default="spans",
        description="for token-classification, in place of tokens and tags: field of a list of {start, end, label}, in "
        "characters of the text in the field input",
    )

    @model_validator(mode="after")
    def _column_has_one_kind(self) -> Self:
        if both := sorted({*self.numbers} & {*self.categories}):
            raise RecipeError(
                f"numbers and categories both name {both[0]!r}: a column has one kind, so remove it from one of them"
            ).of("column.two_kinds")
        return self

    @model_validator(mode="after")
    def _label_is_not_an_input(self) -> Self:
        fields = [column for name, field in self.fields.items() for column in field.columns or [field.column or name]]
        if self.label in {*(self.features or ()), *fields}:
            raise RecipeError(
                f"label {self.label!r} is also a column that the model reads, so it would learn to copy it: remove "
                "it from features and fields"
            ).of("label.is_input")
        return self


class SourceConfig(Section):
    """One of several sources."""

    source: Annotated[str, LOCATION] = Field(description="as data.source")
    name: Annotated[str, Field(pattern=rf"^{NAME}$")] | None = Field(
        default=None, description="name in metrics and messages; default: the last part of the source"
    )
    weight: Annotated[float, Field(gt=0.0)] | None = Field(
        default=None,
        description="share of the training rows, relative to the other weights; all sources have one or none; default: "
        "by data.temperature",
    )
    columns: ColumnsConfig | None = Field(default=None, description="its own columns; default: data.columns")

    @property
    def title(self) -> str:
        """The name, or the last part of the source in its place."""
        return self.name or PurePosixPath(self.source.rpartition(":")[2]).stem


def join_sources(given: Sequence[SourceConfig]) -> str:
    """Return what ``data.source`` is for several sources. Messages show it."""
    return JOINED.join(one.source for one in given)


def require_consistent(given: Sequence[SourceConfig]) -> None:
    """Raise ValueError unless names differ, and all sources have weights or none has."""
    titles = [one.title for one in given]
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise RecipeError(f"two sources are called {twice[0]!r}: give one another name").of("names.twice")
    weighted = [one.title for one in given if one.weight is not None]
    if weighted and len(weighted) < len(given):
        lacking = next(one.title for one in given if one.weight is None)
        raise RecipeError(
            f"source {weighted[0]!r} has a weight and {lacking!r} has none: give all sources one, or none"
        ).of("weights.some")
