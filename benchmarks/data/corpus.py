"""Texts to prepare and read, and a local S3 that serves them."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tenacity import retry, stop_after_delay, wait_fixed

_WORDS, _TEXT_WORDS = 30_000, (40, 400)
_GROUP_ROWS = 10_000


def write_texts(file: Path, megabytes: int, seed: int = 0) -> int:
    """Write a Parquet file of so many megabytes of text, with one of three labels each. Return the number of rows.

    Words follow a power law, as those of a language do.
    """
    generator = np.random.default_rng(seed)
    words = np.array([f"w{number}" for number in range(_WORDS)])
    schema = pa.schema({"text": pa.string(), "label": pa.string()})
    size = rows = 0
    with pq.ParquetWriter(file, schema) as writer:
        while size < megabytes * 1e6:
            lengths = generator.integers(*_TEXT_WORDS, _GROUP_ROWS)
            chosen = np.minimum((generator.pareto(1.1, int(lengths.sum())) * 20).astype(int), _WORDS - 1)
            texts = [" ".join(part) for part in np.split(words[chosen], np.cumsum(lengths)[:-1])]
            labels = [str(number % 3) for number in range(_GROUP_ROWS)]
            writer.write_table(pa.table({"text": texts, "label": labels}, schema), row_group_size=_GROUP_ROWS)
            size, rows = size + sum(map(len, texts)), rows + _GROUP_ROWS
    return rows


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
