"""Tar files in the layout of WebDataset: the members of a sample follow one another, and differ in their extension."""

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from app.data.examples import Input
from app.data.preparation.rows import Columns, Rows, cell_text
from app.data.preparation.units import Piece
from app.data.sources import IMAGE_SUFFIXES
from app.errors import DataError
from app.storage import to_path

_BATCH_ROWS, _BATCH_BYTES = 1024, 16 * 2**20


@dataclass(frozen=True)
class _Sample:
    """The members of a sample, by extension without the dot."""

    place: str
    """Its tar and key, for messages."""
    members: Mapping[str, bytes]

    def input(self, columns: Columns) -> Input:
        """Return the picture, or the text. Raises DataError if the sample has none."""
        wanted = [suffix[1:] for suffix in IMAGE_SUFFIXES] if columns.is_image else ["txt"]
        found = next((self.members[name] for name in sorted(wanted) if name in self.members), None)
        if found is not None:
            return found
        if columns.is_image:
            raise self._without("a picture", ", ".join(f".{name}" for name in sorted(wanted)))
        if (text := self._json.get(columns.input)) is not None:
            return cell_text(text)
        raise self._without("a text", f".txt, or .json with {columns.input!r}")

    def label(self, columns: Columns, name: str) -> str:
        """Return the class. Raises DataError if the sample has none."""
        if (found := self.members.get("cls")) is not None:
            return self._text(found, "cls")
        if (label := self._json.get(name)) is not None:
            return str(label)
        if columns.is_image and (found := self.members.get("txt")) is not None:
            return self._text(found, "txt")
        raise self._without("a label", f".cls, or .json with {name!r}{', or .txt' if columns.is_image else ''}")

    def group(self, name: str) -> str:
        """Return the group; "" for none."""
        return str(self._json.get(name, ""))

    @property
    def _json(self) -> dict[str, Any]:
        content = self.members.get("json", b"{}")
        try:
            found = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{self.place}.json is not JSON ({error}): correct it") from error
        if not isinstance(found, dict):
            raise DataError(f"{self.place}.json is a {type(found).__name__}: expected an object")
        return found

    def _text(self, content: bytes, extension: str) -> str:
        try:
            return content.decode().strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.place}.{extension} is not text in UTF-8: correct it") from error

    def _without(self, what: str, expected: str) -> DataError:
        members = ", ".join(f".{name}" for name in self.members)
        return DataError(f"{self.place} has no member that is {what}: it has {members}; expected {expected}")


def read_tar(piece: Piece, columns: Columns) -> Iterator[Rows]:
    """Yield the samples of a tar, which is read once from its beginning to its end.

    Raises:
        DataError: a sample lacks its input or its label.
    """
    some: list[_Sample] = []
    size = 0
    for sample in _samples(piece.path):
        some.append(sample)
        size += sum(map(len, sample.members.values()))
        if size >= _BATCH_BYTES or len(some) == _BATCH_ROWS:
            yield _rows_of(some, columns)
            some, size = [], 0
    if some:
        yield _rows_of(some, columns)


def _samples(path: str) -> Iterator[_Sample]:
    key, members = "", dict[str, bytes]()
    with to_path(path).open("rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            # tarfile keeps about a kilobyte for each member.
            tar.members.clear()  # type: ignore[attr-defined]
            folder, slash, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            content = tar.extractfile(member)
            if content is None or not stem:  # a folder, or a hidden file
                continue
            if key != folder + slash + stem and members:
                yield _Sample(f"{path!r}, sample {key}", members)
                members = {}
            key = folder + slash + stem
            members[extension.lower()] = content.read()
        _require_end(path, tar.offset)
    if members:
        yield _Sample(f"{path!r}, sample {key}", members)


def _require_end(path: str, offset: int) -> None:
    """Raise DataError if a tar does not end here. tarfile ignores a header that cannot be read."""
    file = to_path(path)
    if file.fs.cat_file(file.path, start=offset, end=offset + tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise DataError(
            f"{path!r} is torn: at byte {offset:,} it has neither a member nor the end-of-archive marker, a block "
            "of zeros; write it again"
        )


def _rows_of(samples: list[_Sample], columns: Columns) -> Rows:
    return Rows(
        [sample.input(columns) for sample in samples],
        None if columns.label is None else [sample.label(columns, columns.label) for sample in samples],
        None if columns.group is None else [sample.group(columns.group) for sample in samples],
        files=[sample.place for sample in samples],
    )
