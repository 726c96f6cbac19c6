"""A run's records as scalars for TensorBoard."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from app.best_effort import best_effort
from app.telemetry.mirror import Mirror
from app.telemetry.record import Record, tag_of


@contextmanager
def hidden(module: str) -> Iterator[None]:
    """Hide the optional ``module`` from libraries imported in the block. Do nothing if it is already loaded."""
    is_loaded = module in sys.modules
    if not is_loaded:
        sys.modules[module] = None  # type: ignore[assignment] # importing it raises ImportError
    try:
        yield
    finally:
        if not is_loaded:
            sys.modules.pop(module, None)


with hidden("boto3"):  # tensorboardX imports it for event files on S3. Ours are local.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

TENSORBOARD = "tensorboard"
"""The folder of a run's event files, one for each time that it was started."""


class TensorBoardLog:
    """Writes records to an event file in ``tensorboard/`` of the run's folder.

    Each number of a record becomes a scalar of its step, named by ``tag_of``. Among records that are written together,
    only the last of equal numbers in a row becomes a scalar.

    Errors never stop training. They are printed as warnings, and ``metrics.jsonl`` has the same records.
    """

    def __init__(self, mirror: Mirror, first_step: int) -> None:
        """Open a file whose first step is ``first_step``: 1, or the one after the step that is resumed from.

        TensorBoard then drops that step and later ones from earlier files, so that no step is there twice.
        ``mirror`` is the one of the run's folder.
        """
        self._folder = mirror.folder / TENSORBOARD
        # SummaryWriter is not used: on a full disk its thread dies, and training would wait for it forever.
        self._writer: EventsWriter | None = None
        self._try(partial(self._open, first_step))

    def append(self, *records: Record) -> None:
        """Write the numbers of some records."""
        self._try(partial(self._write, records))

    def close(self) -> None:
        """Finish the file. Later records are lost."""
        if self._writer is not None:
            self._try(self._writer.close)
        self._writer = None

    def _try(self, action: Callable[[], None]) -> None:
        if not best_effort(action, f"{str(self._folder)!r} gets no more records"):
            self._writer = None  # readers stop at a torn record

    def _open(self, first_step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(self._folder / "events"), f".{first_step:09d}")
        started = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=first_step, session_log=started))
        self._writer.flush()

    def _write(self, records: Sequence[Record]) -> None:
        if self._writer is None:
            return
        scalars = [_by_tag(record) for record in records]
        for record, values, following in zip(records, scalars, [*scalars[1:], {}], strict=True):
            summary = Summary(
                value=[
                    Summary.Value(tag=tag, simple_value=value)
                    for tag, value in values.items()
                    if following.get(tag) != value
                ]
            )
            self._writer.write_event(Event(wall_time=time.time(), step=record.step, summary=summary))
        self._writer.flush()


def _by_tag(record: Record) -> dict[str, float]:
    """Return the numbers of a record by their names in TensorBoard."""
    numbers = record.scalars()
    del numbers["step"]
    return {tag_of(record.kind, key): value for key, value in numbers.items()}
