"""Texts to prepare and read, and a local S3 that serves them."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tenacity import retry, stop_after_delay, wait_fixed

_WORDS, _TEXT_WORDS = 30_000, (40, 400)
_GROUP_ROWS = 10_000
_PIECE_MB = 100
BUCKET = "bench"
_SCHEMA = pa.schema({"text": pa.string(), "label": pa.string()})


SMALL, LARGE = "small", "large"
"""Names of the corpora."""


@dataclass(frozen=True)
class Corpora:
    """Two corpora in a folder that an S3 serves, and the shards prepared from them."""

    folder: Path
    megabytes: Mapping[str, int]

    def write(self) -> None:
        """Write the texts, unless they exist."""
        for name, size in self.megabytes.items():
            if not (self.folder / BUCKET / name).exists():
                write_corpus(self.folder / BUCKET / name, size)

    def uri(self, name: str) -> str:
        """Return where the S3 has the texts."""
        return f"s3://{BUCKET}/{name}"

    def storage(self, name: str) -> Path:
        """Return the folder of the shards on the disk."""
        return self.folder / BUCKET / f"{name}-shards"


def write_corpus(folder: Path, megabytes: int, in_files: bool = True) -> list[Path]:
    """Write so many megabytes of text as Parquet, and return the files.

    A tenth is in one file, and the rest in files of 100 MB, unless ``in_files`` is false: then all is in one. Texts
    of one piece are repeated, each with its own number, so that no two are equal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    piece = _piece(min(_PIECE_MB, max(1, megabytes // 10)))
    count = max(1, round(megabytes * 1e6 / sum(pc.sum(pc.binary_length(group["text"])).as_py() for group in piece)))
    in_first = max(1, count // 10) if in_files else count
    parts = [range(in_first), *(range(number, number + 1) for number in range(in_first, count))]
    files = [folder / f"{number:04d}.parquet" for number in range(len(parts))]
    for file, numbers in zip(files, parts, strict=True):
        _write(file, piece, numbers)
    return files


def _write(file: Path, piece: Sequence[pa.Table], numbers: Iterable[int]) -> None:
    # Without compression a file is as large as its texts.
    with pq.ParquetWriter(file, _SCHEMA, compression="none", use_dictionary=["label"]) as writer:
        for number in numbers:
            for place, group in enumerate(piece):
                first = (number * len(piece) + place) * _GROUP_ROWS
                own = pa.array(range(first, first + _GROUP_ROWS)).cast(pa.string())
                texts = pc.binary_join_element_wise(group["text"], own, " ")
                writer.write_table(pa.table({"text": texts, "label": group["label"]}, _SCHEMA))


def _piece(megabytes: int) -> list[pa.Table]:
    """Return about so many megabytes of text, with one of three labels each. Words follow a power law."""
    generator = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(_WORDS)])
    groups: list[pa.Table] = []
    size = 0
    while size < megabytes * 1e6:
        lengths = generator.integers(*_TEXT_WORDS, _GROUP_ROWS)
        chosen = np.minimum((generator.pareto(1.1, int(lengths.sum())) * 20).astype(int), _WORDS - 1)
        texts = [" ".join(part) for part in np.split(words[chosen], np.cumsum(lengths)[:-1])]
        labels = [str(number % 3) for number in range(_GROUP_ROWS)]
        groups.append(pa.table({"text": texts, "label": labels}, _SCHEMA))
        size += sum(map(len, texts))
    return groups


@contextmanager
def s3_of(folder: Path) -> Iterator[None]:
    """Serve the folders in ``folder`` as buckets. The environment names the server inside the context."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
    # Without these, it tells of old listings and gives tags that s3fs takes for checksums.
    options = ["--auth-key", "key,secret", "--dir-cache-time", "0s", "--etag-hash", "", str(folder)]
    server = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
    before = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    try:
        _wait_for(port)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.terminate()
        server.wait()


@retry(stop=stop_after_delay(20), wait=wait_fixed(0.1), reraise=True)
def _wait_for(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 1):
        pass
