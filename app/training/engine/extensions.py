"""DeepSpeed's C++ extensions, which are compiled on a machine at their first use."""

import os
import shutil
import sysconfig
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol

import psutil
from filelock import FileLock

from app.errors import TrainingError
from app.process_state import environment_variable
from app.python_headers import require_python_headers
from app.torch_internals import extension_folder
from app.training.engine.deepspeed_internals import is_prebuilt

_POLL_S = 0.5


class ExtensionBuilder(Protocol):
    """An ``OpBuilder`` of DeepSpeed, which compiles one extension with ``torch.utils.cpp_extension``."""

    name: str

    def load(self) -> Any:
        """Return the extension. Compile it, unless its folder has it already."""


def load_extension(builder: ExtensionBuilder) -> Any:
    """Return the extension of ``builder``. DeepSpeed remembers it, and uses the same one.

    If it must be compiled, one process does so and says so, and the others wait. torch guards a build with a file that
    stays if its process is killed. All later processes would wait for it silently and forever. Our lock is the
    kernel's, which frees it when the process ends, and its holder removes a killed build.

    Raises:
        TrainingError: it must be compiled, and this machine lacks Python's headers.
    """
    if is_prebuilt(builder.name):
        return builder.load()
    folder = extension_folder(builder.name)
    with FileLock(folder.with_name(f"{folder.name}.rayloom.lock")), _scripts_on_path():
        _remove_killed_build(folder)
        if not (folder / f"{builder.name}.so").exists():
            require_python_headers(f"DeepSpeed's {builder.name}", TrainingError)
            print(f"compiling {builder.name} in {folder}: a minute or more, once on this machine", flush=True)
        return builder.load()


def _scripts_on_path() -> AbstractContextManager[None]:
    """Let torch find ``ninja``, which is beside Python and on the path only in an activated environment."""
    folders = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    return environment_variable("PATH", os.pathsep.join(folders))


def _remove_killed_build(folder: Path) -> None:
    """Remove a build whose process was killed, with torch's lock in it.

    The folder is moved away first. A compiler that outlived its process then writes there, not into the new build.
    """
    lock = folder / "lock"
    while lock.exists() and _is_open(lock):  # another program compiles the same
        time.sleep(_POLL_S)
    if lock.exists():
        aside = mkdtemp(prefix=f"{folder.name}.", dir=folder.parent)
        folder.rename(Path(aside) / folder.name)
        shutil.rmtree(aside, ignore_errors=True)


def _is_open(file: Path) -> bool:
    """Return whether a process has ``file`` open, as torch has its lock while it builds.

    Another user's process, which we cannot inspect, counts as dead.
    """
    # The system names open files without links, and the home, the cache or the folder may be one.
    path = str(file.resolve())
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or ended while we looked
            if any(file.path == path for file in process.open_files()):
                return True
    return False
