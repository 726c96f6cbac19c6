"""The part of a folder that a power cut would leave, replayed from the system calls of a program under strace."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers import ROOT

_WRITES, _SYNCS = ("write", "pwrite64", "writev"), ("fsync", "fdatasync")
_RENAMES, _REMOVALS = ("rename", "renameat", "renameat2"), ("unlink", "unlinkat", "rmdir")
_CALLS = ",".join((*_WRITES, *_SYNCS, *_RENAMES, *_REMOVALS, "openat", "link", "linkat", "mkdir"))


@dataclass(frozen=True)
class Call:
    """A system call that succeeded."""

    name: str
    paths: list[Path]
    """The files that it names, absolute."""
    creates: bool


@dataclass
class Disk:
    """What of a folder is on the disk, and what only in memory."""

    folder: Path
    unsynced: set[Path] = field(default_factory=set)
    """Files whose content, and folders whose names, changed since they were synced."""

    def apply(self, call: Call) -> None:
        """Note what a call changes."""
        paths = [path for path in call.paths if path.is_relative_to(self.folder)]
        if call.name in _WRITES:
            self.unsynced |= set(paths)
        elif call.name in _SYNCS:
            self.unsynced -= set(paths)
        elif call.name == "openat":
            self.unsynced |= {path.parent for path in paths if call.creates and path != self.folder}
        else:
            self.unsynced |= {path.parent for path in paths if path != self.folder}
        if call.name in _RENAMES and len(paths) == 2:
            self.unsynced = {_moved(path, *paths) for path in self.unsynced}
        if call.name in _REMOVALS:
            self.unsynced -= set(paths)

    def missing(self, path: Path) -> list[str]:
        """Return what a power cut would lose of a folder: content, names in it, and its own name."""
        needed = {path, *path.parents}
        lost = [other for other in self.unsynced if other in needed or other.is_relative_to(path)]
        return sorted(str(other.relative_to(self.folder)) for other in lost)


def _moved(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path


def calls_of(module: str, folder: Path) -> Iterator[Call]:
    """Run ``python -m MODULE FOLDER`` under strace, and yield its calls in the order in which they ended."""
    trace = folder.with_suffix(".trace")
    command = ["strace", "-f", "-y", "-s", "0", "-e", f"trace={_CALLS}", "-e", "signal=none", "-o", str(trace)]
    subprocess.run([*command, sys.executable, "-m", module, str(folder)], cwd=ROOT, check=True)
    begun: dict[str, str] = {}
    for line in trace.read_text(encoding="utf-8", errors="replace").splitlines():
        process, _, text = line.partition(" ")
        text = text.strip()
        if text.endswith("<unfinished ...>"):
            begun[process] = text.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>", text):
            text = begun.pop(process) + text[resumed.end() :]
        if (call := re.match(r"(\w+)\((.*)\)\s+= (\d+)", text)) is not None:
            yield Call(call[1], list(_paths(call[1], call[2])), "O_CREAT" in call[2])


def _paths(name: str, arguments: str) -> Iterator[Path]:
    """Yield the file of a descriptor, or the files that are named, from the folder of a descriptor or absolute."""
    if name in (*_WRITES, *_SYNCS):
        yield from map(Path, re.findall(r"^\d+<(/[^>]*)>", arguments))
        return
    base = Path("/")
    for descriptor, path in re.findall(r'(?:\w+<(/[^>]*)>)|"((?:[^"\\]|\\.)*)"', arguments):
        if descriptor:
            base = Path(descriptor)
        else:
            yield base / path
