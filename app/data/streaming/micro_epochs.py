"""The micro-epochs of a run in storage: shards named by the range of their messages, and a manifest for each.

A manifest is written last. From then on its micro-epoch never changes, so a run that goes on trains on the same rows.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import BaseModel
from upath import UPath

from app.checksums import sha256_of
from app.conditional import read
from app.config import Recipe, ShardsConfig
from app.data.examples import CleaningReport
from app.data.preparation.prepare import SHARDS
from app.data.preparation.sample import SAMPLE_SIZE
from app.data.preparation.writers import LabelledWriter, labelled_schema
from app.data.prepared import TRAIN, VALIDATION
from app.data.processor import Processor, fit_processor
from app.data.sharded import ShardedRows, ShardReference
from app.data.sharded_data import ShardedLabelledData
from app.data.shards import Shard, ShardIndex
from app.data.streaming.collector import Collector
from app.data.streaming.messages import Offsets
from app.data.streaming.rows import ChosenRows, LabelledTexts
from app.data.targets import Classes, load_labels, save_labels
from app.errors import DataError, RecipeError
from app.storage import open_storage, write_atomically

_SHARDS = ShardsConfig()


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

    def write(self, number: int, chosen: ChosenRows, labels: Sequence[str]) -> MicroEpoch:
        """Write a micro-epoch: its shards, then its manifest."""
        earlier = read(self._manifest(number - 1))
        report = chosen.report
        if earlier is not None:
            report = MicroEpoch.model_validate_json(earlier).report + report
        shards = self.write_shards(TRAIN, chosen, chosen.train, labels)
        written = MicroEpoch(number=number, start=chosen.start, stop=chosen.stop, shards=shards, report=report)
        write_atomically(self._manifest(number), written.model_dump_json(indent=1).encode())
        return written

    def write_shards(self, split: str, chosen: ChosenRows, texts: LabelledTexts, labels: Sequence[str]) -> list[Shard]:
        """Write texts as shards, named by the range: the sums of offsets over the partitions, which only grow."""
        first, end = (sum(offsets.values()) for offsets in (chosen.start, chosen.stop))
        writer = LabelledWriter(self.folder, f"{split}-{first:012d}-{end:012d}", "text", _SHARDS.size, labels)
        writer.add(texts.inputs, texts.labels)
        return writer.close()

    def delete(self, number: int) -> None:
        """Delete a micro-epoch, if there is one. If a run goes back to it, its messages are read again."""
        if number <= 1 or (content := read(self._manifest(number))) is None:
            return  # the index names the shards of the first one
        self._manifest(number).unlink(missing_ok=True)
        for shard in MicroEpoch.model_validate_json(content).shards:
            (self.folder / shard.name).unlink(missing_ok=True)

    def open(self, found: MicroEpoch) -> ShardedRows:
        """Return the rows of a micro-epoch."""
        return ShardedRows(str(self.folder), found.shards, _SHARDS)

    def _manifest(self, number: int) -> UPath:
        return self.folder / f"micro-epoch-{number:06d}.json"


class Collection:
    """Collects and writes a micro-epoch in a thread, so that training need not wait for it."""

    def __init__(
        self, recipe: Recipe, store: MicroEpochStore, labels: Sequence[str], number: int, start: Offsets
    ) -> None:
        self.number, self.start = number, start
        self._store, self._labels = store, labels
        self._collector = Collector(recipe, start, is_first=False)
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
                    return self._store.write(self.number, chosen, self._labels)
        return None


def prepare_stream(
    recipe: Recipe, processor_type: type[Processor], clock: Callable[[], float] = time.monotonic
) -> ShardedLabelledData:
    """Collect the first micro-epoch, and fit the processor on it. Its validation split is that of the whole run.

    Raises:
        RecipeError: the recipe does not name the labels.
        DataError: the stream cannot be read, has too many bad messages, or is idle before there is a batch.
    """
    config = recipe.data
    assert config.stream is not None
    if config.stream.labels is None:
        raise RecipeError(
            "data.stream.labels is missing: name all labels that messages may have; part of a stream may lack some"
        )
    storage = open_storage(recipe.storage)
    print(f"data.source {config.source}: collecting the first micro-epoch", flush=True)
    chosen = _first(recipe, clock)
    processor = fit_processor(processor_type, _sample(chosen.train.inputs), config, recipe.model.pretrained)
    # No two runs share micro-epochs: each begins with the message that is the oldest at its start.
    fingerprint = sha256_of(f"{config.source} {chosen.start} {uuid.uuid4().hex}".encode())
    store = MicroEpochStore(storage / SHARDS / fingerprint[:16])
    store.folder.mkdir(parents=True, exist_ok=True)
    save_labels(config.stream.labels, store.folder)
    chosen.report.save(store.folder)
    first = store.write(1, chosen, config.stream.labels)
    validation = store.write_shards(VALIDATION, chosen, chosen.validation, config.stream.labels)
    index = ShardIndex(
        fingerprint=fingerprint,
        created=datetime.now(UTC),
        task=recipe.task,
        source=config.source,
        settings=config.model_dump(mode="json"),
        columns={field.name: str(field.type) for field in labelled_schema("text")},
        splits={TRAIN: first.shards, VALIDATION: validation},
    )
    index.save(store.folder)
    reference = ShardReference(location=str(store.folder), sha256=index.sha256, config=_SHARDS)
    return ShardedLabelledData.open(reference, processor, Classes(load_labels(store.folder)), chosen.report)


def _first(recipe: Recipe, clock: Callable[[], float]) -> ChosenRows:
    with closing(Collector(recipe, {}, is_first=True, clock=clock)) as collector:
        while not collector.has_ended:
            if (chosen := collector.poll()) is not None:
                return chosen
        stream = recipe.data.stream
        assert stream is not None
        raise DataError(
            f"data.source {recipe.data.source!r} has had no new message for {stream.idle_seconds:g} s, and its "
            f"{collector.collected:,} messages give no batch of {recipe.train.batch_size} and a row for "
            "validation: publish more, lower train.global_batch_size, or raise data.stream.idle_seconds"
        )


def _sample(texts: Sequence[str]) -> Sequence[str]:
    """Return evenly spread texts of about ``SAMPLE_SIZE`` at most."""
    return texts[:: max(1, -(-sum(map(len, texts)) // SAMPLE_SIZE))]
