"""Commands that need no cluster: start a project, look at storage, and export weights."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from app.cli.options import RunId, Storage, chosen_storage, train_run
from app.project.scaffold import create_project
from app.storage import absolute_location, to_path


def init(
    folder: Annotated[Path, typer.Argument(help="A new folder. Its name is that of the package, recipe and model.")],
) -> None:
    """Write a working project: a recipe with data, a model, a search space and a test."""
    for file in create_project(folder):
        print(file)
    print(f"next: cd {shlex.quote(str(folder))}, then follow README.md")


def ui(
    host: Annotated[str, typer.Option(help="Address. Other than loopback, it requires a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free port.")] = 8266,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token to ask for. Default: that of the endpoint, made if needed.")
    ] = None,
    storage: Storage = None,
) -> None:
    """Serve a page of all runs and models in storage, with their reports and comparisons."""
    from app.ui.server import serve_ui  # imports FastAPI

    serve_ui(chosen_storage(storage), host, port, token_file)


def export(
    run_id: RunId,
    output: Annotated[str | None, typer.Argument(help="Default: a folder here, named as the run.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint. Default: the newest.")] = None,
    for_transformers: Annotated[
        bool, typer.Option("--for-transformers", help="Write app.models.gpt in Hugging Face's layout.")
    ] = False,
    storage: Storage = None,
) -> None:
    """Write a training run's checkpoint as one model.safetensors, also of a run that was paused or failed."""
    from app.training.publication import export_checkpoint  # slow: it imports torch

    run = train_run(run_id, storage)
    folder = to_path(absolute_location(output or run.run_id))
    chosen = export_checkpoint(run.path, folder, step, for_transformers)
    print(f"the weights after step {chosen.step:,} of {run.run_id} are in {folder}")
