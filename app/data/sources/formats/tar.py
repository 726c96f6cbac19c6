"""Tar files in the layout of WebDataset: the members of a sample follow one another, and differ in their extension."""

import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.data.sources.cells import Column, Columns, Rows, each_at, rows_of_objects
from app.data.sources.formats.base import DOCUMENTS, HEAD_BYTES, Format, Piece, require_unpacked
from app.data.sources.formats.files import AUDIO_SUFFIXES, IMAGE_SUFFIXES
from app.data.sources.lines import BOM, parse_json
from app.errors import DataError
from app.storage import to_path

_BATCH_ROWS, _BATCH_BYTES = 1024, 16 * 2**20
_SUFFIXES = {"image": IMAGE_SUFFIXES, "audio": AUDIO_SUFFIXES}
_WORDS = {"image": "a picture", "audio": "a recording"}
_TEXTS = ("txt", "cls", "json")


@dataclass(frozen=True)
class _Sample:
    """The members of a sample, by extension without the dot."""

    place: str
    """Its tar and key, for messages."""
    members: Mapping[str, bytes]

    def cell(self, column: Column, contents: str) -> Any:
        """Return the cell of a column. Raises DataError if the sample has no text, file or label."""
        if column.kind == "file":
            return self._file(contents)
        if column.kind == "text":
            return self._text(column)
        return self._label(column, contents) if column.kind == "label" else self._json.get(column.name)

    def _file(self, contents: str) -> bytes:
        wanted = sorted(suffix[1:] for suffix in _SUFFIXES[contents])
        found = [name for name in wanted if name in self.members]
        if len(found) > 1:
            raise DataError(
                f"{self.place} has {len(found)} members that are {_WORDS[contents]}, .{' and .'.join(found)}: keep one"
            ).of("tar.several_members")
        if not found:
            raise self._without(_WORDS[contents], ", ".join(f".{name}" for name in wanted))
        return self.members[found[0]]

    def _text(self, column: Column) -> Any:
        if (found := self.members.get("txt")) is not None:
            return found
        if (text := self._json.get(column.name)) is None:
            raise self._without("a text", f".txt, or .json with {column.name!r}")
        return text

    def _label(self, column: Column, contents: str) -> Any:
        if (found := self.members.get("cls")) is not None:
            return found
        if (label := self._json.get(column.name)) is not None:
            return label
        # Beside a file, the text is its class.
        if contents in _SUFFIXES and (found := self.members.get("txt")) is not None:
            return found
        raise self._without(
            "a label", f".cls, or .json with {column.name!r}{', or .txt' if contents in _SUFFIXES else ''}"
        )

    @property
    def _json(self) -> Mapping[str, Any]:
        return parse_json(self.members.get("json", b"{}"), lambda: f"{self.place}.json", "in it")

    def _without(self, what: str, expected: str) -> DataError:
        members = ", ".join(f".{name}" for name in self.members)
        return DataError(f"{self.place} has no member that is {what}: it has {members}; expected {expected}").of(
            "tar.no_member"
        )


class Tar(Format):
    """A tar is read once, from its beginning to its end."""

    name, suffixes = "tar", (".tar",)

    def reads(self, contents: str, suffix: str) -> bool:
        """Return whether the task takes one text or file a sample, and this is a tar."""
        return suffix in self.suffixes and (contents in _SUFFIXES or contents in ("text", DOCUMENTS))

    def read(self, pieces: Sequence[Piece], columns: Columns) -> Iterator[Rows]:
        for piece in pieces:
            some: list[_Sample] = []
            size = 0
            for sample in _samples(piece.path):
                some.append(sample)
                size += sum(map(len, sample.members.values()))
                if size >= _BATCH_BYTES or len(some) == _BATCH_ROWS:
                    yield _rows_of(piece.path, some, columns)
                    some, size = [], 0
            if some:
                yield _rows_of(piece.path, some, columns)


def _samples(path: str) -> Iterator[_Sample]:
    with to_path(path).open("rb") as head:
        require_unpacked(path, head.read(HEAD_BYTES))
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
                yield _Sample(_place(path, key), members)
                members = {}
            key = folder + slash + stem
            if (extension := extension.lower()) in members:
                raise DataError(f"{_place(path, key)} has two members .{extension}: rename or remove one").of(
                    "tar.member_repeated"
                )
            members[extension] = content.read().removeprefix(BOM if extension in _TEXTS else b"")
        _require_end(path, tar.offset)
    if members:
        yield _Sample(_place(path, key), members)


def _place(path: str, key: str) -> str:
    """Return the place of a sample for messages. Its name may not be UTF-8."""
    return f"{path!r}, sample {key.encode(errors='backslashreplace').decode()}"


def _require_end(path: str, offset: int) -> None:
    """Raise DataError if a tar does not end here. tarfile ignores a header that cannot be read, and what follows."""
    with to_path(path).open("rb") as file:
        file.seek(offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise DataError(
                f"{path!r} is torn: at byte {offset:,} it has neither a member nor the end-of-archive marker, a block "
                "of zeros; write it again"
            ).of("file.torn")
        while rest := file.read(2**20):
            if rest.strip(b"\0"):
                raise DataError(
                    f"{path!r} has more after its end-of-archive marker at byte {offset:,}, as joined tars have: keep "
                    "them apart, or join them by tar --concatenate"
                ).of("tar.joined")


def _rows_of(path: str, samples: Sequence[_Sample], columns: Columns) -> Rows:
    rows = [{column.name: sample.cell(column, columns.contents) for column in columns.all} for sample in samples]
    return rows_of_objects(rows, columns, path, each_at([sample.place for sample in samples]))
