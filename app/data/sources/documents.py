"""Documents of language modelling: text files and rows of tables, read and cleaned before the split."""

from collections import Counter
from collections.abc import Iterable, Iterator

from app.config import CleanConfig, ColumnsConfig, DataConfig
from app.data.examples import CleaningReport, Reason, refuse
from app.data.sources.cells import Column, Columns
from app.data.sources.formats.base import DOCUMENTS
from app.data.sources.labelled import GROUP, INPUT
from app.data.sources.source import Source
from app.data.sources.units import read_source


def document_columns(config: ColumnsConfig, group: str | None = None) -> Columns:
    """Return the columns of documents that lie in tables. ``group``: the column of the group."""
    groups = [] if group is None else [Column(GROUP, group, "group")]
    return Columns(DOCUMENTS, (Column(INPUT, config.input, "text"), *groups))


def load_documents(config: DataConfig, key: str = "data.source") -> tuple[list[str], list[int], CleaningReport]:
    """Read and clean every document of the recipe's sources, in the order of their names.

    The second list has the index of each document's source. ``key`` is the recipe's key of the source, for messages.

    Raises:
        DataError: the source does not exist, or a table cannot be read.
    """
    origin_of: dict[str, int] = {}

    def read_all() -> Iterator[str | None]:
        for place, one in enumerate(config.each_source()):
            for text in _read(one, key):
                if config.sources and text is not None:
                    # Cleaning keeps the first of equal documents.
                    origin_of.setdefault(text, place)
                yield text

    documents, report = clean_documents(read_all(), config.clean)
    return documents, [origin_of.get(document, 0) for document in documents], report


def clean_documents(texts: Iterable[str | None], config: CleanConfig) -> tuple[list[str], CleaningReport]:
    """Drop documents that are not text (None), empty or duplicates. The others are not changed."""
    kept: list[str] = []
    seen: set[str] = set()
    dropped: Counter[Reason] = Counter()
    for text in texts:
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


def _read(config: DataConfig, key: str) -> Iterator[str | None]:
    for rows in read_source(Source(config.source, key), document_columns(config.columns)):
        yield from rows.cells[INPUT].to_pylist()
