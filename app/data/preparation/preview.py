"""Checks of the first rows of sources on this machine, before a job is sent."""

from collections.abc import Iterator, Sequence
from itertools import islice

from app.best_effort import warn
from app.config import DataConfig
from app.data.examples import Input, in_words
from app.data.kinds import resolve_kinds
from app.data.preparation.samples import SampleKind
from app.data.sources.cells import Rows
from app.data.sources.formats import SourceFile
from app.data.sources.formats.builtin import TEST_KEY
from app.data.sources.labelled import kinds_of
from app.data.sources.source import Source
from app.data.sources.units import list_files, read_files
from app.errors import DataError

_FILES = 8
"""Files of a source that are checked."""
_INPUTS = 32
"""Inputs of each file that are decoded. If none can be read, all of the file's first part are."""


def require_readable(config: DataConfig, kind: SampleKind) -> None:
    """Read the first rows of a few files of each source on this machine, as preparation will.

    Raises:
        DataError: a source does not exist or lacks a column, or a row or none of the inputs of all files can be read.
    """
    for section, source in _sources(config):
        if source.uri.startswith("builtin:"):
            list_files(source, kind.contents)
        elif "://" not in source.uri:
            _check(section, source, kind)


def first_input(config: DataConfig, kind: SampleKind) -> Input | None:
    """Return the first input of a source that can be read; None if none can. Raises DataError as above."""
    source = Source(config.each_source()[0].source)
    files = list_files(source, kind.contents)
    named = _resolved(config.each_source()[0], files, kind)
    for rows in read_files(files[:_FILES], kind.columns(named)):
        for item in _inputs(rows, named, kind):
            if item:
                return item
    return None


def _inputs(rows: Rows, config: DataConfig, kind: SampleKind) -> Iterator[Input | None]:
    """Yield the inputs of rows. The kinds of table columns are those in these rows."""
    kinds = kinds_of(rows, kind.columns(config))
    known = config.model_copy(update={"columns": resolve_kinds(kinds, config.columns)})
    return kind.inputs(rows, known, verify=True)


def _resolved(config: DataConfig, files: Sequence[SourceFile], kind: SampleKind) -> DataConfig:
    return config.model_copy(update={"columns": kind.resolve(files, config.columns, config.group_column)})


def _sources(config: DataConfig) -> Iterator[tuple[DataConfig, Source]]:
    for section in config.each_source():
        yield section, Source(section.source)
    if config.test_source is not None:
        yield config, Source(config.test_source, TEST_KEY)


def _check(config: DataConfig, source: Source, kind: SampleKind) -> None:
    files = list_files(source, kind.contents)
    named, inputs, is_whole = _resolved(config, files, kind), list[Input | None](), len(files) <= _FILES
    for file in _sample_of(files):
        parts = read_files([file], kind.columns(named))
        for rows in islice(parts, 1):
            items = _inputs(rows, named, kind)
            found = list(islice(items, _INPUTS))
            if all(item is None for item in found):
                found += items  # others may be right
            inputs += found
            kind.labels(rows, named)
            is_whole = is_whole and len(rows) <= len(found) and next(parts, None) is None
    if not inputs and len(files) <= _FILES:
        raise DataError(f"{source} has no examples: give a source that has some").of("source.empty", source.key)
    if inputs and all(item is None for item in inputs):
        told = (
            f"{source}: all {len(inputs):,} inputs that were looked at are left out ({in_words(kind.unread)}), such as "
            f"those of {files[0].path!r}: repair or convert them"
        )
        if is_whole:
            raise DataError(told).of("rows.unreadable", source.key)
        warn(told)  # preparation counts all


def _sample_of(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Return a few files, evenly spaced: files of one class are next to each other."""
    if len(files) <= _FILES:
        return list(files)
    return [files[round(number * (len(files) - 1) / (_FILES - 1))] for number in range(_FILES)]
