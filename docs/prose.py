"""Measure the prose of Markdown pages, and fail where sentences are too long: python docs/prose.py [PAGE]..."""

import re
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
MAX_MEDIAN_WORDS, MAX_P90_WORDS, MAX_SEMICOLONS = 15, 28, 5.0
_MIN_WORDS = 3  # anything shorter is a fragment
_MIN_SENTENCES = 6  # fewer say nothing about a page
_SHOWN = 5


@dataclass(frozen=True)
class Prose:
    """The sentences of one or more pages."""

    name: str
    sentences: tuple[str, ...]

    @property
    def words(self) -> list[int]:
        """The number of words of each sentence, in ascending order."""
        return sorted(len(sentence.split()) for sentence in self.sentences)

    @property
    def median(self) -> float:
        return statistics.median(self.words)

    @property
    def p90(self) -> int:
        """The 90th percentile of the words of a sentence."""
        return self.words[int(0.9 * (len(self.words) - 1))]

    @property
    def semicolons(self) -> float:
        """Semicolons per 100 sentences."""
        return 100 * sum(sentence.count(";") for sentence in self.sentences) / len(self.sentences)

    @property
    def is_readable(self) -> bool:
        return self.median <= MAX_MEDIAN_WORDS and self.p90 <= MAX_P90_WORDS and self.semicolons <= MAX_SEMICOLONS

    def __str__(self) -> str:
        return f"{self.name:44} {len(self.sentences):9} {self.median:6.1f} {self.p90:5} {self.semicolons:11.1f}"


def sentences(markdown: str) -> list[str]:
    """Return the sentences of a page, without code blocks, tables, headings, directives and the targets of links.

    A sentence ends at a full stop, question mark or exclamation mark before white space. A colon before a code block
    and an item of a list without such a mark do not end one.
    """
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    texts = [
        "".join(" " if child.type == "softbreak" else child.content for child in token.children or [])
        for before, token in pairwise(tokens)
        if before.type == "paragraph_open"
    ]
    text = " ".join(text for text in texts if not re.fullmatch(r"\([\w-]+\)=", text))
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if len(sentence.split()) >= _MIN_WORDS]


def default_pages() -> list[Path]:
    """Return the README and all pages of the site except copies of the benchmarks' results."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(page for page in pages if page.relative_to(ROOT).parts[1] != "benchmarks")]


def measure(pages: list[Path]) -> list[Prose]:
    """Return the prose of each page that has enough of it, and of all of them together as the last item."""
    measured = [
        Prose(str(page.relative_to(ROOT)), tuple(sentences(page.read_text(encoding="utf-8")))) for page in pages
    ]
    total = Prose("all pages", tuple(sentence for prose in measured for sentence in prose.sentences))
    return [*(prose for prose in measured if len(prose.sentences) >= _MIN_SENTENCES), total]


def main(pages: list[Path]) -> int:
    """Print the total, and each page that exceeds a limit with its longest sentences. Return the exit code."""
    measured = measure(pages)
    failed = [prose for prose in measured if not prose.is_readable]
    print(f"{'prose':44} sentences median  90 % ; per 100")
    for prose in [*failed, *measured[-1:]]:
        print(prose)
        if prose in failed:
            for sentence in sorted(prose.sentences, key=lambda sentence: -len(sentence.split()))[:_SHOWN]:
                print(f"    {len(sentence.split()):3}  {sentence}")
    if failed:
        print(
            f"expected at most {MAX_MEDIAN_WORDS} words in the median sentence, {MAX_P90_WORDS} in 90 % of them and "
            f"{MAX_SEMICOLONS:g} semicolons per 100: split the sentences above",
            file=sys.stderr,
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main([Path(page).resolve() for page in sys.argv[1:]] or default_pages()))
