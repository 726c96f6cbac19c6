"""What the outputs of a token classifier mean: for each word, whether an entity of a type begins or goes on there."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from upath import UPath

from app.config import DataConfig
from app.data.examples import Input
from app.data.prepared import IGNORED, Batch
from app.data.processor import Processor
from app.data.targets import Answer, LabelRule, indices_of, softmax
from app.data.text import TextProcessor
from app.errors import DataError
from app.storage import write_atomically

TAGS_FILE = "tags.json"
OUTSIDE = 0
"""The class of a word in no entity. Type k has the classes 2 k + 1, where an entity begins, and 2 k + 2, inside it."""

WordRule = Literal["spaces", "letters"]
_WORDS: dict[WordRule, re.Pattern[str]] = {"spaces": re.compile(r"\S+"), "letters": re.compile(r"\w+|[^\w\s]")}


class Word(NamedTuple):
    """The place of a word in its text."""

    start: int
    end: int


class Entity(BaseModel):
    """Words of a text that belong together."""

    label: str
    start: int
    end: int
    """In characters, the end exclusive."""
    text: str
    score: float
    """Mean probability that the model gives to the words' classes."""


class _Stored(BaseModel):
    types: list[str]
    words: WordRule


def _distinct(label: str) -> str:
    """Return a label with each of its tags once."""
    return json.dumps(sorted(set(json.loads(label))), ensure_ascii=False)


def _beginning(kind: str) -> str:
    return json.dumps([f"B-{kind}"], ensure_ascii=False)


