"""List the versions of models, and choose the one in production."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from app.cli.endpoint import local_endpoint
from app.cli.options import Json, Storage, chosen_storage
from app.cli.tables import print_json
from app.cli.versions import description_of, table_of
from app.cluster.state import read_state
from app.config import recipe_of_model
from app.config.overrides import override_of, require_once
from app.errors import ClusterError, RequestError, StorageError
from app.process_state import sigterm_exits
from app.repository.aliases import Alias
from app.repository.repository import Repository
from app.runs import JSON_HELP, Run, execute
from app.storage import to_path

models = typer.Typer(no_args_is_help=True, help=__doc__)

Version = Annotated[int, typer.Argument(min=1)]


@models.command("list")
def list_models(storage: Storage = None, as_json: Json = False) -> None:
    """Show every version of every model."""
    root = chosen_storage(storage)
    with _repository(storage) as repository:
        listed = repository.list_versions()
    if as_json:
        print_json([{"name": one.name, "version": one.version, "aliases": one.aliases} for one in listed])
    elif not listed:
        print(f"no models in {root}: 'rayloom submit compile RECIPE' makes one; --storage names another storage")
    else:
        print("\n".join(table_of(listed)))
        print(f"in {root}", file=sys.stderr)


@models.command()
def show(
    name: str,
    version: Annotated[int | None, typer.Argument(min=1, help="Default: production, else the newest.")] = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show a version's manifest, with the data, the recipe and the code that it came from."""
    with _repository(storage) as repository:
        manifest = repository.manifest(name, version or repository.current(name))
        aliases = repository.aliases(name).of(manifest.version)
        folder = str(repository.folder(name, manifest.version))
    if as_json:
        print(manifest.model_dump_json())
        return
    print("\n".join(description_of(manifest, aliases, folder)))


@models.command()
def promote(
    name: str,
    version: Version,
    alias: Annotated[Alias, typer.Option(help="What the version becomes.")] = "production",
    storage: Storage = None,
) -> None:
    """Promote a version to production, canary or shadow."""
    with _repository(storage) as repository:
        aliases = repository.promote(name, version, alias)
    print(f"{name}, version {version}, is {' and '.join(aliases.of(version))} now")
    _print_what_is_served(name, version, alias)


@models.command()
def rollback(name: str, storage: Storage = None) -> None:
    """Put the previous production version into production again. A second rollback undoes the first."""
    with _repository(storage) as repository:
        repository.rollback(name)
        version = repository.production(name)
    print(f"{name}, version {version}, is in production again")
    _print_what_is_served(name, version, "production")


@models.command()
def delete(name: str, version: Version, storage: Storage = None) -> None:
    """Remove a version for good, unless an alias names it or the local endpoint serves it."""
    cluster = read_state()
    endpoint = local_endpoint(cluster) if cluster else None
    if endpoint and endpoint.holds(name, version):
        raise StorageError(
            f"model {name!r}, version {version}, is served at {endpoint.url}: deploy another version first, with "
            f"'rayloom submit deploy RECIPE serve.version=N' ({name} for RECIPE has default settings), or "
            f"without the canary, shadow or stage that it is; or "
            f"serve the model no longer, with 'rayloom submit undeploy {name}'"
        ).of("version.served")
    with _repository(storage) as repository:
        repository.delete(name, version)
    print(f"deleted {name}, version {version}; its number is not given again")


@models.command()
def verify(
    name: str,
    version: Annotated[int | None, typer.Argument(min=1, help="Default: all of them.")] = None,
    storage: Storage = None,
) -> None:
    """Compare every file of a version, or of all, with what was published. Name each file that was changed."""
    damages: list[str] = []
    with _repository(storage) as repository:
        for checked in [version] if version else repository.versions(name):
            with _collected(damages):
                repository.verify(name, checked)
                print(f"{name}, version {checked}: every byte as published")
        with _collected(damages):
            repository.verify_config(name)
    if damages:
        # ``verify_config`` reads a manifest, too, so it may find the same damage again.
        raise StorageError("\n       ".join(dict.fromkeys(damages))).of("version.damaged")


