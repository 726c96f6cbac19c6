"""Preparation in bounded memory, whatever the rows are, with the same result as without a bound."""

import random
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from app.data.preparation import signatures
from app.data.preparation.signatures import signatures_of
from tests.preparing import WORDS


def peak_of(work: Callable[[], object]) -> int:
    """Peak bytes that some work allocates."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def long_texts() -> list[str]:
    """A text with spaces and one without, each of over 300,000 characters."""
    source = random.Random(0)
    words = " ".join(f"{source.choice(WORDS)}{source.randrange(3000)}" for _ in range(40_000))
    return [words, "".join(chr(0x4E00 + source.randrange(5000)) for _ in range(300_000))]


def test_the_signature_of_a_text_does_not_depend_on_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a short text that comes first", *long_texts(), None, "a short text that comes last"]
    whole = signatures_of(texts)
    monkeypatch.setattr(signatures, "_PIECE_UNITS", 1000)
    assert np.array_equal(signatures_of(texts), whole)


def test_the_signature_of_a_long_text_takes_little_memory() -> None:
    for text in (words * 8 for words in long_texts()):
        assert peak_of(lambda text=text: signatures_of([text])) < 16 * len(text)  # type: ignore[misc]
