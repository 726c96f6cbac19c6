"""The micro-epochs of a run in storage: shards named by the range of their messages, and a manifest for each.

A manifest is written last. From then on its micro-epoch never changes, so a run that goes on trains on the same rows.
"""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from pydantic import BaseModel
from upath import UPath

from app.config import Recipe
from app.data.examples import CleaningReport
from app.data.preparation.survey import DIGEST_BYTES
from app.data.shards import Shard
from app.data.streaming.collector import Collector
from app.data.streaming.messages import Offsets
from app.data.streaming.rows import ChosenRows, RowsFactory
from app.shared_files import read
from app.storage import write_atomically

_DIGESTS_FILE = "validation.digests"


class MicroEpoch(BaseModel):
    """A range of messages, and the shards of the rows that are trained on."""

    number: int
    """The epoch of training, from 1."""
    start: Offsets
    stop: Offsets
    """Where the next micro-epoch begins, by partition."""
    shards: list[Shard]
    report: CleaningReport
    """Over all messages since the run began."""
    total_rows: int
    """Training samples since the run began."""
    unused_tokens: int = 0
    """Tokens at the end of its last document that fill no block."""

    @property
    def rows(self) -> int:
        """Training samples."""
        return sum(shard.rows for shard in self.shards)


@dataclass(frozen=True)
class MicroEpochStore:
    """The folder of a run's micro-epochs, which is also that of the first one's shards."""

    folder: UPath

    def find(self, number: int, start: Offsets) -> MicroEpoch | None:
        """Return a micro-epoch that begins at ``start``; None if there is none.

        It may read more partitions than ``start`` has: a topic can grow.
        """
        content = read(self._manifest(number))
        found = None if content is None else MicroEpoch.model_validate_json(content)
        return found if found and start.items() <= found.start.items() else None

    def write(self, number: int, chosen: ChosenRows) -> MicroEpoch:
        """Write a micro-epoch: its shards, then its manifest."""
        shards = chosen.write_train(self.folder)
        report, total_rows = chosen.report, sum(shard.rows for shard in shards)
        if (content := read(self._manifest(number - 1))) is not None:
            earlier = MicroEpoch.model_validate_json(content)
            report, total_rows = earlier.report + report, earlier.total_rows + total_rows
        written = MicroEpoch(
            number=number,
            start=chosen.start,
            stop=chosen.stop,
            shards=shards,
            report=report,
            total_rows=total_rows,
            unused_tokens=chosen.unused_tokens,
        )
        write_atomically(self._manifest(number), written.model_dump_json(indent=1).encode())
        return written

    def save_in_validation(self, digests: Iterable[bytes]) -> None:
        """Write the digests of held-out rows that later messages may equal."""
        write_atomically(self.folder / _DIGESTS_FILE, b"".join(sorted(digests)))

    @property
    def in_validation(self) -> frozenset[bytes]:
        """The digests of held-out rows. Messages that equal one are not trained on."""
        content = read(self.folder / _DIGESTS_FILE) or b""
        return frozenset(content[place : place + DIGEST_BYTES] for place in range(0, len(content), DIGEST_BYTES))

    def delete(self, number: int) -> None:
        """Delete a micro-epoch, if there is one. If a run goes back to it, its messages are read again."""
        if number <= 1 or (content := read(self._manifest(number))) is None:
            return  # the index names the shards of the first one
        self._manifest(number).unlink(missing_ok=True)
        for shard in MicroEpoch.model_validate_json(content).shards:
            (self.folder / shard.name).unlink(missing_ok=True)

    def _manifest(self, number: int) -> UPath:
        return self.folder / f"micro-epoch-{number:06d}.json"


class Collection:
    """Collects and writes a micro-epoch in a thread, so that training need not wait for it."""

    def __init__(
        self, recipe: Recipe, store: MicroEpochStore, make_rows: RowsFactory, number: int, start: Offsets
    ) -> None:
        self.number, self.start = number, start
        self._store = store
        self._collector = Collector(recipe, make_rows, start, is_first=False)
        self._stopping, self._is_awaited = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._written = self._pool.submit(self._collect)

    def wait(self, timeout_s: float) -> MicroEpoch | None:
        """Return the micro-epoch. None: it is not complete in time, or never will be: see ``has_ended``.

        Raises:
            DataError: the stream cannot be read, or too many of its messages are bad.
        """
        # A stream that is idle only while training is busy has not ended.
        self._is_awaited.set()
        try:
            return self._written.result(timeout_s)
        except TimeoutError:
            return None

    @property
    def has_ended(self) -> bool:
        """Whether the stream was idle before the micro-epoch was complete."""
        return self._written.done() and self._collector.has_ended

    @property
    def collected(self) -> int:
        """Messages so far."""
        return self._collector.collected

    def close(self) -> None:
        """Stop collecting, and disconnect from the broker."""
        self._stopping.set()
        self._pool.shutdown()

    def _collect(self) -> MicroEpoch | None:
        with closing(self._collector):
            while not (self._stopping.is_set() or (self._collector.has_ended and self._is_awaited.is_set())):
                if (chosen := self._collector.poll()) is not None:
                    return self._store.write(self.number, chosen)
        return None
