"""A watchdog that ends a run without progress, or without a launcher, and names the worker that holds it up."""

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pydantic import BaseModel
from torch.distributed import Store  # type: ignore[attr-defined]
from upath import UPath

from app.artifacts import FAILURE_FILE
from app.shared_files import read
from app.torch_internals import default_store
from app.training.worker import Worker

HANG_EXIT_CODE = 70
_STORE_TIMEOUT_S = 3.0
_NO_STORE = "rank 0, or the torchrun that started it, does not answer: stopped, or gone"
"""One of the two hosts the store through which the workers exchange beats."""
_COLLECTIVES = ("torch.distributed.distributed_c10d", "deepspeed.comm", "deepspeed.runtime.zero.partition_parameters")
"""Modules whose functions wait for other workers. In the last one ZeRO 3 waits for parameters."""


class Beat(BaseModel):
    """The state of a worker, which it sends to the others."""

    rank: int
    count: int
    """Number of activities begun. Of workers that wait for each other, the one with the lowest count holds up all."""
    doing: str
    """Its activity."""
    is_waiting: bool
    """Whether it is in a collective, and so waits for other workers."""
    idle_s: float
    """Seconds since its last progress."""
    number: int
    """Number of beats that the watching thread has sent: about one a second, whatever the worker does."""


