"""Documents of language modelling: text files and rows of tables, read and cleaned before the split."""

from collections import Counter
from collections.abc import Iterable, Iterator

from upath import UPath

from app.config import CleanConfig, DataConfig
from app.data.builtin import BUILTIN_DOCUMENTS
from app.data.examples import CleaningReport, Reason, refuse
from app.data.sources import TABLE_SUFFIXES, Source, find_builtin, open_source


def load_documents(config: DataConfig, key: str = "data.source") -> tuple[list[str], list[int], CleaningReport]:
    """Read and clean every document of the recipe's sources, in the order of their names.

    The second list has the index of each document's source. ``key`` is the recipe's key of the source, for messages.

    Raises:
        DataError: the source does not exist, or a table cannot be read.
    """
    origin_of: dict[str, int] = {}

    def read_all() -> Iterator[bytes | str]:
        for place, one in enumerate(config.each_source()):
            for content in _read(one, key):
                if config.sources and (text := _decode(content)) is not None:
                    # Cleaning keeps the first of equal documents.
                    origin_of.setdefault(text, place)
                yield content

    documents, report = clean_documents(read_all(), config.clean)
    return documents, [origin_of.get(document, 0) for document in documents], report


def clean_documents(contents: Iterable[bytes | str], config: CleanConfig) -> tuple[list[str], CleaningReport]:
    """Drop documents that are not text, empty or duplicates. The others are not changed."""
    kept: list[str] = []
    seen: set[str] = set()
    dropped: Counter[Reason] = Counter()
    for content in contents:
        text = _decode(content)
        if text is None:
            dropped["not_text"] += 1
        elif not text.strip() and config.drop_empty:
            dropped["empty"] += 1
        elif reason := refuse(text, config):
            dropped[reason] += 1
        elif text in seen and config.deduplicate:
            dropped["duplicate"] += 1
        else:
            seen.add(text)
            kept.append(text)
    given = len(kept) + dropped.total()
    return kept, CleaningReport(what="documents", given=given, kept=len(kept), dropped=dropped)


def _decode(content: bytes | str) -> str | None:
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _read(config: DataConfig, key: str) -> Iterator[bytes | str]:
    source = Source(config.source, key)
    if (builtin := find_builtin(source, BUILTIN_DOCUMENTS)) is not None:
        yield from builtin()
        return
    root = open_source(source)
    for path in _files(root) if root.is_dir() else [root]:
        if path.suffix in TABLE_SUFFIXES:
            from app.data.tables import read_table

            yield from read_table(path, {"input": config.columns.input})[0]
        else:
            yield path.read_bytes()


def _files(root: UPath) -> list[UPath]:
    """Return every file below ``root`` that is not hidden or in a hidden folder, sorted by path."""
    depth = len(root.parts)
    files = [path for path in root.rglob("*") if path.is_file()]
    return sorted((path for path in files if not any(part[0] == "." for part in path.parts[depth:])), key=str)
