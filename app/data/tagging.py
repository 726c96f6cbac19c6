"""Data of token classification: texts whose words have classes, cleaned and split."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from app.config import DataConfig
from app.data.builtin import BUILTIN_SPANS
from app.data.examples import CleaningReport, Reason, refuse
from app.data.prepared import IGNORED, Batch, Columns, KeptData, KeptSplit
from app.data.processor import Processor, fit_processor
from app.data.sources.source import Source, find_builtin
from app.data.tagged_texts import TaggedText, tagged_by_spans
from app.data.tags import Tags, Word, WordRule, first_tokens
from app.data.targets import Outputs
from app.data.text import TextProcessor
from app.errors import DataError


@dataclass(frozen=True)
class TaggedDataset(KeptSplit):
    """A split. The targets are int64 of shape (batch, length): the class at a word's first token, else ``IGNORED``."""

    rows: Sequence[tuple[str, Sequence[Word]]]
    processor: TextProcessor

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of characters of each text, of shape (rows,)."""
        return np.array([len(text) for text, _ in self.rows], np.int64)

    @cached_property
    def padded_lengths(self) -> NDArray[np.int32]:
        """Tokens of each text with its padding, of shape (rows,)."""
        return self.processor.padded_lengths([text for text, _ in self.rows])

    @cached_property
    def num_targets(self) -> NDArray[np.int64]:
        """Number of words of each row that the model reads. The loss of a step is a mean over these."""
        return np.array([(self._targets(index) != IGNORED).sum() for index in range(len(self))], np.int64)

    @property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """``text``, and ``words`` with the first character, the end and the class of each."""
        return {"text": [text for text, _ in self.rows], "words": [words for _, words in self.rows]}

    def content(self) -> Iterator[bytes]:
        """Yield each row as JSON."""
        for row in self.rows:
            yield json.dumps(row).encode()

    def batch(self, indices: Sequence[int]) -> Batch:
        inputs = self.processor.encode([self.rows[index][0] for index in indices])
        targets = np.full(inputs["input_ids"].shape, IGNORED, np.int64)
        for row, index in enumerate(indices):
            found = self._targets(index)
            targets[row, : len(found)] = found
        return Batch(inputs, targets)

    def _targets(self, index: int) -> NDArray[np.int64]:
        text, words = self.rows[index]
        offsets = self.processor.offsets(text)
        targets = np.full(len(offsets), IGNORED, np.int64)
        for word, token in zip(words, first_tokens(words, offsets), strict=True):
            if token is not None:
                targets[token] = word.tag
        return targets


@dataclass(frozen=True)
class TaggedData(KeptData):
    """Texts whose words have classes."""

    train: TaggedDataset
    validation: TaggedDataset
    targets: Tags
    processor: TextProcessor
    test: TaggedDataset | None = None

    @classmethod
    def open_split(cls, name: str, columns: Columns, processor: Processor, targets: Outputs) -> TaggedDataset:  # noqa: ARG003
        assert isinstance(processor, TextProcessor)
        words = [[Word(*word) for word in given] for given in columns["words"]]
        return TaggedDataset(list(zip(columns["text"], words, strict=True)), processor)

    @property
    def summary(self) -> str:
        return f"{super().summary}; entities: {', '.join(self.targets.types)}"


def prepare(config: DataConfig, pretrained: str | None = None) -> TaggedData:
    """Load, clean and split texts, and fit the processor. Equal configurations give equal data.

    Raises:
        DataError: the source cannot be read, has too few texts, or no word of it is in an entity.
    """
    source = Source(config.source)
    given, rule = _read(source, config)
    texts, report = _clean(given, config)
    tests: list[TaggedText] = []
    if config.test_source is not None:
        tests = _clean(_read(Source(config.test_source, "data.test_source"), config)[0], config)[0]
        held_out = {text.text for text in tests}
        kept = [text for text in texts if text.text not in held_out]
        dropped: dict[Reason, int] = report.dropped | {"in_test": len(texts) - len(kept)}
        report, texts = report.model_copy(update={"kept": len(kept), "dropped": dropped}), kept
    types = sorted({kind for text in texts for kind in text.types})
    if not types:
        raise DataError(f"{source} has no word in an entity: expected tags other than O, or spans, in some rows")
    targets = Tags(types, rule)
    rows = [text.numbered(targets) for text in texts]
    order = np.random.default_rng(config.seed % 2**64).permutation(len(rows)).tolist()
    sizes = [max(1, round(share * len(rows))) for share in (config.validation_fraction, config.test_fraction or 0)]
    validation, test, train = (
        [rows[index] for index in sorted(part)]
        for part in np.split(np.array(order, int), np.cumsum([sizes[0], sizes[1] if config.test_fraction else 0]))
    )
    if not train:
        raise DataError(f"{source} has {len(rows)} texts after cleaning, and none is left to learn from: give more")
    test += [text.numbered(targets) for text in tests]
    processor = cast(TextProcessor, fit_processor(TextProcessor, [text for text, _ in train], config, pretrained))
    return TaggedData(
        TaggedDataset(train, processor),
        TaggedDataset(validation, processor),
        targets,
        processor,
        report,
        TaggedDataset(test, processor) if test else None,
    )


def _read(source: Source, config: DataConfig) -> tuple[list[TaggedText], WordRule]:
    """Return all texts of a source, and how they are split into words."""
    if (builtin := find_builtin(source, BUILTIN_SPANS)) is not None:
        return [tagged_by_spans(text, spans, str(source)) for text, spans in builtin()], "letters"
    from app.data.sources.tagged import read_tagged  # an endpoint reads no sources

    return read_tagged(source, config.columns)


def _clean(given: Sequence[TaggedText], config: DataConfig) -> tuple[list[TaggedText], CleaningReport]:
    """Drop texts without a word or of a length that is refused, and all but the first of equal texts."""
    dropped: Counter[Reason] = Counter()
    kept: dict[str, TaggedText] = {}
    for text in given:
        if not text.words:
            dropped["empty"] += 1
        elif text.text in kept:
            dropped["duplicate"] += 1
        elif reason := refuse(text.text, config.clean):
            dropped[reason] += 1
        else:
            kept[text.text] = text
    report = CleaningReport(what="texts", given=len(given), kept=len(kept), dropped=dict(dropped))
    return list(kept.values()), report