class Watchdog:
    """Sends this worker's beats to the others, and ends the process if no worker makes progress."""

    def __init__(self, worker: Worker, timeout_s: float, give_up: Callable[[str], None]) -> None:
        """Start watching the calling thread, which trains.

        ``give_up`` is called with the reason, from another thread, before the process is ended.
        """
        self._worker, self._timeout_s, self._give_up = worker, timeout_s, give_up
        self._interval_s = min(1.0, timeout_s / 5)
        self._silent_s = 3 * self._interval_s + 1.0
        """A worker that sends no beat for this long has ended or is stopped."""
        self._count, self._doing, self._moved = 0, "starting", time.monotonic()
        self._trainer = threading.get_ident()
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._stopped = threading.Event()
        # A separate connection: on the one that training uses, a call that waits for other workers would block.
        self._store: Store | None = default_store().clone() if worker.size > 1 else None  # type: ignore[attr-defined]
        self._beats_sent = 0
        self._last_seen: dict[int, tuple[int, float]] = {}
        """By rank, the newest beat number and when this worker first saw it. Clocks of other nodes are not compared."""
        self._query: threading.Thread | None = None
        self._answer: str | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()

    def beat(self, doing: str) -> None:
        """Report that the last activity is done, and which one begins."""
        self._count, self._doing, self._moved = self._count + 1, doing, time.monotonic()

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Let the block wait for something outside the run, however long. Allowed only in a run with one worker."""
        if self._store is None:
            # The idle time is negative then, so no timeout comes.
            self._moved = math.inf
        try:
            yield
        finally:
            self._moved = time.monotonic()

    def report_progress(self) -> None:
        """Report that the activity under way makes progress. May be called from any thread."""
        self._moved = time.monotonic()

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join(timeout=2 * self._interval_s)

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            if self._launcher not in (None, os.getppid()):
                self._end("torchrun is gone, and the run could not be started again while this process uses its folder")
            self._send_beat()
            if self._idle_s < self._timeout_s - self._silent_s - 2 * self._interval_s:
                # Silence takes time to show, so the other workers are watched only shortly before the timeout.
                continue
            cause = self._find_cause()
            # Ask again: the query takes seconds, in which this worker may have made progress.
            if cause and self._idle_s > self._timeout_s:
                self._end(f"no progress for {self._timeout_s:g} s: {cause}")

    @property
    def _idle_s(self) -> float:
        return time.monotonic() - self._moved

    def _send_beat(self) -> None:
        # A store serves one call at a time.
        if self._store is not None and not self._is_querying:
            self._beats_sent += 1
            beat = Beat(
                rank=self._worker.rank,
                count=self._count,
                doing=self._doing,
                is_waiting=_is_in_collective(self._trainer),
                idle_s=self._idle_s,
                number=self._beats_sent,
            )
            try:
                self._store.set(_key(self._worker.rank), beat.model_dump_json())
            except RuntimeError:
                # The first worker hosts the store. If it is gone, the query reports it.
                return

    @property
    def _is_querying(self) -> bool:
        return self._query is not None and self._query.is_alive()

    def _find_cause(self) -> str | None:
        """Return the result of ``_query_store``, run in a thread: a store whose host is frozen never answers."""
        if not self._is_querying:
            self._query = threading.Thread(target=self._run_query, daemon=True)
            self._query.start()
        assert self._query is not None
        self._query.join(_STORE_TIMEOUT_S)
        return _NO_STORE if self._is_querying else self._answer

    def _run_query(self) -> None:
        self._answer = self._query_store()

    def _query_store(self) -> str | None:
        """Describe which workers hold up the others, and in what. None: some worker still makes progress."""
        if self._store is None:
            return f"rank 0 is in {self._doing}"
        try:
            beats = self._beats()
        except RuntimeError:
            return _NO_STORE
        silent = [rank for rank, beat in enumerate(beats) if beat is None or self._is_silent(beat)]
        if silent:
            return f"{_ranks(silent)} not answer: stopped, or gone"
        known = [beat for beat in beats if beat is not None]
        return None if any(beat.idle_s <= self._timeout_s for beat in known) else blame(known)

    def _beats(self) -> list[Beat | None]:
        """Return the newest beat of each rank, in two calls because all ranks ask the one store at once."""
        assert self._store is not None
        ranks = range(self._worker.size)
        keys = list(map(_key, ranks))
        if not self._store.check(keys):
            return [self._beat_of(rank) for rank in ranks]
        return [Beat.model_validate_json(beat) for beat in self._store.multi_get(keys)]

    def _beat_of(self, rank: int) -> Beat | None:
        assert self._store is not None
        is_there = self._store.check([_key(rank)])  # ``get`` would wait for a missing key
        return Beat.model_validate_json(self._store.get(_key(rank))) if is_there else None

    def _is_silent(self, beat: Beat) -> bool:
        number, since = self._last_seen.get(beat.rank, (0, 0.0))
        if beat.number != number:
            number, since = self._last_seen[beat.rank] = beat.number, time.monotonic()
        return time.monotonic() - since > self._silent_s

    def _end(self, reason: str) -> None:
        print(f"error: {reason}; the stacks of rank {self._worker.rank}:", file=sys.stderr, flush=True)
        # faulthandler needs a file descriptor, which a replaced ``sys.stderr`` may lack.
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        try:
            self._give_up(reason)
        finally:
            # ``sys.exit`` would end this thread only.
            os._exit(HANG_EXIT_CODE)


def blame(beats: Sequence[Beat]) -> str:
    """Name the workers that hold up the others in a run without progress, given the beats of all workers.

    They have the lowest count, and if possible they are not in a collective themselves.
    """
    behind = [beat for beat in beats if beat.count == min(other.count for other in beats)]
    stuck = [beat for beat in behind if not beat.is_waiting] or behind
    doing = behind[0].doing
    if len(stuck) < len(beats):
        return f"{_ranks([beat.rank for beat in stuck])} not come out of {doing}; the others wait"
    if stuck[0].is_waiting:
        return f"all ranks wait for each other in {doing}: one may have skipped a collective"
    return f"no rank comes out of {doing}: one hangs in it, or has skipped a collective; the stacks say where each is"


def _is_in_collective(thread: int) -> bool:
    """Return whether the Python function that a thread is in belongs to a collective.

    On GPUs that function has returned, and the thread waits for the GPU instead.
    """
    frame = sys._current_frames().get(thread)
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_COLLECTIVES)


def _key(rank: int) -> str:
    return f"rayloom/watchdog/{rank}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} do"


def read_failure(run_folder: UPath) -> str | None:
    """Return why a worker of the last attempt ended itself. None: it left no note."""
    note = read(run_folder / FAILURE_FILE)
    return None if note is None else note.decode(errors="replace")


def note_failure(run_folder: UPath, reason: str) -> None:
    """Write the reason for the job to find, because a process that is ended cannot raise an error.

    Only the first reason counts. A worker that looks later may report one that has ended itself since.
    """
    note = run_folder / FAILURE_FILE
    if not note.exists():
        note.write_text(reason, encoding="utf-8")
