"""The command ``rayloom``."""

import base64
import json
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from upath import UPath

from app.cli.check import check
from app.cli.data import data
from app.cli.endpoint import TOKEN_FILE_VARIABLE, EndpointClient, local_endpoint
from app.cli.models import models
from app.cli.monitoring import Notify, receivers_of, write_files
from app.cli.options import Overrides, Storage, chosen_storage
from app.cli.plan import plan
from app.cli.runs import runs
from app.cluster import local
from app.cluster.state import SUPERVISOR_LOG, TOKEN_FILE, ClusterState, read_state, running_cluster
from app.cluster.submit import send_job
from app.cluster.submit import submit as submit_job
from app.config import Recipe, dump_recipe, load_recipe
from app.errors import ClusterError, RayloomError, RequestError, StorageError
from app.monitoring import processes
from app.ports import open_ports
from app.process_state import spare_loopback
from app.project.scaffold import create_project
from app.published.prediction import Prediction
from app.runs import CONFIG_FILE, folder_of_run
from app.serving.protocol.predict import PredictRequest
from app.storage import absolute_location, to_path
from app.training.stop_request import StopRequest, request_stop

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, compile and serve models on a Ray cluster.",
)
recipes = typer.Typer(no_args_is_help=True, help="Look at recipes.")
app.add_typer(recipes, name="recipe")
app.add_typer(models, name="models")
app.add_typer(runs, name="runs")
app.add_typer(data, name="data")
app.command()(plan)
app.command(name="monitoring")(write_files)
app.command()(check)


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
    spare_loopback()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder. Its name is that of the package, recipe and model.")],
) -> None:
    """Write a project of your own: a recipe with data, a model, a search space and a test, all of which work."""
    for file in create_project(folder):
        print(file)
    print(f"next: cd {shlex.quote(str(folder))}, then follow README.md")


@app.command()
def up(
    dashboard_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8265, or a free one.")] = None,
    serve_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8000, or a free one.")] = None,
    grpc_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8001, or a free one.")] = None,
    num_cpus: Annotated[int | None, typer.Option(min=0, help="Default: the cores of this machine.")] = None,
    monitoring: Annotated[
        bool, typer.Option("--monitoring", help="Start Prometheus and Alertmanager, which must be installed, too.")
    ] = False,
    notify: Notify = None,
    retention: Annotated[str, typer.Option(help="How long Prometheus keeps figures.")] = "15d",
) -> None:
    """Start a Ray cluster on this machine, with token authentication and on loopback."""
    if not monitoring:
        _describe(local.start(dashboard_port, serve_port, grpc_port, num_cpus))
        return
    # Both are checked before the cluster starts, so that an error leaves nothing to stop.
    receivers = receivers_of(notify)
    watched_by = processes.programs()
    cluster = local.start(dashboard_port, serve_port, grpc_port, num_cpus, watched_by)
    try:
        processes.start(cluster, receivers, retention)
    except BaseException:
        local.stop(cluster)
        raise
    _describe(cluster)


@app.command()
def down() -> None:
    """Stop the cluster that 'rayloom up' started, and remove its state. Storage stays."""
    cluster = read_state()
    if cluster is None:
        print("no local cluster is up: nothing to stop")
        return
    print(f"stopped {local.stop(cluster)} processes; models and runs stay in {cluster.storage}")


@app.command()
def status(
    ports: Annotated[bool, typer.Option("--ports", help="List every port that other machines could reach.")] = False,
) -> None:
    """Show the local cluster: addresses, models, what its supervisor did, and how many ports others could reach."""
    cluster = running_cluster()
    _describe(cluster)
    _describe_supervisor(cluster)
    _describe_monitoring(cluster)
    _describe_ports(cluster, ports)
    _describe_models(cluster)


@app.command()
def env() -> None:
    """Print what 'ray job submit' needs. Use it as: eval "$(rayloom env)"."""
    for name, value in running_cluster().client_environment().items():
        print(f"export {name}={shlex.quote(value)}")


@app.command()
def submit(
    job: str,
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
    as_json: Annotated[
        bool, typer.Option("--json", help="End with the whole result, and not only its figures.")
    ] = False,
) -> None:
    """Send a job (plan, prepare, train, tune, compile, deploy, undeploy, lifecycle) to the cluster, and follow it."""
    given = [*([recipe] if recipe else []), *(overrides or [])]
    if recipe_option is not None:
        given.insert(0, recipe_option)
    if not given:
        raise RequestError("no recipe given: pass its path or URI after the job, or - for standard input")
    raise typer.Exit(submit_job(job, given[0], given[1:], ["--json"] if as_json else []))


