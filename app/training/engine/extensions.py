"""DeepSpeed's operators in C++, which are compiled on a machine at their first use."""

import shutil
import time
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol

import psutil
from filelock import FileLock

_POLL_S = 0.5


class ExtensionBuilder(Protocol):
    """What compiles an extension with ``torch.utils.cpp_extension``: an ``OpBuilder`` of DeepSpeed."""

    name: str

    def load(self) -> Any:
        """The extension; compiled, unless it is in its folder already."""


def load_extension(builder: ExtensionBuilder) -> Any:
    """What ``builder`` loads; DeepSpeed, which remembers what is loaded, finds it too.

    Where the extension has to be compiled, one process does so, says so, and the others wait. torch guards a build
    with a file that stays if its process is killed, and all later ones would wait for it without a word and without
    end. Our lock is the kernel's, which frees it with the process; and whoever holds it clears up what the dead left.
    """
    if _is_installed(builder):
        return builder.load()
    folder = _build_folder(builder.name)
    with FileLock(folder.with_name(f"{folder.name}.rayloom.lock")):
        _clear_up_after_the_dead(folder)
        if not (folder / f"{builder.name}.so").exists():
            print(f"compiling {builder.name} in {folder}: a minute or more, once on this machine", flush=True)
        return builder.load()


def _is_installed(builder: ExtensionBuilder) -> bool:
    """Whether the extension was compiled with DeepSpeed itself, for the accelerator in use."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(builder.name)) and accelerator_name == get_accelerator().device_name()


def _build_folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def _clear_up_after_the_dead(folder: Path) -> None:
    """Remove a build that was killed, with torch's lock in it.

    The folder is moved away first: a compiler that has outlived its process writes into it there, not into ours.
    """
    lock = folder / "lock"
    while lock.exists() and _is_open(lock):  # another program compiles the same
        time.sleep(_POLL_S)
    if lock.exists():
        aside = mkdtemp(prefix=f"{folder.name}.", dir=folder.parent)
        folder.rename(Path(aside) / folder.name)
        shutil.rmtree(aside, ignore_errors=True)


def _is_open(file: Path) -> bool:
    """Whether a process has ``file`` open, as torch has its lock while it builds.

    Another user's process, which we may not look at, counts as dead.
    """
    path = str(file.resolve())  # as the system names open files: home, cache or folder may be a link
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or ended while we looked
            if any(file.path == path for file in process.open_files()):
                return True
    return False
