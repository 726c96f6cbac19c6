"""Sources of labelled examples: built-in sets, tables, image folders and IDX files."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from upath import UPath

from app.config import DataConfig
from app.data.builtin import BUILTIN, BUILTIN_TEST
from app.data.examples import Examples
from app.data.idx import holds_idx, read_idx_folder
from app.errors import DataError
from app.storage import to_path
from app.suggestions import did_you_mean

Found = TypeVar("Found")
TABLE_SUFFIXES = (".csv", ".jsonl", ".parquet")
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


def load_examples(config: DataConfig) -> Examples:
    """Read every example of ``config.source``.

    Raises:
        DataError: no such source, a format that is not known, a column that is missing, or no rows.
    """
    examples = _read(config, BUILTIN, test=False)
    if not examples:
        raise DataError(f"data.source {config.source!r} has no examples: give a source with at least two a class")
    return examples


def load_test_examples(config: DataConfig) -> Examples:
    """Read every example of ``config.test_source``, in the formats of ``data.source``; of IDX folders, the test files.

    Raises:
        DataError: for the same reasons as ``load_examples``.
    """
    try:
        examples = _read(config.model_copy(update={"source": config.test_source}), BUILTIN_TEST, test=True)
    except DataError as error:
        raise DataError(str(error).replace("data.source", "data.test_source")) from error
    if not examples:
        raise DataError(f"data.test_source {config.test_source!r} has no examples: give a source that has some")
    return examples


def _read(config: DataConfig, known: Mapping[str, Callable[[], Examples]], test: bool) -> Examples:
    if (builtin := find_builtin(config.source, known)) is not None:
        return builtin()
    path = open_source(config)
    if not path.is_dir():
        return _read_examples(path, config)
    return read_idx_folder(path, test) if holds_idx(path, test) else _read_image_folder(path)


def find_builtin(source: str, known: Mapping[str, Found]) -> Found | None:
    """What ``builtin:NAME`` names among the ``known``; None for any other source. Raises DataError."""
    scheme, _, name = source.partition(":")
    if scheme != "builtin":
        return None
    if name not in known:
        raise DataError(f"data.source {source!r}: no built-in set {name!r} for this task; {did_you_mean(name, known)}")
    return known[name]


def open_source(config: DataConfig) -> UPath:
    """The path of a source that is not built in. Raises DataError if there is nothing."""
    try:
        path = to_path(config.source).expanduser()
        found = path.exists()
    except Exception as error:  # each protocol's driver has errors of its own
        raise DataError(f"data.source {config.source!r} cannot be opened ({error}): check the URI") from error
    if not found:
        raise DataError(
            f"data.source {config.source!r} does not exist: give builtin:NAME, or the path or URI of a csv, jsonl "
            "or parquet file or of a folder"
        )
    return path


def _read_examples(path: UPath, config: DataConfig) -> Examples:
    """A table with a column of texts and one of labels."""
    from app.data.tables import read_table

    if path.suffix not in TABLE_SUFFIXES:
        raise DataError(
            f"data.source {str(path)!r} ends in {path.suffix!r}: expected {', '.join(TABLE_SUFFIXES)} or a folder"
        )
    texts, labels = read_table(path, {"input": config.columns.input, "label": config.columns.label})
    return Examples("text", list(texts), labels)


def _read_image_folder(root: UPath) -> Examples:
    """One subfolder a class, as in torchvision's ImageFolder; an input is the content of a file."""
    found = [
        (file.read_bytes(), folder.name)
        for folder in sorted(root.iterdir(), key=str)
        if folder.is_dir()
        for file in sorted(folder.iterdir(), key=str)
        if file.suffix.lower() in IMAGE_SUFFIXES
    ]
    return Examples("image", [content for content, _ in found], [label for _, label in found])
