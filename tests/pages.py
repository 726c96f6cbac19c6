"""The pages of the documentation, read as a person who pastes from them would."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.helpers import ROOT

NOT_RUN = (
    "# needs a GPU",
    "# needs a cloud",
    "# needs a cluster",
    "# needs root",
    "# needs a collector",
    "# needs a model of texts",
    "# takes minutes",
    "# runs until Ctrl-C",
)
"""The first lines of code blocks that no test runs."""
_COMMAND = re.compile(r"(rayloom|make|ray|torchrun|python|\.venv/bin/\w+) ")
_COPIES = ROOT / "docs/benchmarks"  # 'make docs' copies them there


@dataclass(frozen=True)
class Command:
    """A line of a page that a shell would run. ``mark`` says why no test runs its block; most have none."""

    page: Path
    words: tuple[str, ...]
    mark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {shlex.join(self.words)}"


def pages() -> list[Path]:
    """Return the README and the pages under ``docs``, without copies."""
    return [
        ROOT / "README.md",
        *(page for page in sorted((ROOT / "docs").rglob("*.md")) if _COPIES not in page.parents),
    ]


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Yield the code blocks in one of the languages; the language of an indented block is empty."""
    for token in MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block") and _language(token) in languages:
            yield token.content


def mark_of(block: str) -> str:
    """Return the mark with which a block begins, or an empty string."""
    return next((mark for mark in NOT_RUN if block.startswith(f"{mark}\n")), "")


def links(page: Path) -> Iterator[str]:
    """Yield the targets of the links and images of a page."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        for child in token.children or []:
            if target := child.attrGet("href") or child.attrGet("src"):
                yield str(target)


def _language(token: Token) -> str:
    return token.info.split()[0] if token.info.split() else ""


def commands() -> Iterator[Command]:
    """Yield every command in a shell block, or at the start of a line of a block without a language."""
    for page in pages():
        for block in blocks(page, "bash", ""):
            for line in block.replace("\\\n", " ").splitlines():
                if _COMMAND.match(line):
                    yield Command(page, tuple(shlex.split(line, comments=True)), mark_of(block))


def tables(page: Path) -> Iterator[list[list[str]]]:
    """Yield the tables of a page as rows of texts, without the marks of code."""
    rows: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        if token.type == "table_open":
            rows = []
        elif token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows and token.level > 2:
            rows[-1].append(token.content.replace("`", ""))
        elif token.type == "table_close":
            yield rows
            rows = []
