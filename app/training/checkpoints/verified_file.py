"""Random access to a file in storage, verified by checksums of its pieces."""

import io
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from upath import UPath

from app.checksums import missing_file, sha256_of
from app.errors import StorageError
from app.storage import ProgressCallback, no_op

PIECE_BYTES = 2**16
"""Size of a piece: the unit of reading and verifying."""
_SUFFIX = ".pieces"

Span = tuple[int, int]
"""A half-open range: the first position, and the last plus one."""


def write_piece_sums(file: Path) -> Path:
    """Write the sha256 of each piece of ``file`` to a file beside it, one per line. Return its path."""
    sums = file.with_name(pieces_name(file.name))
    with file.open("rb") as content, sums.open("w", encoding="ascii") as lines:
        while piece := content.read(PIECE_BYTES):
            lines.write(f"{sha256_of(piece)}\n")
    return sums


def pieces_name(name: str) -> str:
    """Return the name of the file with the piece checksums of file ``name``."""
    return name + _SUFFIX


class VerifiedFile(io.RawIOBase):
    """A file that reads pieces on demand. ``fetch`` reads many at once."""

    def __init__(
        self, file: UPath, sums: Sequence[str], piece_bytes: int | None, on_progress: ProgressCallback = no_op
    ) -> None:
        """``sums`` are the sha256 of pieces of ``piece_bytes``. None: the whole file is one piece."""
        self._file, self._sums, self._piece_bytes, self._on_progress = file, sums, piece_bytes, on_progress
        self._pieces: dict[int, bytes] = {}
        self._position = 0

    def fetch(self, spans: Iterable[Span]) -> None:
        """Load the pieces of these byte ranges into memory, and drop all others.

        Raises:
            StorageError: the file is missing, too short or changed.
        """
        needed = sorted({number for span in spans for number in self._piece_numbers(span)})
        # Dropped, so that memory holds only what the next reads need.
        self._pieces = {number: self._pieces[number] for number in needed if number in self._pieces}
        self._read([number for number in needed if number not in self._pieces])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position. ``SEEK_END`` is unsupported: the file's length is unknown."""
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the file's length is not known")
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill ``buffer``, up to the end of the file. Raises what ``fetch`` raises."""
        span = (self._position, self._position + len(buffer))
        numbers = list(self._piece_numbers(span))
        self._read([number for number in numbers if number not in self._pieces])
        first = self._position - (numbers[0] * (self._piece_bytes or 0) if numbers else 0)
        content = memoryview(b"".join(self._pieces[number] for number in numbers))[first : first + len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _piece_numbers(self, span: Span) -> range:
        """Return the numbers of the pieces that overlap ``span``."""
        start, end = span
        if self._piece_bytes is None:
            return range(int(end > start))
        return range(start // self._piece_bytes, min(-(-end // self._piece_bytes), len(self._sums)))

    def _read(self, numbers: list[int]) -> None:
        """Read pieces: adjacent ones in one request, all requests concurrently."""
        if not numbers:
            return
        # A run ends where the next piece is not adjacent.
        breaks = [0, *(place for place, (one, other) in enumerate(pairwise(numbers), 1) if other > one + 1)]
        runs = [numbers[start:end] for start, end in pairwise([*breaks, len(numbers)])]

        size = self._piece_bytes
        starts = [run[0] * (size or 0) for run in runs]
        ends = [None if size is None else (run[-1] + 1) * size for run in runs]
        try:
            contents = self._file.fs.cat_ranges([self._file.path] * len(runs), starts, ends, on_error="raise")
        except FileNotFoundError as error:
            raise missing_file(self._file) from error
        except OSError as error:
            # Object stores reject reads that start at or past the end.
            if self._file.stat().st_size <= starts[-1]:
                raise StorageError(f"{str(self._file)!r} was changed: it is too short; make it again").of(
                    "file.changed"
                ) from error
            raise
        for run, content in zip(runs, contents, strict=True):
            for place, number in enumerate(run):
                piece = content if size is None else content[place * size : (place + 1) * size]
                self._verify_and_keep(number, bytes(piece))

    def _verify_and_keep(self, number: int, piece: bytes) -> None:
        if sha256_of(piece) != self._sums[number]:
            raise StorageError(f"{str(self._file)!r} was changed: piece {number} has another sha256; make it again").of(
                "file.changed"
            )
        self._pieces[number] = piece
        self._on_progress()
