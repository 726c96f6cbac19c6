"""What the outputs of a token classifier mean: for each word, whether an entity of a type begins or goes on there."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from upath import UPath

from app.data.targets import Answer, softmax
from app.storage import write_atomically

TAGS_FILE = "tags.json"
OUTSIDE = 0
"""The class of a word in no entity. Type k has the classes 2 k + 1, where an entity begins, and 2 k + 2, inside it."""

WordRule = Literal["spaces", "letters"]
_WORDS: dict[WordRule, re.Pattern[str]] = {"spaces": re.compile(r"\S+"), "letters": re.compile(r"\w+|[^\w\s]")}


class Word(NamedTuple):
    """The place of a word in its text, and its class."""

    start: int
    end: int
    tag: int = OUTSIDE


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


@dataclass(frozen=True)
class Tags:
    """Each token has a logit for each class, of shape (rows, length, classes). Only a word's first token counts."""

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
