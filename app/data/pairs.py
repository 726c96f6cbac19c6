"""Data of sentence embeddings: pairs of texts that belong together, cleaned and split."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from app.config import DataConfig
from app.data.builtin import BUILTIN_PAIRS
from app.data.examples import CleaningReport, Reason, refuse
from app.data.prepared import TRAIN, Batch, KeptData, KeptSplit
from app.data.processor import Processor, fit_processor
from app.data.sources.source import Source, find_builtin
from app.data.targets import Outputs
from app.data.vectors import Vectors
from app.errors import DataError

if TYPE_CHECKING:  # it imports pyarrow
    from app.data.sources.cells import Rows

Pair = tuple[str, str]
"""An anchor, such as a question, and its positive, such as the answer."""

MAX_HELD_OUT = 2000
"""Pairs of a held-out split at most. Each is compared with all others of it."""


@dataclass(frozen=True)
class _Pairs(KeptSplit):
    pairs: Sequence[Pair]
    processor: Processor

    @property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """``anchor`` and ``positive``."""
        anchors, positives = zip(*self.pairs, strict=True)
        return {"anchor": anchors, "positive": positives}

    def content(self) -> Iterator[bytes]:
        """Yield each pair as JSON."""
        for pair in self.pairs:
            yield json.dumps(pair).encode()


@dataclass(frozen=True)
class PairDataset(_Pairs):
    """Pairs to learn from. A batch of n pairs has 2 n rows of inputs: the anchors, then their positives.

    Its targets are int64 of shape (pairs, 2): numbers of the anchor and of the positive, equal for equal texts.
    """

    def __len__(self) -> int:
        return len(self.pairs)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of characters of the longer text of each pair, of shape (pairs,)."""
        return np.array([max(map(len, pair)) for pair in self.pairs], np.int64)

    @cached_property
    def _numbers(self) -> NDArray[np.int64]:
        known: dict[str, int] = {}
        return np.array([[known.setdefault(text, len(known)) for text in pair] for pair in self.pairs], np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        texts = [self.pairs[index][side] for side in (0, 1) for index in indices]
        return Batch(self.processor.encode(texts), self._numbers[list(indices)])


@dataclass(frozen=True)
class HeldOutTexts(_Pairs):
    """Both texts of each held-out pair, as one row each: an anchor, its positive, the next anchor.

    The targets of a row are its index and the number of rows, int64 of shape (rows, 2). By them vectors of all batches
    and ranks are put together.
    """

    @cached_property
    def texts(self) -> list[str]:
        """All texts, in the order of the rows."""
        return [text for pair in self.pairs for text in pair]

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of characters of each text, of shape (rows,)."""
        return np.array([len(text) for text in self.texts], np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        inputs = self.processor.encode([self.texts[index] for index in indices])
        return Batch(inputs, np.array([(index, len(self)) for index in indices], np.int64))


@dataclass(frozen=True)
class PairData(KeptData):
    """Pairs of texts that belong together, and the size of the model's vectors."""

    train: PairDataset
    validation: HeldOutTexts
    targets: Vectors
    test: HeldOutTexts | None = None

    @classmethod
    def open_split(
        cls,
        name: str,
        columns: Mapping[str, list[Any]],
        processor: Processor,
        targets: Outputs,  # noqa: ARG003
    ) -> PairDataset | HeldOutTexts:
        pairs = list(zip(columns["anchor"], columns["positive"], strict=True))
        return PairDataset(pairs, processor) if name == TRAIN else HeldOutTexts(pairs, processor)

    @property
    def rows(self) -> Mapping[str, int]:
        """The pairs of each split."""
        held_out = {name: rows // 2 for name, rows in super().rows.items()}
        return held_out | {TRAIN: len(self.train)}


def prepare(
    config: DataConfig, processor_type: type[Processor], targets: Vectors, pretrained: str | None = None
) -> PairData:
    """Load, clean and split pairs, and fit the processor on the texts to learn from. Equal configurations, equal data.

    No text of a held-out pair is in another pair, so exactly one positive is right, and none was learned.

    Raises:
        DataError: the source cannot be read, or has too few pairs.
    """
    pairs, report = _clean(_read(Source(config.source), config), config)
    test: list[Pair] | None = None
    if config.test_source is not None:
        source = Source(config.test_source, "data.test_source")
        whole = _clean(_read(source, config), config)[0]
        _, test = _hold_out(whole, len(whole), config.seed, source)
        tested = {text for pair in test for text in pair}
        kept = [pair for pair in pairs if not tested.intersection(pair)]
        report.dropped["in_test"] = len(pairs) - len(kept)
        report, pairs = report.model_copy(update={"kept": len(kept)}), kept
    source = Source(config.source)
    train, validation = _hold_out(pairs, round(config.validation_fraction * len(pairs)), config.seed, source)
    if config.test_fraction is not None:
        train, test = _hold_out(train, round(config.test_fraction * len(pairs)), config.seed, source)
    if not train:
        raise DataError(f"{source} has {len(pairs)} pairs, and none is left to learn from: give more pairs")
    processor = fit_processor(processor_type, [text for pair in train for text in pair], config, pretrained)
    return PairData(
        PairDataset(train, processor),
        HeldOutTexts(validation, processor),
        targets,
        processor,
        report,
        HeldOutTexts(test, processor) if test else None,
    )


def _read(source: Source, config: DataConfig) -> list[Pair]:
    """Return all pairs of a source."""
    if (builtin := find_builtin(source, BUILTIN_PAIRS)) is not None:
        return list(builtin())
    from app.data.sources.cells import Column, Columns  # an endpoint reads no sources
    from app.data.sources.units import read_source

    names = {"data.columns.anchor": config.columns.anchor, "data.columns.positive": config.columns.positive}
    columns = Columns("row", tuple(Column(key, name, "text") for key, name in names.items()))
    return [pair for rows in read_source(source, columns) for pair in _pairs_of(rows)]


def _pairs_of(rows: "Rows") -> Iterator[Pair]:
    for number, pair in enumerate(zip(*(cells.to_pylist() for cells in rows.cells.values()), strict=True)):
        if None in pair:
            raise DataError(f"{rows.place(number)}: a text is not UTF-8: repair or remove it")
        yield pair


def _clean(given: Sequence[Pair], config: DataConfig) -> tuple[list[Pair], CleaningReport]:
    """Drop pairs with an empty text, two equal texts or a length that is refused, and all but one of equal pairs."""
    dropped: Counter[Reason] = Counter()
    kept: dict[Pair, None] = {}
    for anchor, positive in given:
        pair = anchor.strip(), positive.strip()
        if not all(pair):
            dropped["empty"] += 1
        elif pair[0] == pair[1] or (pair in kept and config.clean.deduplicate is not False):
            dropped["duplicate"] += 1
        elif reasons := [reason for text in pair if (reason := refuse(text, config.clean))]:
            dropped[reasons[0]] += 1
        else:
            kept[pair] = None
    report = CleaningReport(what="pairs", given=len(given), kept=len(kept), dropped=dict(dropped))
    return list(kept), report


def _hold_out(pairs: Sequence[Pair], count: int, seed: int, source: Source) -> tuple[list[Pair], list[Pair]]:
    """Split off at most ``count`` pairs, by chance, of those whose texts are in no other pair.

    Raises:
        DataError: there are fewer than two such pairs.
    """
    uses = Counter(text for pair in pairs for text in pair)
    alone = [index for index, pair in enumerate(pairs) if all(uses[text] == 1 for text in pair)]
    # NumPy takes no negative seeds.
    drawn = np.random.default_rng(seed % 2**64).permutation(alone)[: min(max(count, 2), MAX_HELD_OUT)]
    if len(drawn) < 2:
        raise DataError(
            f"{source} has {len(pairs)} pairs, of which {len(alone)} have texts that are in no other pair: held-out "
            "pairs are of these, and at least two are needed; give more pairs"
        )
    held_out = {int(index) for index in drawn}
    rest = [pair for index, pair in enumerate(pairs) if index not in held_out]
    return rest, [pairs[index] for index in sorted(held_out)]
