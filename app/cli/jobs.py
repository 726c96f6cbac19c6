"""The commands that send jobs, and follow, stop, pause and resume them."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from app.cli.options import Json, Overrides, Quiet, RunId, Storage, Verbose, detail_of, train_run
from app.cli.tables import aligned, print_json
from app.cluster.packages import known_jobs
from app.cluster.queue import Priority
from app.cluster.queue_view import listed_jobs
from app.cluster.state import read_state
from app.cluster.submit import cluster_api, follow_job, send_job, stop_job
from app.cluster.submit import submit as submit_job
from app.config import load_job_recipe
from app.config.overrides import override_of
from app.errors import RayloomError, RequestError
from app.runs import CONFIG_FILE
from app.storage import absolute_location, open_storage
from app.training.stop_request import StopRequest, request_stop

_SERVING = ("deploy", "lifecycle")


def submit(
    job: Annotated[str, typer.Argument(autocompletion=lambda: known_jobs(Path.cwd()))],
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Path or URI of a recipe. - is standard input. For deploy and undeploy also a model's name."
        ),
    ] = None,
    overrides: Overrides = None,
    recipe_option: Annotated[
        str | None, typer.Option("--recipe", help="The recipe, instead of the second argument.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result, not only its figures.")] = False,
    priority: Annotated[
        Priority, typer.Option(help="Priority while the cluster is full; 'rayloom jobs' lists the waiting jobs.")
    ] = "normal",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Send a job (plan, prepare, train, tune, compile, deploy, undeploy, lifecycle) to the cluster, and follow it."""
    given = [*([recipe] if recipe else []), *(overrides or [])]
    if recipe_option is not None:
        given.insert(0, recipe_option)
    if not given:
        raise RequestError("no recipe is given: pass its path or URI after the job, or - for standard input").of(
            "recipe.missing"
        )
    code = submit_job(job, given[0], given[1:], ["--json"] if as_json else [], detail_of(quiet, verbose), priority)
    if code == 0 and job in _SERVING and not (as_json or quiet):  # for programs the RESULT is the last line
        _print_example(job, given[0], given[1:])
    raise typer.Exit(code)


def _print_example(job: str, recipe: str, overrides: list[str]) -> None:
    """Print a command that queries the deployed model, if it was deployed to the local cluster."""
    from app.cli.endpoint import local_endpoint
    from app.cli.examples import commands_for

    cluster = read_state()
    if recipe == "-" or cluster is None or os.environ.get("RAY_API_SERVER_ADDRESS") != cluster.dashboard:
        return
    with suppress(RayloomError):  # the job succeeded, even if the endpoint does not answer
        loaded = load_job_recipe(job, recipe, overrides)
        for command in commands_for(
            local_endpoint(cluster), open_storage(loaded.storage or cluster.storage), loaded.name
        ):
            print(f"ask it: {command}")


def jobs(as_json: Json = False) -> None:
    """List the running jobs, then the waiting jobs in the order of their turns."""
    rows = listed_jobs(cluster_api())
    if as_json:
        print_json([row.model_dump() for row in rows])
        return
    if not rows:
        print("no job runs or waits")
        return
    for line in aligned([("job", "user", "priority", "state", "waits for"), *(row.cells for row in rows)]):
        print(line)


def follow(
    job: Annotated[str, typer.Argument(help="The job's id, or its beginning.")],
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show the log of a job until its end, as 'rayloom submit' does."""
    raise typer.Exit(follow_job(job, detail_of(quiet, verbose)))


def stop(
    named: Annotated[
        str, typer.Argument(metavar="JOB|RUN", help="The id of a job or a training run, or its beginning.")
    ],
    storage: Storage = None,
) -> None:
    """Stop a job, or a training run. Training saves its state first, and can be resumed."""
    if stopped := stop_job(named):
        print(f"asked {stopped} to stop")
        return
    _ask(named, storage, StopRequest.STOP, "stopped")


def pause(run_id: RunId, storage: Storage = None) -> None:
    """Ask a training run to save its state and end. It can be resumed. Its workers notice within a second or two."""
    _ask(run_id, storage, StopRequest.PAUSE, "paused")


def _ask(named: str, storage: str | None, request: StopRequest, done: str) -> None:
    """Ask a training run to stop or pause. Raises RequestError if it does not run."""
    run = train_run(named, storage)
    if run.status != "running":
        raise RequestError(f"run {run.run_id} is {run.status}: only a running job or training run can be {done}").of(
            "run.not_running"
        )
    request_stop(run.path, request)
    print(f"asked {run.run_id} to {request.name.lower()}; resume it with: rayloom resume {run.run_id}")


def resume(
    run_id: RunId,
    overrides: Overrides = None,
    storage: Storage = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Resume a training run that was paused, stopped or interrupted, as a new job, and follow it to its end."""
    run = train_run(run_id, storage)
    chosen = [override_of("storage", absolute_location(storage))] if storage else []
    config = str(run.path / CONFIG_FILE)
    # ``train.resume`` comes last, so that no override resumes another run.
    arguments = [*(overrides or []), *chosen, f"train.resume={run.run_id}"]
    raise typer.Exit(send_job("train", config, arguments, run.run_id, detail=detail_of(quiet, verbose)))
