"""Formats of source files, one module each."""

from upath import UPath

from app.data.sources.formats.arrow import Arrow
from app.data.sources.formats.base import Format, Piece, SourceFile
from app.data.sources.formats.csv import Csv
from app.data.sources.formats.files import AUDIO_SUFFIXES, IMAGE_SUFFIXES, ClassFolders, TextFiles
from app.data.sources.formats.json_lines import JsonLines
from app.data.sources.formats.parquet import Parquet
from app.data.sources.formats.tar import Tar

FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Csv("csv", (".csv",), ","),
        Csv("tsv", (".tsv",), "\t"),
        JsonLines(),
        Parquet(),
        Arrow(),
        Tar(),
        ClassFolders("image", IMAGE_SUFFIXES),
        ClassFolders("audio", AUDIO_SUFFIXES),
        TextFiles(),
    )
}
"""All formats by name. The first one that reads a file is taken."""

TABLE_SUFFIXES = tuple(suffix for one in FORMATS.values() if one.has_columns for suffix in one.suffixes)


def format_of(path: UPath, contents: str) -> Format | None:
    """Return the format in which a task of these ``contents`` reads a file; None if it does not read it."""
    suffix = path.suffix.lower()
    return next((one for one in FORMATS.values() if one.reads(contents, suffix)), None)


__all__ = ["FORMATS", "IMAGE_SUFFIXES", "TABLE_SUFFIXES", "Format", "Piece", "SourceFile", "format_of"]