@models.command()
def export(
    name: str,
    where: Annotated[
        list[str], typer.Argument(metavar="[VERSION] FOLDER", help="Default: production, else the newest.")
    ],
    storage: Storage = None,
) -> None:
    """Write a version into a folder from which 'tritonserver --model-repository FOLDER' serves it."""
    *numbers, folder = where
    if len(numbers) > 1 or not all(map(str.isdecimal, numbers)):
        raise RequestError(f"given: {' '.join(where)!r}; expected a folder, or a version's number and a folder").of(
            "arguments.invalid"
        )
    with _repository(storage) as repository:
        version = int(numbers[0]) if numbers else repository.current(name)
        model = repository.export_to_triton(name, version, to_path(Path(folder).absolute()))
    print(f"{name}, version {version}, is in {model}; serve it with: tritonserver --model-repository {model.parent}")


@models.command("import")
def import_command(
    name: str,
    source: Annotated[Path, typer.Argument(help="A .onnx or .pt2 file, or a folder of Triton's or Hugging Face's.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as compile.engines=[onnxruntime].")
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            help="Rows to compare on: npz, parquet, csv or jsonl. A language model takes texts. Default: random ones."
        ),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="The labels by column: JSON, or one a line.")] = None,
    processor: Annotated[
        Path | None, typer.Option(help="Folder with a tokenizer or image processor, in Hugging Face's layout.")
    ] = None,
    scores: Annotated[str | None, typer.Option(help="The output whose columns are the labels.")] = None,
    size: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N[,N]", help="For random rows: the values of a size that varies.")
    ] = None,
    storage: Storage = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Publish a model that was trained elsewhere, by the gates and measurements of jobs.compile."""
    from app.compile.imported.run import Given, import_model  # imports ONNX and the engines

    root = chosen_storage(storage, is_new=True)
    require_once(overrides or [])
    recipe = recipe_of_model(name, "compile", [*(overrides or []), override_of("storage", str(root))])
    given = Given(source, samples, labels, processor, scores, dict(map(_parse_size, size or [])))
    with sigterm_exits():  # otherwise the model's copy would stay in the temporary folder
        result = execute(Run.start("compile", recipe), partial(import_model, given=given))
    if as_json or result.status != "failed":  # else the error was printed
        print(result.to_line(as_json))
    if result.status == "failed":
        raise typer.Exit(1)
    version = int(result.artifacts["model"].rpartition("/")[2])
    _print_what_is_served(name, version, "production")


def _parse_size(given: str) -> tuple[str, list[int]]:
    """Return a name and its values. Raises RequestError."""
    name, _, values = given.rpartition("=")
    parts = values.split(",")
    if not name or not all(part.isdecimal() and int(part) for part in parts):
        raise RequestError(f"--size is {given!r}: expected NAME=N or NAME=N,N, such as length=128").of(
            "size.invalid", "--size"
        )
    return name, [int(part) for part in parts]


@contextmanager
def _repository(storage: str | None) -> Iterator[Repository]:
    """Open the models in storage. Raise StorageError if it cannot be read or written."""
    root = chosen_storage(storage)
    try:
        yield Repository(root)
    except OSError as error:
        raise StorageError(f"storage {str(root)!r} cannot be read or written ({error}): check its rights").of(
            "storage.unreadable", "storage"
        ) from error


@contextmanager
def _collected(damages: list[str]) -> Iterator[None]:
    """Add the message of a StorageError to ``damages`` instead of raising it."""
    try:
        yield
    except StorageError as error:
        damages.append(str(error))


def _served(name: str) -> list[str]:
    """Return the versions that the local endpoint serves, production first. Raise ClusterError without an answer."""
    cluster = read_state()
    served = local_endpoint(cluster).models() if cluster else []
    return [model.version for model in served if model.name == name]


def _print_what_is_served(name: str, version: int, alias: Alias) -> None:
    """Print what is still to be done until a version answers. Promotion alone does not change the endpoint."""
    if alias != "production":
        print(f"'rayloom submit deploy RECIPE', with serve.{alias} in the recipe, makes the endpoint try it")
        return
    try:
        served = _served(name)
    except ClusterError as error:
        print(error)
        return
    if served[:1] == [str(version)]:
        print("the endpoint serves it already")
    else:
        now = f"the endpoint still serves version {served[0]}" if served else "no local endpoint serves this model"
        print(
            f"{now}: 'rayloom submit deploy RECIPE' makes it serve the version in production, or "
            f"'rayloom submit deploy {name}' with default settings"
        )
