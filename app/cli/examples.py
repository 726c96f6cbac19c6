"""Example commands that query deployed models, with inputs from their training data."""

import base64
import json
import shlex
from pathlib import Path

from upath import UPath

from app.cli.endpoint import EndpointClient
from app.config import DataConfig, load_stored_recipe
from app.data.preparation.preview import first_input
from app.errors import RayloomError
from app.repository.repository import Repository
from app.runs import CONFIG_FILE
from app.serving.protocol.predict import ModelDescription
from app.storage import HOME, to_path
from app.tasks import find_task

_FOLDER = HOME / "examples"
"""The folder for pictures from tables and built-in sets."""
_MAX_CHARACTERS = 80


def commands_for(endpoint: EndpointClient, storage: UPath, only: str | None = None) -> list[str]:
    """Return a command for each model that is served, or for one. Raises ClusterError if nothing answers."""
    known = {model.name: model for model in endpoint.natural_models()}
    # The first version of a name is the one in production.
    served = {model.name: model.version for model in reversed(endpoint.models()) if only in (None, model.name)}
    return [
        _predict(known[name], storage) if name in known else _curl(endpoint, name, version, storage)
        for name, version in reversed(served.items())
    ]


def _curl(endpoint: EndpointClient, name: str, version: str, storage: UPath) -> str:
    """Return a command that asks a language model for text, or another model for the tensors that it takes."""
    try:
        generation = Repository(storage).manifest(name, int(version)).generation
    except (RayloomError, OSError):
        generation = None
    return endpoint.curl_text(name, generation.has_chat) if generation else endpoint.curl(name)


def _predict(model: ModelDescription, storage: UPath) -> str:
    return shlex.join(["rayloom", "predict", model.name, *_arguments(model, storage)])


def _arguments(model: ModelDescription, storage: UPath) -> list[str]:
    """Return the input as ``rayloom predict`` takes it; a placeholder if the training data are gone."""
    try:
        run = Repository(storage).manifest(model.name, int(model.version)).lineage.train_run
        recipe = load_stored_recipe(str(to_path(str(run)) / CONFIG_FILE))
        found = first_input(recipe.data, find_task(recipe.task).samples(recipe))
    except (RayloomError, OSError):
        found = None
    if isinstance(found, bytes):
        return ["--image", _as_file(model.name, found)]
    match model.input:
        case "row":
            return ["--row", found or json.dumps(dict.fromkeys(model.columns, "..."))]
        case "record":
            return _fields(model.name, json.loads(found or "{}"), recipe.data) if found else ["--field", "NAME=VALUE"]
        case "text":
            text = " ".join((found or "some words").split())[:_MAX_CHARACTERS]
            return ["--", text] if text.startswith("-") else [text]
        case _:
            return ["--image", "FILE"]


def _fields(name: str, record: dict[str, object], config: DataConfig) -> list[str]:
    from app.data.records import is_file

    arguments = []
    for field, value in record.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if is_file(config.columns.fields[field].kind):
            text = "@" + _as_file(f"{name}-{field}", base64.b64decode(text))
        elif text.startswith("@"):
            text = f"@{text}"
        arguments += ["--field", f"{field}={text}"]
    return arguments


def _as_file(name: str, content: bytes) -> str:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    file: Path = _FOLDER / name
    file.write_bytes(content)
    return str(file)
