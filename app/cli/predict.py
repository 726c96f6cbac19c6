"""The command that asks a deployed model."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.endpoint import TOKEN_FILE_VARIABLE, EndpointClient, local_endpoint
from app.cluster.state import running_cluster
from app.errors import RequestError
from app.published.prediction import Prediction
from app.serving.protocol.predict import PredictRequest


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


def _read_image(path: str) -> str:
    try:
        return base64.b64encode(Path(path).read_bytes()).decode()
    except OSError as error:
        raise RequestError(
            f"image {path!r} cannot be read ({error.strerror}): give the path of a PNG or JPEG file"
        ) from error
