"""Odd files as people have them, written by tests."""

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

Content = bytes | str | Callable[[Path], object]
LEFT_OUT = None
"""In place of a row that is counted as unreadable."""


@dataclass(frozen=True)
class Odd:
    """Files that are one source, and what reading them gives."""

    name: str
    files: Mapping[str, Content]
    read: Sequence[Any] = ()
    """Each row's input and label; a document; or a tagged text. Nothing if they are refused."""
    refused: str = ""
    """Essential words of the refusal, between three dots, in their order."""
    contents: str = "text"
    columns: Mapping[str, Any] = field(default_factory=dict)
    told: str = ""
    """What the log says."""
    source: str = ""
    """Folder below the files that is the source. Default: the only file, or all."""

    def write(self, folder: Path) -> Path:
        """Write the files, and return the source."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return folder / (self.source or (next(iter(self.files)) if len(self.files) == 1 else ""))


def lines(*rows: Mapping[str, Any]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def parquet(table: pa.Table | None = None, **columns: Any) -> bytes:
    """Return a table with a row in each row group."""
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns) if table is None else table, buffer, row_group_size=1)
    return buffer.getvalue()


def arrow(table: pa.Table | None = None, stream: bool = False, **columns: Any) -> bytes:
    """Return a table with a row in each record batch."""
    buffer, table = io.BytesIO(), pa.table(columns) if table is None else table
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(buffer, table.schema) as writer:
        writer.write_table(table, 1)
    return buffer.getvalue()


def picture(level: int = 0, kind: str = "PNG") -> bytes:
    """Return a grey picture."""
    buffer = io.BytesIO()
    Image.new("L", (4, 4), level).save(buffer, kind)
    return buffer.getvalue()


def tar(*members: tuple[str, bytes]) -> bytes:
    """Return a tar with these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zipped(name: str, content: str) -> bytes:
    """Return a zip with one file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, content)
    return buffer.getvalue()
