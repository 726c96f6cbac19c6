"""Documents to model: text files and rows of tables, each whole, read and cleaned before the split."""

from collections import Counter
from collections.abc import Iterable, Iterator

from pydantic import BaseModel
from upath import UPath

from app.config import CleanConfig, DataConfig
from app.data.builtin import BUILTIN_DOCUMENTS
from app.data.sources import TABLE_SUFFIXES, find_builtin, open_source


class DocumentsReport(BaseModel):
    """How many documents came, stayed and went, by the reason why they went."""

    given: int
    not_text: int = 0
    empty: int = 0
    duplicate: int = 0
    kept: int

    def __str__(self) -> str:
        reasons = [
            f"{count:,} {reason}"
            for count, reason in (
                (self.not_text, "not text in UTF-8"),
                (self.empty, "empty"),
                (self.duplicate, "exact duplicates"),
            )
            if count
        ]
        return f"{self.given:,} documents, {self.kept:,} kept; dropped: {', '.join(reasons) or 'none'}"


def load_documents(config: DataConfig) -> tuple[list[str], DocumentsReport]:
    """Read and clean every document of ``config.source``, in the order of their names.

    Raises:
        DataError: no such source, or a table that cannot be read.
    """
    return clean_documents(_read(config), config.clean)


def clean_documents(contents: Iterable[bytes | str], config: CleanConfig) -> tuple[list[str], DocumentsReport]:
    """Drop what is not text, empty or there already; what stays is not changed."""
    kept: list[str] = []
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    for content in contents:
        counts["given"] += 1
        text = _decode(content)
        if text is None:
            counts["not_text"] += 1
        elif not text.strip() and config.drop_empty:
            counts["empty"] += 1
        elif text in seen and config.deduplicate:
            counts["duplicate"] += 1
        else:
            seen.add(text)
            kept.append(text)
    return kept, DocumentsReport(**{"given": 0, **counts}, kept=len(kept))


def _decode(content: bytes | str) -> str | None:
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _read(config: DataConfig) -> Iterator[bytes | str]:
    if (builtin := find_builtin(config.source, BUILTIN_DOCUMENTS)) is not None:
        yield from builtin()
        return
    root = open_source(config)
    for path in _files(root) if root.is_dir() else [root]:
        if path.suffix in TABLE_SUFFIXES:
            from app.data.tables import read_table

            yield from read_table(path, {"input": config.columns.input})[0]
        else:
            yield path.read_bytes()


def _files(root: UPath) -> list[UPath]:
    """Every file below ``root`` that neither is hidden nor lies in a hidden folder."""
    depth = len(root.parts)
    files = [path for path in root.rglob("*") if path.is_file()]
    return sorted((path for path in files if not any(part[0] == "." for part in path.parts[depth:])), key=str)
