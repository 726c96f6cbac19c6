"""A run's records as scalars for TensorBoard."""

import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from upath import UPath

from app.storage import is_local, write_atomically
from app.telemetry.record import Record
from app.warnings import attempt

TENSORBOARD = "tensorboard"
"""The folder of a run's event files, one for each time that it was started."""

_COPY_INTERVAL_S = 60.0


class TensorBoardLog:
    """Writes records to an event file in ``tensorboard/`` of the run's folder.

    Each number of a record becomes a scalar of its step, named by the record's kind and the number's key:
    ``step/loss``, ``step/memory/peak_bytes``, ``epoch/val_loss``.

    Objects cannot be appended to: on an object store the file grows in a temporary folder, and is copied
    every minute, on ``flush`` and on ``close``. Training never fails for this log: what goes wrong is
    printed as a warning, and the records are in ``metrics.jsonl`` too.
    """

    def __init__(self, folder: UPath, first_step: int) -> None:
        """Open a file whose first step is ``first_step``: 1, or the one after the step that is resumed from.

        What earlier files have of that step and of later ones counts no more, so that no step is there twice.
        """
        self._folder = folder / TENSORBOARD
        # SummaryWriter is not used: on a full disk its thread dies, and training then waits for it for ever.
        self._writer: EventsWriter | None = None
        self._temporary = None if is_local(folder) else tempfile.TemporaryDirectory(prefix="rayloom-tensorboard-")
        self._copied = time.monotonic()
        self._do(partial(self._open, first_step))

    def append(self, *records: Record) -> None:
        """Write the numbers of some records."""
        self._do(partial(self._write, records))
        if time.monotonic() - self._copied > _COPY_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Bring what was appended to the run's folder; a store that refuses is asked again next time."""
        if self._temporary is None:
            return
        self._copied = time.monotonic()
        for file in Path(self._temporary.name).iterdir():
            target = self._folder / file.name
            attempt(partial(_copy, file, target), f"{str(target)!r} cannot be written")

    def close(self) -> None:
        """Finish the file; what is appended later is lost."""
        if self._writer is not None:
            self._do(self._writer.close)
        self._writer = None
        self.flush()
        if self._temporary is not None:
            self._temporary.cleanup()
        self._temporary = None

    def _do(self, action: Callable[[], None]) -> None:
        if not attempt(action, f"{str(self._folder)!r} gets no more records"):
            self._writer = None  # nothing can be read behind a record that was cut off

    def _open(self, first_step: int) -> None:
        local = Path(self._temporary.name if self._temporary else self._folder.path)
        local.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(local / "events"), f".{first_step:09d}")
        started = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=first_step, session_log=started))
        self._writer.flush()

    def _write(self, records: Iterable[Record]) -> None:
        if self._writer is None:
            return
        for record in records:
            values = [
                Summary.Value(tag=f"{record.kind}/{key.replace('.', '/')}", simple_value=value)
                for key, value in record.scalars().items()
                if key != "step"
            ]
            self._writer.write_event(Event(wall_time=time.time(), step=record.step, summary=Summary(value=values)))
        self._writer.flush()


def _copy(file: Path, target: UPath) -> None:
    write_atomically(target, file.read_bytes())
