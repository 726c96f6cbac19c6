"""Texts whose words are tagged."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.data.tags import OUTSIDE, Tags, Word
from app.errors import DataError

Span = tuple[int, int, str]
"""First character, end and label."""


@dataclass(frozen=True)
class TaggedText:
    """A text with its words, and for each the type of its entity, or None, and whether the entity begins there."""

    text: str
    words: Sequence[tuple[int, int]]
    tags: Sequence[tuple[str, bool] | None]

    @property
    def types(self) -> set[str]:
        """The types of its entities."""
        return {tag[0] for tag in self.tags if tag}

    def numbered(self, targets: Tags) -> tuple[str, list[Word]]:
        """Return the text, and its words with their classes. Raises DataError for a type that is not known."""
        number = {kind: index for index, kind in enumerate(targets.types)}
        if unknown := sorted(self.types - set(targets.types)):
            raise DataError(
                f"data.test_source has the label {unknown[0]!r}, but data.source has only {', '.join(targets.types)}: "
                "give a test source with these labels only"
            )
        classes = [OUTSIDE if tag is None else 2 * number[tag[0]] + 1 + (not tag[1]) for tag in self.tags]
        return self.text, [Word(*place, tag) for place, tag in zip(self.words, classes, strict=True)]


def tagged_by_spans(text: str, spans: Sequence[Span], where: str) -> TaggedText:
    """Return a text whose words are tagged by the spans that they lie in.

    Raises:
        DataError: a span is not in the text, has no word, or has a word of another one.
    """
    words = [(word.start, word.end) for word in Tags([], "letters").words_of(text)]
    tags: list[tuple[str, bool] | None] = [None] * len(words)
    for start, end, label in spans:
        if not 0 <= start < end <= len(text):
            raise DataError(f"{where} has a span from {start} to {end}: the text has {len(text)} characters")
        inside = [place for place, (first, last) in enumerate(words) if first < end and last > start]
        if not inside or any(tags[place] for place in inside):
            problem = "no word" if not inside else "a word of another span"
            raise DataError(f"{where}: the span from {start} to {end}, {text[start:end]!r}, has {problem}: correct it")
        for place in inside:
            tags[place] = label, place == inside[0]
    return TaggedText(text, words, tags)
