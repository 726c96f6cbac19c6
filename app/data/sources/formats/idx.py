"""IDX files in a folder, as a source: the files of pictures and of labels that MNIST has."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar

import pyarrow as pa
from upath import UPath

from app.data.idx import TEST_FILES, TRAIN_FILES, find_idx_files, read_idx_folder
from app.data.sources.cells import Columns, Rows, rows_from
from app.data.sources.formats.base import Format, Piece, SourceFile
from app.data.sources.source import Source
from app.storage import to_path, version_of


class Idx(Format):
    """A file of pictures, with the file of their labels beside it."""

    name, suffixes = "idx", ()
    has_columns: ClassVar[bool] = False

    def cut(self, file: SourceFile, size: int) -> Iterator[Piece]:
        """Yield the pictures. The file of the labels is read with them."""
        if _stem(file.path) in (TRAIN_FILES.images, TEST_FILES.images):
            yield from super().cut(file, size)

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        for piece in pieces:
            path = to_path(piece.path)
            files = TRAIN_FILES if _stem(piece.path) == TRAIN_FILES.images else TEST_FILES
            examples = read_idx_folder(path.parent, files)
            cells = {columns.content.key: pa.array(examples.inputs, pa.binary())}
            if columns.label:
                cells[columns.label.key] = pa.array(examples.labels, pa.string())
            yield Rows(cells, rows_from(piece.path, 1))


def find_idx(source: Source, folder: UPath, files: Sequence[tuple[UPath, Mapping[str, Any]]]) -> list[SourceFile]:
    """Return the files of pictures and labels of a folder; none if it has neither.

    ``data.test_source`` reads those of the test set. Raises DataError if one of them is missing.
    """
    names = TEST_FILES if source.key == "data.test_source" else TRAIN_FILES
    paths = find_idx_files(folder, names)
    entries = {str(path): info for path, info in files}
    return [
        SourceFile(str(path), Idx.name, int(entries[str(path)]["size"]), str(version_of(entries[str(path)])))
        for path in paths
    ]


def _stem(path: str) -> str:
    return PurePosixPath(path).name.removesuffix(".gz")
