"""Measure the prose of Markdown pages, and fail if sentences are too long: python docs/prose.py [PAGE]..."""

import re
import statistics
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

DOCS = Path(__file__).parent
MAX_MEDIAN_WORDS, MAX_P90_WORDS, MAX_SEMICOLONS = 15, 28, 5.0
_FRAGMENT_WORDS = 2  # shorter than a sentence


def paragraphs(page: Path) -> Iterator[str]:
    """Yield the text of each paragraph and list item; tables, code and headings are left out."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    for before, token in pairwise(tokens):
        if before.type == "paragraph_open":
            yield "".join(
                " " if child.type == "softbreak" else "code" if child.type == "code_inline" else child.content
                for child in token.children or []
            )


def measure(texts: list[str]) -> tuple[int, float, int, float]:
    """Return the number of sentences, the median and 90th percentile of their words, and semicolons per 100."""
    sentences = [sentence for text in texts for sentence in re.split(r"(?<=[.!?])\s+", text)]
    words = sorted(count for sentence in sentences if (count := len(sentence.split())) > _FRAGMENT_WORDS)
    semicolons = sum(text.count(";") for text in texts)
    return len(words), statistics.median(words), words[int(0.9 * (len(words) - 1))], 100 * semicolons / len(words)


def main(pages: list[Path]) -> bool:
    """Print a line for each page and one for all of them. Return whether all together keep the limits."""
    print(f"{'page':34} sentences  median  90 %  semicolons per 100")
    for page in pages:
        if texts := list(paragraphs(page)):
            print(_row(str(page.relative_to(DOCS.parent)), texts))
    together = [text for page in pages for text in paragraphs(page)]
    print(_row("all", together))
    _, median, p90, semicolons = measure(together)
    return median <= MAX_MEDIAN_WORDS and p90 <= MAX_P90_WORDS and semicolons <= MAX_SEMICOLONS


def _row(name: str, texts: list[str]) -> str:
    sentences, median, p90, semicolons = measure(texts)
    return f"{name:34} {sentences:9}  {median:6.0f}  {p90:4}  {semicolons:6.1f}"


if __name__ == "__main__":
    given = [Path(page).resolve() for page in sys.argv[1:]] or sorted(DOCS.rglob("*.md"))
    if not main(given):
        sys.exit(
            f"the prose is too dense: expected at most {MAX_MEDIAN_WORDS} words in half of the sentences, "
            f"{MAX_P90_WORDS} in 90 % and {MAX_SEMICOLONS:g} semicolons per 100 sentences; shorten the longest ones"
        )
