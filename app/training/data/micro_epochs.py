"""The micro-epochs of a stream in training: the first worker collects them, and all workers read their shards."""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from upath import UPath

from app.best_effort import best_effort, warn
from app.config import Recipe
from app.data.preparation.encoding import Encoding
from app.data.prepared import TRAIN, VALIDATION, DataReport, GrowingData, PreparedData, SplitData
from app.data.streaming.messages import Offsets
from app.data.streaming.micro_epochs import Collection, MicroEpoch, MicroEpochStore
from app.data.streaming.rows import RowsFactory, StreamRows
from app.storage import to_path
from app.tasks import find_task
from app.training.data.feed import Feed
from app.training.data.order import SampleOrder
from app.training.data.recipe_order import order_of
from app.training.worker import Worker, on_first

_WAIT_S = 1.0
_SPARE = 2
"""Micro-epochs that are kept beside those of the checkpoints."""


@dataclass
class MicroEpochs:
    """Gives each epoch of training its micro-epoch. Every worker has one, and calls it in the same order."""

    recipe: Recipe
    data: PreparedData
    feed: Feed
    worker: Worker
    run_folder: UPath
    has_ended: bool = field(default=False, init=False)
    """Whether the stream is idle, so that there is no further micro-epoch."""
    _current: MicroEpoch | None = field(default=None, init=False)
    _collection: Collection | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.data, GrowingData)  # recipes of other tasks on a stream are refused
        self._sharded = self.data
        self._store = MicroEpochStore(to_path(self._sharded.reference.location))

    @property
    def start(self) -> Offsets:
        """Where the micro-epoch under way begins, by partition."""
        assert self._current is not None
        return self._current.start

    @property
    def stop(self) -> Offsets:
        """Where the next micro-epoch begins, by partition."""
        assert self._current is not None
        return self._current.stop

    def enter(self, number: int, start: Offsets) -> bool:
        """Have the feed read micro-epoch ``number``, which begins at ``start``. Return whether it is there. Collective.

        If it is not, wait for about a second. While all train on it, the first worker collects the next one.

        Raises:
            DataError: the stream cannot be read, or too many of its messages are bad.
        """
        found, self.has_ended = on_first(partial(self._find, number, start))
        if found is not None and found != self._current:
            self._current = found
            data = self._sharded.with_train(self._sharded.reference.open_shards(found.shards))
            order = order_of(self.recipe, data, is_part=True)
            self.feed.read_from(data, order)
            if self.worker.is_first:
                self._begin(found, order)
        return found is not None

    def close(self) -> None:
        """Disconnect from the broker."""
        if self._collection is not None:
            self._collection.close()
            self._collection = None

    def _find(self, number: int, start: Offsets) -> tuple[MicroEpoch | None, bool]:
        """Return the micro-epoch, if it is in storage or is complete now; and whether the stream has ended instead."""
        if (found := self._store.find(number, start)) is not None:
            return found, False
        collection = self._collect(number, start)
        found = collection.wait(_WAIT_S)
        has_ended = found is None and collection.has_ended
        if has_ended:
            self._tell_end(collection.collected)
        return found, has_ended

    def _collect(self, number: int, start: Offsets) -> Collection:
        """Return what collects a micro-epoch. It begins now, unless it has begun."""
        if self._collection is None or (self._collection.number, self._collection.start) != (number, start):
            self.close()
            self._collection = Collection(self.recipe, self._store, self._make_rows, number, start)
        return self._collection

    @cached_property
    def _make_rows(self) -> RowsFactory:
        kind = find_task(self.recipe.task).samples(self.recipe)
        encoding = Encoding.load(self.recipe.data, kind, self._store.folder)
        if isinstance(self.data, SplitData):
            encoding = replace(encoding, processor=self.data.processor)
        return partial(StreamRows, encoding, self._store.in_validation)

    def _begin(self, found: MicroEpoch, order: SampleOrder) -> None:
        """In the first worker, log a micro-epoch, and start to collect the next one."""
        unused = f"; {found.unused_tokens:,} tokens at its end fill no block" if found.unused_tokens else ""
        print(
            f"micro-epoch {found.number}: {found.rows:,} samples to train on, from offset {_places(found.start)} to "
            f"{_places(found.stop)}{unused}",
            flush=True,
        )
        if left := found.rows - order.num_batches(found.number) * self.recipe.train.batch_size:
            warn(
                f"micro-epoch {found.number}: {left:,} of its samples fill no batch with others that have the same "
                "fields, and are not trained on; lower train.global_batch_size, or raise data.stream.samples"
            )
        best_effort(partial(self._report, found), "the report cannot tell of the last messages")
        config = self.recipe.train
        # Checkpoints go back a few epochs. Older messages could be read again, by their offsets.
        self._store.delete(found.number - config.checkpoint.num_to_keep - _SPARE)
        if found.number < config.epochs and self._store.find(found.number + 1, found.stop) is None:
            self._collect(found.number + 1, found.stop)

    def _tell_end(self, left: int) -> None:
        stream = self.recipe.data.stream
        assert stream is not None
        rest = f"; {left:,} messages do not fill a batch, and are not trained on" if left else ""
        print(f"the stream has had no message for {stream.idle_seconds:g} s, so training ends{rest}", flush=True)

    def _report(self, written: MicroEpoch) -> None:
        """Report all messages so far on the run's page."""
        rows = {TRAIN: written.total_rows, VALIDATION: len(self.data.validation)}
        DataReport(source=self.recipe.data.source, cleaning=written.report, rows=rows).save(self.run_folder)


def _places(offsets: Offsets) -> str:
    """Return offsets in a few words."""
    if len(offsets) == 1:
        return f"{next(iter(offsets.values())):,}"
    shown = [f"{partition}:{offset:,}" for partition, offset in list(offsets.items())[:4]]
    return ", ".join(shown) + (f" and {len(offsets) - 4} more" if len(offsets) > 4 else "")
