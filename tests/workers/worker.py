"""A fork that becomes a Ray worker."""

import os
import runpy
import sys
from pathlib import Path

from ray._private.runtime_env.context import RuntimeEnvContext
from ray._private.utils import update_envs
from ray._private.workers import setup_worker

_SETUP = "setup_worker.py"
"""Ray's script that prepares the environment of a worker, if its job has one, and then runs the worker's script."""


def main() -> None:
    """Run the worker's script, which a command starts directly or through ``setup_worker.py``."""
    os.setpgid(0, 0)  # Ray ends a worker with its process group
    worker = sys.argv[1:]
    if worker[0].endswith(_SETUP):
        arguments, worker = setup_worker.parser.parse_known_args(worker[1:])
        context = RuntimeEnvContext.deserialize(arguments.serialized_runtime_env_context or "{}")
        update_envs(context.env_vars)
        _change_folder(context.command_prefix)
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(worker[0]).parent), *given, *(path for path in sys.path if path and path not in given)]
    sys.argv = worker
    runpy.run_path(worker[0], run_name="__main__")


def _change_folder(prefix: list[str]) -> None:
    match prefix:
        case ["cd", folder, "&&"]:
            os.chdir(folder)
        case []:
            pass
        case _:
            raise ValueError(f"a forked worker cannot run the command prefix {prefix}")
