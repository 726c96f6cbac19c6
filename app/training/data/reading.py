"""``train.loader.num_workers: auto``: processes that read ahead, until training hardly waits for data.

The time that reading takes shows what keeps a worker waiting: it is spent on a core, ready but without one, or waiting
for a disk or the network.
"""

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

import psutil
import torch

from app.telemetry.record import BOUNDS, MAX_STALL, NO_TIME, Medium, ReadAhead, ReadTime, bound_of, describe_readers

_MAX_PROCESSES, _MAX_PREFETCH = 32, 16
_WINDOW_S, _WINDOW_BATCHES = 1.0, 8
"""The minimum seconds and micro-batches between decisions."""
_MIN_CORES = 0.5
"""Cores for reading where training uses all: processes that wait for the network need few."""
_MARGIN = 1.2
_IDLE = 0.7
"""Share of busy processes up to which there are enough: then only single micro-batches are late."""
_MIN_GAIN, _MAX_USELESS = 1.05, 2
"""A change that gains less is useless. After this many in a row, the settings stay."""
_PROCESS_BYTES = 64 * 2**20
"""Assumed memory of a process without its micro-batches, until one is measured."""


@dataclass(frozen=True)
class Resources:
    """What reading may use of a machine."""

    cores: float
    free_bytes: Callable[[], float]
    process_bytes: Callable[[], float]
    """Largest memory of a process that reads ahead, which no other process shares; 0 if there is none."""

    @classmethod
    def of_machine(cls, device: torch.device) -> "Resources":
        """Return this worker's share of the cores that training leaves free, and of half of the free memory."""
        from app.engines.architecture import granted_memory, usable_cores  # other runs do not need it

        workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun and Ray Train set it
        own = torch.get_num_threads() if device.type == "cpu" else 1
        cores = max(usable_cores() / workers - own, _MIN_CORES)

        def free_bytes() -> float:
            return min(psutil.virtual_memory().available, granted_memory()) / 2 / workers

        return cls(cores, free_bytes, _largest_child)


def _largest_child() -> float:
    sizes = [0.0]
    for process in psutil.Process().children():
        try:
            sizes.append(float(process.memory_full_info().uss))
        except psutil.Error:  # it has ended since
            continue
    return max(sizes)


@dataclass
class _Window:
    """Sums over the micro-batches since the last decision."""

    batches: int = 0
    waited_s: float = 0.0
    elapsed_s: float = 0.0
    read: ReadTime = NO_TIME
    largest_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.elapsed_s >= _WINDOW_S and self.batches >= _WINDOW_BATCHES

    @property
    def stall(self) -> float:
        return self.waited_s / self.elapsed_s

    @property
    def busy(self) -> float:
        """Processes that must read at once, so that training need not wait."""
        return self.read.seconds / max(self.elapsed_s - self.waited_s, 1e-6)


@dataclass
class ReadingControl:
    """Raises the number of processes, or how far each reads ahead. The order of the samples stays the same."""

    resources: Resources
    source: Medium
    setting: ReadAhead
    """How to read from now on."""
    limit: Literal["cores", "memory"] | None = None
    """What prevents more processes, if anything."""
    _window: _Window = field(default_factory=_Window)
    _rate: float = 0.0
    """Micro-batches a second in the last window after which the setting was changed."""
    _num_useless: int = 0
    _has_told: bool = False

    @classmethod
    def of_worker(cls, device: torch.device, source: Medium, setting: ReadAhead) -> Self:
        """Return the control of a worker that begins with ``setting``."""
        # torch advises against more processes than cores, whatever they wait for.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        return cls(Resources.of_machine(device), source, setting)

    def observe(self, waited_s: float, elapsed_s: float, read: ReadTime, num_bytes: int) -> str | None:
        """Count a micro-batch of training. Return a line for the log if the setting changes or cannot suffice.

        Args:
            waited_s: seconds that training waited for it.
            elapsed_s: seconds since the micro-batch before was there.
            read: what reading it took.
            num_bytes: its size in memory.
        """
        window = self._window
        window.batches += 1
        window.waited_s += waited_s
        window.elapsed_s += elapsed_s
        window.read += read
        window.largest_bytes = max(window.largest_bytes, num_bytes)
        if not window.is_full:
            return None
        self._window = _Window()
        return self._decide(window)

    def _decide(self, window: _Window) -> str | None:
        if window.stall <= MAX_STALL:
            self.limit = None
            return None
        rate = window.batches / window.elapsed_s
        self._num_useless = self._num_useless + 1 if rate < _MIN_GAIN * self._rate else 0
        before, self._rate = self.setting, rate
        if self._num_useless < _MAX_USELESS:
            self.setting = self._raised(window)
        waits = f"reading: {window.stall:.0%} of a step is spent waiting for data"
        if self.setting != before:
            processes, prefetch = self.setting
            return f"{waits}: now {describe_readers(processes)}, {prefetch} micro-batches ahead each"
        if self._has_told:
            return None
        self._has_told = True
        bound = self.limit or bound_of(window.read, self.source)
        return f"{waits}, bound by {BOUNDS[bound]}, {describe_readers(self.setting.processes)}: more would not help"

    def _raised(self, window: _Window) -> ReadAhead:
        """Return more processes or a longer prefetch, as far as cores and memory allow."""
        processes, prefetch = self.setting
        room = self.resources.free_bytes()
        if 0 < window.busy < _IDLE * processes and prefetch < _MAX_PREFETCH:
            has_room = processes * prefetch * window.largest_bytes < room
            return ReadAhead(processes, 2 * prefetch) if has_room else self.setting
        wanted = max(math.ceil(_MARGIN * window.busy), processes + 1)
        wanted = min(wanted, 2 * processes + 1, _MAX_PROCESSES)
        on_core = (window.read.cpu_s + window.read.queued_s) / max(window.read.seconds, 1e-9)
        by_cores = math.floor(self.resources.cores / max(on_core, 0.01))
        size = (self.resources.process_bytes() or _PROCESS_BYTES) + prefetch * window.largest_bytes
        by_memory = processes + math.floor(room / size)
        self.limit = None
        if wanted > min(by_cores, by_memory):
            self.limit = "cores" if by_cores <= by_memory else "memory"
        return ReadAhead(max(processes, min(wanted, by_cores, by_memory)), prefetch)
