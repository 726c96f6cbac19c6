"""The encoding of a source's rows as shards: its columns, targets, tokenizer and processor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import ColumnsConfig, DataConfig
from app.data.examples import Input
from app.data.preparation.samples import SampleKind, TokenKind
from app.data.preparation.survey import Cleaner
from app.data.preparation.writers import LabelledWriter, SplitWriter, labelled_schema
from app.data.processor import Processor
from app.data.sharded import InputColumns
from app.data.shards import Shard, ShardIndex, ShardPlace
from app.data.sources.cells import Rows
from app.data.targets import LabelError, Targets
from app.data.tokenizer import LanguageTokenizer
from app.storage import write_atomically

COLUMNS_FILE = "columns.json"
"""The columns of the source, each listed under ``numbers`` or ``categories``."""

_ENCODED_ROWS = 64
"""Rows that are encoded at a time to check them."""


@dataclass(frozen=True)
class Encoding:
    """How a task reads the rows of a source, and how shards store them."""

    kind: SampleKind
    config: DataConfig
    targets: Targets | None = None
    """What the labels mean. None: not yet known, or there are no labels."""
    columns: InputColumns = None
    """The columns of rows or records, once their kinds are decided."""
    tokenizer: LanguageTokenizer | None = None
    """For samples that are kept as tokens."""
    processor: Processor | None = None
    """For other samples, once it is fitted."""

    @classmethod
    def load(cls, config: DataConfig, kind: SampleKind, folder: UPath) -> Self:
        """Return the encoding of the shards in a folder."""
        columns = ColumnsConfig.model_validate_json((folder / COLUMNS_FILE).read_bytes())
        return cls(
            kind,
            config.model_copy(update={"columns": columns}),
            kind.targets.load(folder) if kind.targets else None,
            ShardIndex.load(folder).columns,
            LanguageTokenizer.load(folder) if isinstance(kind, TokenKind) else None,
        )

    def fitted(self, folder: UPath, learned: Mapping[str, int], trained: Mapping[str, int]) -> Self:
        """Fit the parts that are not known yet, and write them into ``folder``.

        Args:
            learned: the number of rows of each label, in the splits that determine the set of labels.
            trained: the same in the training split.

        Raises:
            LabelError: a label cannot be read, or nothing can be learned from the labels.
        """
        columns, targets = self.config.columns, self.targets
        write_atomically(folder / COLUMNS_FILE, columns.model_dump_json(indent=1).encode())
        if self.kind.targets is not None:
            targets = targets or self.kind.targets.fit(learned, self.config)
            targets = targets.fitted(targets.read([*trained], self.config), [*trained.values()])
            targets.save(folder)
        return replace(self, targets=targets, columns=self.kind.kept(self.config.each_source()[0].columns))

    def check_label(self, label: str, key: str = "source") -> None:
        """Raise LabelError for a label that is not known, or cannot be read whatever the others are."""
        if self.kind.rule and not self.kind.rule.is_readable(label):
            raise LabelError(f"{label!r} is not a number, as the labels of data.{key} must be", label)
        if self.targets:
            self.targets.read([label], self.config, key)

    def check_inputs(self, rows: Rows, chosen: Sequence[int]) -> None:
        """Raise DataError if the processor refuses one of the chosen inputs, such as a number out of scale."""
        if self.processor:
            convert, written = Cleaner(self.config.clean, self.kind).convert, [*self.kind.written(rows, self.config)]
            for start in range(0, len(chosen), _ENCODED_ROWS):
                items = [cast(Input, written[row]) for row in chosen[start : start + _ENCODED_ROWS]]
                self.processor.encode([convert(part) for item in items for part in self.kind.parts(item)])

    def writer(self, place: ShardPlace, key: str = "source") -> SplitWriter:
        """Return a writer of shards. ``key``: the one of ``data`` that names the source of the rows."""
        if isinstance(self.kind, TokenKind):
            assert self.tokenizer is not None
            return self.kind.writer(place, self.tokenizer)
        read = partial(self.targets.read, config=self.config, key=key) if self.targets else None
        schema = labelled_schema(self.kind.contents, self.kind.rule, self.columns)
        return LabelledWriter(place, schema, read, partial(self.kind.lengths, self.config), self.columns)

    def write(
        self, place: ShardPlace, batches: Iterable[Rows], kept: NDArray[np.bool_] | None = None, key: str = "source"
    ) -> list[Shard]:
        """Write rows as shards: those that are ``kept``, of shape (rows,), or all."""
        writer, cleaner, first = self.writer(place, key), Cleaner(self.config.clean, self.kind), 0
        for rows in batches:
            inputs = [cleaner.convert(item) for item in self.kind.written(rows, self.config)]
            labels = self.kind.labels(rows, self.config) or [""] * len(rows)
            chosen = [row for row in range(len(rows)) if kept is None or kept[first + row]]
            first += len(rows)
            writer.add([inputs[row] for row in chosen], [labels[row] for row in chosen])
        return writer.close()