@app.command()
def pause(run_id: str, storage: Storage = None) -> None:
    """Ask a training run to save its state and end. It can be resumed. Its workers notice within a second or two."""
    request_stop(_train_run(run_id, storage), StopRequest.PAUSE)
    print(f"asked {run_id} to pause; resume it with: rayloom resume {run_id}")


@app.command()
def resume(run_id: str, overrides: Overrides = None, storage: Storage = None) -> None:
    """Resume a training run that was paused, stopped or interrupted, as a new job, and follow it to its end."""
    folder = _train_run(run_id, storage)
    chosen = [f"storage={absolute_location(storage)}"] if storage else []
    config = str(folder / CONFIG_FILE)
    # ``train.resume`` comes last, so that no override resumes another run.
    raise typer.Exit(send_job("train", config, [*(overrides or []), *chosen, f"train.resume={run_id}"], run_id))


@app.command()
def ui(
    host: Annotated[str, typer.Option(help="Where to listen. Other than loopback, it asks for a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8266,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token to ask for. Default: that of the endpoint, made if needed.")
    ] = None,
    storage: Storage = None,
) -> None:
    """Serve a page of all runs and models in storage, with their reports and comparisons."""
    from app.ui.server import serve_ui  # imports FastAPI

    serve_ui(chosen_storage(storage), host, port, token_file)


@app.command()
def export(
    run_id: str,
    output: Annotated[str | None, typer.Argument(help="Default: a folder here, named as the run.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint. Default: the newest.")] = None,
    for_transformers: Annotated[
        bool, typer.Option("--for-transformers", help="Write app.models.gpt in Hugging Face's layout.")
    ] = False,
    storage: Storage = None,
) -> None:
    """Write a training run's checkpoint as one model.safetensors, also of a run that was paused or failed."""
    from app.training.publication import export_checkpoint  # slow: it imports torch

    folder = to_path(absolute_location(output or run_id))
    chosen = export_checkpoint(_train_run(run_id, storage), folder, step, for_transformers)
    print(f"the weights after step {chosen.step:,} of {run_id} are in {folder}")


@app.command()
def predict(
    model: str,
    inputs: Annotated[
        list[str] | None, typer.Argument(help="Texts; paths of images with --image; rows with --row.")
    ] = None,
    image: Annotated[bool, typer.Option("--image", help="The inputs are paths of images.")] = False,
    row: Annotated[bool, typer.Option("--row", help="The inputs are rows of a table, as objects of JSON.")] = False,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="NAME=VALUE", help="A field of one record; NAME=@FILE reads a file."),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Default: the local cluster's.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(envvar=TOKEN_FILE_VARIABLE, help="Default: the local cluster's own."),
    ] = None,
) -> None:
    """Send inputs to a deployed model, and print its answer to each: for a classifier the label and its probability."""
    read: Callable[[str], Any] = _read_image if image else _read_row if row else str
    if bool(inputs) == bool(field):
        raise RequestError("give inputs, or the fields of one record with --field NAME=VALUE")
    given = [read(item) for item in inputs or []] or [_read_fields(field or [])]
    client = EndpointClient(endpoint, token_file) if endpoint else local_endpoint(running_cluster(), token_file)
    answer = client.predict(model, PredictRequest(inputs=given))
    for text, prediction in zip(inputs or [" ".join(field or [])], answer.predictions, strict=True):
        print(f"{_in_short(prediction)}  {text}")


def _read_row(text: str) -> dict[str, Any]:
    """Return a row. Raises RequestError if the text is not a JSON object."""
    try:
        row = json.loads(text)
    except ValueError as error:
        raise RequestError(f"a row is not JSON ({error}): give an object such as '{{\"age\": 40}}'") from error
    if not isinstance(row, dict):
        raise RequestError(f"a row is {text}: expected an object such as '{{\"age\": 40}}'")
    return row