@dataclass(frozen=True)
class Tags:
    """Each token has a logit for each class, of shape (rows, length, classes). Only a word's first token counts.

    A label is a list of the tags of a text's words, as JSON: O, B-TYPE or I-TYPE. Its value has their classes.
    """

    rule: ClassVar[LabelRule] = LabelRule("nested", agree=True, kept_as="classes", counted=_distinct, named=_beginning)
    types: list[str]
    words: WordRule
    """How a text is split into words: at white space, or also between letters and other characters."""

    @property
    def labels(self) -> list[str]:
        """The names of the classes: O, then B-TYPE and I-TYPE of each type."""
        return ["O", *(f"{prefix}-{kind}" for kind in self.types for prefix in "BI")]

    @property
    def num_outputs(self) -> int:
        return 1 + 2 * len(self.types)

    @property
    def facts(self) -> Mapping[str, int]:
        """The number of classes, and that each token has one."""
        return {"num_labels": self.num_outputs, "per_token": 1}

    def words_of(self, text: str) -> list[Word]:
        """Return the words of a text."""
        return [Word(*match.span()) for match in _WORDS[self.words].finditer(text)]

    @classmethod
    def fit(cls, labels: Mapping[str, int], config: DataConfig) -> Self:
        rules: set[WordRule] = {"letters" if one.columns.tokens is None else "spaces" for one in config.each_source()}
        if len(rules) > 1:
            raise DataError(
                "data.sources have tokens in some sources and spans in others, whose words differ: give one kind"
            ).of("sources.differ", "data.sources")
        types = sorted({tag[2:] for label in labels for tag in json.loads(label) if tag != "O"})
        if not types:
            raise DataError(
                f"data.source {config.source!r} has no word in an entity: expected tags other than O, or spans, in "
                "some rows"
            ).of("tags.none", "data.source")
        return cls(types, rules.pop())

    def read(self, labels: Sequence[str], config: DataConfig, key: str = "source") -> list[list[int]]:
        """Return the class of each word."""
        return [indices_of(self.labels, json.loads(label), config, key) for label in labels]

    def fitted(self, values: Sequence[list[int]], counts: Sequence[int]) -> Self:  # noqa: ARG002
        return self

    def batch(self, values: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """Return the class of each word, of shape (rows, words); ``IGNORED`` after the last one of a row."""
        classes = np.full((len(values), max(map(len, values))), IGNORED, np.int64)
        for row, value in enumerate(values):
            classes[row, : len(value)] = value
        return classes

    def collate(self, processor: Processor, inputs: Sequence[Input], values: Sequence[Sequence[int]]) -> Batch:
        """Return encoded texts. The targets have the class of a word at its first token, else ``IGNORED``."""
        tensors, classes = processor.encode(inputs), self.batch(values)
        targets = np.full(tensors["input_ids"].shape, IGNORED, np.int64)
        for row, tokens in enumerate(self._first_tokens(processor, inputs)):
            read = [(word, token) for word, token in enumerate(tokens) if token is not None]
            words, places = np.array(read, np.int64).reshape(-1, 2).T
            targets[row, places] = classes[row, words]
        return Batch(tensors, targets)

    def count(self, processor: Processor, inputs: Iterable[Input]) -> NDArray[np.int64]:
        """Return the number of words of each text that the model reads, of shape (texts,)."""
        found = self._first_tokens(processor, inputs)
        return np.array([sum(token is not None for token in tokens) for tokens in found], np.int64)

    def read_words(self, processor: Processor, inputs: Iterable[Input]) -> Iterator[list[str]]:
        """Yield the words of each text that the model reads. ``collate`` gives each of these a target."""
        for text, tokens in zip(map(str, inputs), self._first_tokens(processor, inputs), strict=True):
            words = zip(self.words_of(text), tokens, strict=True)
            yield [text[word.start : word.end] for word, token in words if token is not None]

    def _first_tokens(self, processor: Processor, inputs: Iterable[Input]) -> Iterator[list[int | None]]:
        assert isinstance(processor, TextProcessor)
        for text in map(str, inputs):
            yield first_tokens(self.words_of(text), processor.offsets(text))

    def decode(self, outputs: NDArray[np.float32]) -> list[Answer]:
        """Return the class of each token, also of those that do not begin a word."""
        labels = self.labels
        return [{"tags": [labels[tag] for tag in row]} for row in outputs.argmax(-1)]

    def entities(self, text: str, logits: NDArray[np.float32], offsets: Sequence[tuple[int, int]]) -> Answer:
        """Return the entities of a text, and where it was cut if it is longer than the model reads.

        Args:
            logits: of each token, of shape (length, classes).
            offsets: the characters of each token.
        """
        words = self.words_of(text)
        tokens = first_tokens(words, offsets)
        read = [(word, token) for word, token in zip(words, tokens, strict=True) if token is not None]
        probabilities = softmax(logits[[token for _, token in read]]) if read else np.zeros((0, self.num_outputs))
        tags = probabilities.argmax(-1).tolist()
        found = [
            Entity(
                label=self.types[(tags[first] - 1) // 2],
                start=read[first][0].start,
                end=read[last][0].end,
                text=text[read[first][0].start : read[last][0].end],
                score=round(float(probabilities[first : last + 1].max(-1).mean()), 6),
            )
            for first, last in spans_of(tags)
        ]
        answer: dict[str, object] = {"entities": [entity.model_dump() for entity in found]}
        unread = [word.start for word in words if word.start >= max((end for _, end in offsets), default=0)]
        return answer | ({"cut_at": unread[0]} if unread else {})

    def save(self, folder: UPath) -> None:
        write_atomically(folder / TAGS_FILE, _Stored(types=self.types, words=self.words).model_dump_json().encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        stored = _Stored.model_validate_json((folder / TAGS_FILE).read_bytes())
        return cls(stored.types, stored.words)


def spans_of(tags: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last word of each entity.

    An entity also begins where a class inside a type follows a word of another type, as in conlleval and seqeval.
    """
    first: int | None = None
    for place, tag in enumerate([*tags, OUTSIDE]):
        goes_on = first is not None and tag % 2 == 0 and tag > 0 and (tag + 1) // 2 == (tags[first] + 1) // 2
        if first is not None and not goes_on:
            yield first, place - 1
            first = None
        if tag != OUTSIDE and not goes_on:
            first = place


def first_tokens(words: Sequence[Word], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return the first token of each word; None if it was cut off, or shares its token with the word before.

    Special tokens have no characters.
    """
    found: list[int | None] = []
    token = 0
    for word in words:
        while token < len(offsets) and (offsets[token][0] == offsets[token][1] or offsets[token][1] <= word.start):
            token += 1
        if token == len(offsets) or offsets[token][0] >= word.end:
            found.append(None)
        else:
            found.append(token)
            token += 1
    return found
