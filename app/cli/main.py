"""The command ``rayloom``."""

import errno
import importlib
import io
import os
import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError
from typer.exceptions import TyperException

from app.cli.lazy import lazy_group
from app.errors import RayloomError

_COMMANDS = {
    "init": "offline:init",
    "up": "cluster:up",
    "down": "cluster:down",
    "status": "cluster:status",
    "env": "cluster:env",
    "node": "cluster:node",
    "submit": "jobs:submit",
    "jobs": "jobs:jobs",
    "follow": "jobs:follow",
    "stop": "jobs:stop",
    "pause": "jobs:pause",
    "resume": "jobs:resume",
    "runs": "runs",
    "models": "models",
    "data": "data",
    "recipes": "recipes",
    "predict": "predict:predict",
    "chat": "chat:chat",
    "plan": "plan:plan",
    "check": "check:check",
    "ui": "offline:ui",
    "export": "offline:export",
    "monitoring": "monitoring:write_files",
}
"""Each command's function, or the module with a group of them."""
_GROUPS = [place for place in _COMMANDS.values() if ":" not in place]

app = typer.Typer(
    cls=lazy_group({name: f"app.cli.{place}" for name, place in _COMMANDS.items()}),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, compile and serve models on a Ray cluster.",
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"rayloom {version_of('rayloom')}")
        raise typer.Exit


@app.callback()
def _begin(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print Rayloom's version.")
    ] = False,
) -> None:
    from app.process_state import spare_loopback

    spare_loopback()


def main() -> NoReturn:
    """Run the command line. An error is one sentence on standard error, and the exit code is 2."""
    for stream in (sys.stdin, sys.stdout):  # a message or a file's name may not be UTF-8
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="surrogateescape")
    sys.path.insert(0, str(Path.cwd()))  # for modules that a recipe names, as with 'python -m jobs.train'
    code = 0
    try:
        try:
            code = app(standalone_mode=False) or 0
        finally:
            sys.stdout.flush()
    except RayloomError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except TyperException as error:
        if message := _explain(error):  # else the help was shown
            print(f"error: {message}", file=sys.stderr)
        code = error.exit_code
    except OSError as error:
        _exit_if_output_fails(error)
    sys.exit(code)


def _explain(error: TyperException) -> str:
    """Return a message for an error of Typer."""
    message = error.format_message().rstrip(".")
    if isinstance(cause := error.__cause__, ValidationError):
        from app.problems import problems_of

        given = cause.errors()[0]["input"]
        problem = next(problems_of(cause, given))
        option = message.removeprefix("Invalid value for ").partition(": ")[0].strip("'")
        expected = problem.expected.rpartition(" is not one of ")[2].rstrip(".")
        message = f"{option} is {given!r}: expected {expected}"
    elif unknown := re.fullmatch("No such command '(.+)'", message):
        if places := _places_of(unknown[1]):
            return f"no command {unknown[1]!r} here: did you mean {' or '.join(map(repr, places))}?"
    elif key := re.match(r"No such option: --([a-z]\w*\.\S+)", message):
        return f"--{key[1]} is no option: write a key of the recipe without dashes, as in train.epochs=3"
    context = getattr(error, "ctx", None)
    return f"{message}; see '{context.command_path} -h'" if message and context else message


def _places_of(command: str) -> list[str]:
    """Return the whole commands that a word may stand for: a job to submit, or a command of a group."""
    from app.cluster.packages import known_jobs

    jobs = [f"rayloom submit {command}"] if command in known_jobs(Path.cwd()) else []
    named = {group: importlib.import_module(f"app.cli.{group}") for group in _GROUPS}
    groups = {group: typer.main.get_group(getattr(module, group)) for group, module in named.items()}
    return [*jobs, *(f"rayloom {name} {command}" for name, group in groups.items() if command in group.commands)]


def _exit_if_output_fails(error: OSError) -> None:
    """Exit with one sentence if standard output cannot be written. Raise other errors again."""
    try:
        print(flush=True)
    except OSError:
        # Python would report at its exit that it cannot write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # else the reader has closed the pipe, as 'head -1' does
            print(f"error: the output cannot be written ({error.strerror}): free some space", file=sys.stderr)
        sys.exit(2)
    raise error