def _read_fields(fields: list[str]) -> dict[str, Any]:
    """Return a record. A value that is a JSON object is a row. Raises RequestError for a field without a value."""
    record: dict[str, Any] = {}
    for given in fields:
        name, equals, value = given.partition("=")
        if not equals:
            raise RequestError(f"--field {given}: expected NAME=VALUE, or NAME=@FILE for the content of a file")
        record[name] = _read_image(value[1:]) if value.startswith("@") else value
        if value.startswith("{"):
            record[name] = _read_row(value)
    return record


def _in_short(prediction: Prediction) -> str:
    """Return a label with its probability; the whole answer of another task as JSON."""
    if prediction.label is None or prediction.scores is None:
        return prediction.model_dump_json(exclude_none=True)
    return f"{prediction.label}  {prediction.scores[prediction.label]:.3f}"


@recipes.command()
def show(recipe: str, overrides: Overrides = None) -> None:
    """Print the resolved recipe, every default written out."""
    print(dump_recipe(load_recipe(recipe, overrides or [])), end="")


@recipes.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    print(json.dumps(Recipe.model_json_schema(), indent=2))


def main() -> NoReturn:
    """Run the command line. An error is one sentence on standard error, and the exit code is 2."""
    sys.path.insert(0, str(Path.cwd()))  # for modules that a recipe names, as with 'python -m jobs.train'
    try:
        app()
    except RayloomError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def _describe(cluster: ClusterState) -> None:
    print(f"dashboard  {cluster.dashboard}  (asks for the token, the content of {TOKEN_FILE})")
    print(f"endpoint   {cluster.endpoint}  (answers once a model is deployed; its API is at /docs)")
    print(f"gRPC       {cluster.grpc_endpoint}")
    print(f"storage    {cluster.storage}")
    if cluster.monitoring:
        print(f"monitoring {cluster.monitoring.page}  (Prometheus is at {cluster.monitoring.prometheus_url})")


def _describe_supervisor(cluster: ClusterState) -> None:
    """Print whether the supervisor runs, and what it did last."""
    watched = "watches Ray's control processes" if cluster.supervisors() else "has ended: nothing restarts Ray"
    print(f"supervisor {watched}; its log is {SUPERVISOR_LOG}")
    lines = SUPERVISOR_LOG.read_text(encoding="utf-8").splitlines() if SUPERVISOR_LOG.exists() else []
    for line in lines[-3:]:
        print(f"supervisor {line}")


def _describe_monitoring(cluster: ClusterState) -> None:
    """Print how many of the processes that watch the cluster run. Nobody restarts them."""
    if cluster.monitoring:
        wanted, running = len(cluster.monitoring.model_dump(exclude_none=True)), len(cluster.watchers())
        print(f"monitoring {running} of {wanted} processes run; their logs are in {processes.CONFIGURATION}")


def _describe_models(cluster: ClusterState) -> None:
    """Print the deployed models, and a command to paste for each."""
    try:
        endpoint = local_endpoint(cluster)
        served, natural = endpoint.models(), endpoint.natural_models()
    except ClusterError as error:
        print(f"models     {error}")
        return
    titles = [f"{model.name} version {model.version}{f' ({model.reason})' if model.reason else ''}" for model in served]
    print(f"models     {', '.join(titles) or 'none deployed'}")
    for name in dict.fromkeys(model.name for model in served):
        print(f"try        {endpoint.curl(name, name in natural)}")


def _describe_ports(cluster: ClusterState, are_listed: bool) -> None:
    """Count or list the ports that Ray opens on other interfaces than loopback."""
    exposed = [port for port in open_ports(cluster.processes()) if not port.is_loopback]
    more = ":" if are_listed else "; 'rayloom status --ports' lists them"
    print(f"ports      {len(exposed)} that other machines could reach, unless a firewall is in front{more}")
    for port in exposed if are_listed else ():
        print(f"  {port.port:>5}  {port.address:<18} {port.process}")


def _train_run(run_id: str, storage: str | None) -> UPath:
    """Return the folder of a training run. Raise StorageError if there is none."""
    folder = folder_of_run(chosen_storage(storage), "train", run_id)
    if not (folder / CONFIG_FILE).exists():
        raise StorageError(f"{str(folder)!r} is no training run: check the run's id, and --storage")
    return folder


def _read_image(path: str) -> str:
    try:
        return base64.b64encode(Path(path).read_bytes()).decode()
    except OSError as error:
        raise RequestError(
            f"image {path!r} cannot be read ({error.strerror}): give the path of a PNG or JPEG file"
        ) from error
