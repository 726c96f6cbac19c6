"""Waiting for the first worker while it prepares data: as long as it takes, but not for a worker that is dead."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from app.best_effort import BestEffort, repeat_in_background
from app.errors import TrainingError
from app.torch_internals import default_store
from app.training.worker import Worker

_INTERVAL_S = 2.0
_MAX_SILENCE_S = 120.0
"""Longer than any call that blocks Python's other threads."""
_STORE_TIMEOUT = timedelta(seconds=30)
_BEATS, _ENDED = "rayloom/preparing/beats", "rayloom/preparing/ended"


@contextmanager
def preparing(worker: Worker) -> Iterator[None]:
    """Tell the other workers, until the block ends in any way, that this one is alive. Only the first worker does."""
    store = _store(worker)
    if store is None:
        yield
        return
    try_beat = BestEffort("the other workers cannot be told that the data are being prepared", "the job")
    try:
        with repeat_in_background(lambda: try_beat(lambda: store.add(_BEATS, 1)), _INTERVAL_S, name="preparing"):
            yield
    finally:
        store.set(_ENDED, "")


def wait_for_first(worker: Worker) -> None:
    """Wait until the first worker leaves ``preparing``.

    A broadcast would end with a timeout in a long preparation, and notice a dead worker only then.

    Raises:
        TrainingError: the first worker sends no heartbeat, or the store is gone.
    """
    store = _store(worker)
    assert store is not None
    beats, last_beat_at = -1, time.monotonic()
    try:
        while not store.check([_ENDED]):
            # Adding 0 reads the counter, and makes it if it is missing.
            if (now := store.add(_BEATS, 0)) != beats:
                beats, last_beat_at = now, time.monotonic()
            elif time.monotonic() - last_beat_at > _MAX_SILENCE_S:
                raise TrainingError(
                    f"rank 0 sent no heartbeat for {_MAX_SILENCE_S:.0f} s while it prepared the data: it has ended, "
                    "or its node is gone; see its log, and start the run again"
                ).of("rank.silent")
            time.sleep(min(_INTERVAL_S, _MAX_SILENCE_S) / 4)
    except RuntimeError as error:
        raise TrainingError(
            f"rank 0, or the torchrun that started it, is gone ({error}): see its log, and start the run again"
        ).of("rank.gone") from error


def _store(worker: Worker) -> Store | None:
    """Return a connection to the store of all workers; None for a worker that is alone."""
    if worker.size == 1:
        return None
    # A separate connection: on the one that training uses, a call that waits for other workers would block.
    store: Store = default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(_STORE_TIMEOUT)
    return store
