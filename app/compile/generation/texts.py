"""The texts on which a language model is measured: held out from its training, or given by a person."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from app.config import ColumnsConfig
from app.data.language import Passage, TokenBlocks
from app.data.sources.cells import Column, Columns
from app.data.sources.formats.base import DOCUMENTS
from app.data.sources.labelled import INPUT, resolve_columns
from app.data.sources.source import Source
from app.data.sources.units import cut_units, list_files, read_unit
from app.data.tokenizer import LanguageTokenizer
from app.errors import CompileError
from app.tasks.judgement import spread

_MAX_TOKENS = 2**18
"""Maximum tokens on which perplexity is measured, spread evenly over the text."""
MIN_PROMPT, _MAX_PROMPT = 4, 256
_UNIT_BYTES = 2**22


def passages_of(blocks: TokenBlocks, end: int) -> list[Passage]:
    """Return the passages of a split. For a large split, these are evenly spread blocks."""
    chosen = spread(len(blocks), max(1, _MAX_TOKENS // blocks.block_length))
    return list(blocks.passages(chosen, end))


def passages_in(path: Path, tokenizer: LanguageTokenizer, length: int) -> list[Passage]:
    """Return the passages of a person's texts, each within one document.

    Args:
        path: a table with a column of texts, a text file, or a folder of them.
        length: maximum tokens of a passage.

    Raises:
        DataError: the file cannot be read.
        CompileError: it has no text.
    """
    passages: list[Passage] = []
    left = _MAX_TOKENS
    for number, text in enumerate(_texts_in(path)):
        tokens = np.array(tokenizer.encode(text)[: left + 1], np.int64)
        for start in range(0, len(tokens) - 1, length):
            part = tokens[start : start + length + 1]
            passages.append(Passage(part[:-1], part[1:], np.full(len(part) - 1, number)))
        left -= len(tokens)
        if left <= 0:
            break
    if not passages:
        raise CompileError(f"--samples {str(path)!r} has no text of two tokens or more: give longer texts").of(
            "generation.samples"
        )
    return _renumbered(passages)


def _renumbered(passages: list[Passage]) -> list[Passage]:
    """Number the documents from 0 without gaps."""
    numbers = {number: place for place, number in enumerate(dict.fromkeys(int(one.documents[0]) for one in passages))}
    return [
        Passage(one.tokens, one.targets, np.full_like(one.documents, numbers[int(one.documents[0])]))
        for one in passages
    ]


def _texts_in(path: Path) -> Iterator[str]:
    files = list_files(Source(str(path), "--samples"), DOCUMENTS)
    columns = resolve_columns(files, ColumnsConfig(), DOCUMENTS)
    read = Columns(DOCUMENTS, (Column(INPUT, columns.input, "text"),))
    for unit in cut_units(files, _UNIT_BYTES):
        for rows in read_unit(unit, read):
            yield from (text for text in rows.cells[INPUT].to_pylist() if text)


def prompts_of(
    passages: Sequence[Passage], count: int, length: int, shortest: int = MIN_PROMPT
) -> list[tuple[int, ...]]:
    """Return the beginnings of evenly spread passages, with different lengths up to ``length``."""
    chosen = spread(len(passages), count)
    sizes = spread_sizes(len(chosen), min(_MAX_PROMPT, length), shortest)
    return [tuple(passages[place].tokens[:size].tolist()) for place, size in zip(chosen, sizes, strict=True)]


def random_prompts(vocabulary: int, count: int, length: int, shortest: int = MIN_PROMPT) -> list[tuple[int, ...]]:
    """Return prompts of random tokens, for a model without texts."""
    generator = np.random.default_rng(0)  # seeded, so that it can be repeated
    sizes = spread_sizes(count, min(_MAX_PROMPT, length), shortest)
    return [tuple(generator.integers(0, vocabulary, size).tolist()) for size in sizes]


def spread_sizes(count: int, largest: int, smallest: int) -> list[int]:
    """Return ``count`` lengths, from the shortest prompt to the longest."""
    sizes: NDArray[np.int64] = np.linspace(min(smallest, largest), largest, count).round().astype(np.int64)
    result: list[int] = sizes.tolist()
    return result


def documents_in(passages: Iterable[Passage]) -> int:
    """Return the number of documents."""
    return 1 + max(int(passage.documents[-1]) for passage in passages)
