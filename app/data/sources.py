"""Sources of labelled examples: built-in sets, tables, image folders and IDX files."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from upath import UPath

from app.conditional import map_concurrently
from app.config import ColumnsConfig, DataConfig
from app.data.builtin import BUILTIN, BUILTIN_TEST
from app.data.examples import Examples, Modality
from app.data.idx import TEST_FILES, TRAIN_FILES, IdxFiles, holds_idx, read_idx_folder
from app.errors import DataError, RayloomError
from app.import_string import did_you_mean
from app.storage import to_path

Found = TypeVar("Found")
TABLE_SUFFIXES = (".csv", ".jsonl", ".parquet", ".arrow", ".feather")
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


@dataclass(frozen=True)
class Source:
    """A source of a recipe. Its string is the key with its value, for messages."""

    uri: str
    key: str = "data.source"

    def __str__(self) -> str:
        return f"{self.key} {self.uri!r}"


def load_examples(config: DataConfig, modality: Modality = "text", key: str = "data.source") -> Examples:
    """Read every example of ``config.source``.

    Args:
        config: names the source and its columns.
        modality: how a table is read: as texts, rows or records.
        key: the key of the recipe that names the source, for messages.

    Raises:
        DataError: the source does not exist, its format is unknown, a column is missing, or there are no rows.
    """
    source = Source(config.source, key)
    examples = _read(source, BUILTIN, TRAIN_FILES, config.columns, modality)
    if not examples:
        raise DataError(f"{source} has no examples: give a source with at least two a class")
    return examples


def load_test_examples(config: DataConfig, modality: Modality = "text") -> Examples:
    """Read every example of ``config.test_source``, in the formats of ``data.source``. IDX folders have test files.

    Raises:
        DataError: for the same reasons as ``load_examples``.
    """
    assert config.test_source is not None
    source = Source(config.test_source, "data.test_source")
    examples = _read(source, BUILTIN_TEST, TEST_FILES, config.columns, modality)
    if not examples:
        raise DataError(f"{source} has no examples: give a source that has some")
    return examples


def _read(
    source: Source,
    known: Mapping[str, Callable[[], Examples]],
    idx_files: IdxFiles,
    columns: ColumnsConfig,
    modality: Modality,
) -> Examples:
    if (builtin := find_builtin(source, known)) is not None:
        return builtin()
    path = open_source(source)
    if not path.is_dir():
        return _read_table(path, source, columns, modality)
    return read_idx_folder(path, idx_files) if holds_idx(path, idx_files) else _read_image_folder(path, source)


def find_builtin(source: Source, known: Mapping[str, Found]) -> Found | None:
    """Return the set that ``builtin:NAME`` names; None for other sources. Raises DataError for an unknown name."""
    scheme, _, name = source.uri.partition(":")
    if scheme != "builtin":
        return None
    if name not in known:
        raise DataError(f"{source}: no built-in set {name!r} for this task; {did_you_mean(name, known)}")
    return known[name]


def open_source(source: Source) -> UPath:
    """Return the path of a source that is not built in. Raises DataError if it does not exist."""
    with _named_in_errors(source):
        path = to_path(source.uri).expanduser()
        is_there = path.exists()
    if not is_there:
        raise DataError(
            f"{source} does not exist: give builtin:NAME, or the path or URI of a csv, jsonl, "
            "parquet or Arrow file or of a folder"
        )
    return path


@contextmanager
def _named_in_errors(source: Source) -> Iterator[None]:
    try:
        yield
    except RayloomError:
        raise
    except Exception as error:  # each protocol's driver has errors of its own
        raise DataError(f"{source} cannot be opened ({error}): check the URI and the credentials") from error


def list_source(source: Source, root: UPath) -> list[tuple[UPath, dict[str, Any]]]:
    """List the files of a source with the driver's metadata, sorted by path. Hidden files are left out.

    It takes one listing, however many there are. Raises DataError if it is refused.
    """
    with _named_in_errors(source):
        if root.is_file():
            return [(root, root.fs.info(root.path))]
        found: dict[str, dict[str, Any]] = root.fs.find(root.path, detail=True)
    inside = {name: name.removeprefix(root.path.rstrip("/")).lstrip("/") for name in found}
    files = [(root / place, found[name]) for name, place in inside.items() if not _is_hidden(place)]
    return sorted(files, key=lambda file: str(file[0]))


def _is_hidden(place: str) -> bool:
    return any(part.startswith(".") for part in place.split("/"))


def require_class_folders(source: Source, root: UPath, images: Iterable[UPath]) -> None:
    """Raise DataError if an image does not lie in a folder that is named as its class, right in the source."""
    for image in images:
        if len(image.relative_to(root).parts) != 2:
            raise DataError(
                f"{source} has the image {str(image)!r}: expected CLASS/FILE below the source; move it, or give the "
                "folder whose subfolders are the classes"
            )


def _read_table(path: UPath, source: Source, columns: ColumnsConfig, modality: Modality) -> Examples:
    """Read a table with a column of labels and one of texts; with features, as rows; or with fields, as records."""
    from app.data.tables import read_records, read_rows, read_table

    if path.suffix not in TABLE_SUFFIXES:
        raise DataError(f"{source} ends in {path.suffix!r}: expected {', '.join(TABLE_SUFFIXES)} or a folder")
    if modality in ("row", "record"):
        rows, labels = (read_rows if modality == "row" else read_records)(path, columns)
        return Examples(modality, list(rows), labels)
    texts, labels = read_table(path, {"input": columns.input, "label": columns.label})
    return Examples("text", list(texts), labels)


def _read_image_folder(root: UPath, source: Source) -> Examples:
    """Read a folder with one subfolder per class, as torchvision's ImageFolder does. An input is a file's content."""
    images = [path for path, _ in list_source(source, root) if path.suffix.lower() in IMAGE_SUFFIXES]
    require_class_folders(source, root, images)
    images.sort(key=lambda image: (image.parent.name, image.name))
    return Examples("image", map_concurrently(root, UPath.read_bytes, images), [image.parent.name for image in images])
