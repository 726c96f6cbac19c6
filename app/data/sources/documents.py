"""Documents of language modelling: text files and rows of tables."""

from app.config import ColumnsConfig
from app.data.sources.cells import Column, Columns
from app.data.sources.formats.base import DOCUMENTS
from app.data.sources.labelled import INPUT, group_columns


def document_columns(config: ColumnsConfig, group: str | None = None) -> Columns:
    """Return the columns of documents that lie in tables. ``group``: the column of the group."""
    return Columns(DOCUMENTS, (Column(INPUT, config.input, "text"), *group_columns(group)))
