"""The command ``rayloom``."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from app.cli.lazy import lazy_group
from app.errors import RayloomError

_COMMANDS = {
    "init": "offline:init",
    "up": "cluster:up",
    "down": "cluster:down",
    "status": "cluster:status",
    "env": "cluster:env",
    "submit": "jobs:submit",
    "pause": "jobs:pause",
    "resume": "jobs:resume",
    "runs": "runs",
    "models": "models",
    "data": "data",
    "recipes": "recipes",
    "predict": "predict:predict",
    "plan": "plan:plan",
    "check": "check:check",
    "ui": "offline:ui",
    "export": "offline:export",
    "monitoring": "monitoring:write_files",
}
"""Each command's function, or the module with a group of them."""

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
    sys.path.insert(0, str(Path.cwd()))  # for modules that a recipe names, as with 'python -m jobs.train'
    try:
        app()
    except RayloomError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
