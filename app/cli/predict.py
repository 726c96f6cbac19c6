"""The command that queries a deployed model."""

import base64
import json
import re
import shlex
import sys
from contextlib import suppress
from os.path import isfile  # False for a text that is no path
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.endpoint import TOKEN_FILE_VARIABLE, local_endpoint, named_endpoint
from app.cli.options import Json
from app.cluster.state import running_cluster
from app.config.section import NAME
from app.errors import RequestError
from app.published.prediction import Prediction
from app.serving.protocol.predict import PredictRequest

_PICTURES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_SUFFIXES = _PICTURES | {".csv", ".flac", ".html", ".json", ".jsonl", ".md", ".mp3", ".ogg", ".parquet", ".pdf", ".tsv"}
_SUFFIXES |= {".txt", ".wav", ".xml", ".yaml", ".yml"}
_ROW = """'{"age": 40}'"""
_FOLDERS = ("./", "../", "~/")


def predict(
    model: str,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(help="Texts, or files with --file or --image, or rows with --row. - is standard input."),
    ] = None,
    file: Annotated[bool, typer.Option("--file", help="The inputs are paths of files with one text each.")] = False,
    image: Annotated[bool, typer.Option("--image", help="The inputs are paths of images.")] = False,
    row: Annotated[bool, typer.Option("--row", help="The inputs are rows of a table, as objects of JSON.")] = False,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="NAME=VALUE",
            help="A field of one record; NAME=@FILE reads a file, and NAME=@@TEXT is a text that begins with @.",
        ),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Default: the local cluster's.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(envvar=TOKEN_FILE_VARIABLE, help="Default: the local cluster's own."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Send inputs to a deployed model, and print its answer to each: for a classifier the label and its probability."""
    if bool(inputs) == bool(field) or file + image + row > 1:
        raise RequestError("give inputs of one kind, or the fields of one record with --field NAME=VALUE").of(
            "options.contradict"
        )
    if not re.fullmatch(NAME, model):
        raise RequestError(
            f"{model!r} is not the name of a model, such as tickets: give the name before the inputs; "
            "'rayloom models list' lists them"
        ).of("model.name")
    read = _read_file if file else _read_image if image else _read_row if row else _read_text
    given = [read(item) for item in inputs or []] or [_read_fields(field or [])]
    client = named_endpoint(endpoint, token_file) if endpoint else local_endpoint(running_cluster(), token_file)
    answer = client.predict(model, PredictRequest(inputs=given))
    if as_json:
        print(answer.model_dump_json(exclude_none=True))
        return
    for text, prediction in zip(inputs or [" ".join(field or [])], answer.predictions, strict=True):
        print(f"{_in_short(prediction)}  {text}")


def _read_text(text: str) -> str:
    """Return a text, from standard input for ``-``. Raises RequestError for an empty one, and for a file's name."""
    if text == "-":
        return _read_file(text)
    if _looks_like_a_path(text):
        option = "--image" if Path(text).suffix.lower() in _PICTURES else "--file"
        place = "is the path of a file" if isfile(text) else "looks like the path of a file, which does not exist"
        raise RequestError(
            f"the text {text!r} {place}: to send a file's content, give {option}; to send these words, use "
            f"'echo {shlex.quote(text)} | rayloom predict MODEL -'"
        ).of("text.path")
    return require_text(text, "the text")


def _looks_like_a_path(text: str) -> bool:
    if " " in text or "://" in text:
        return False
    has_suffix = Path(text).suffix.lower() in _SUFFIXES
    # A word with a slash before it, such as /r/python, may also be a text.
    return has_suffix or text.startswith(_FOLDERS) or (text.startswith("/") and isfile(text))


def _read_file(path: str) -> str:
    what = "standard input" if path == "-" else f"file {path!r}"
    try:
        return require_text(_content_of(path).decode(), what)
    except OSError as error:
        raise RequestError(f"{what} cannot be read ({error.strerror}): give the path of a text").of(
            "file.unreadable"
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{what} is not text in UTF-8: convert it, or give --image for a picture").of(
            "text.encoding"
        ) from error


def _content_of(path: str) -> bytes:
    return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()


def require_text(text: str, what: str) -> str:
    """Return the text. Raises RequestError if it is empty, with ``what`` as its name in the message."""
    if not text.strip():
        raise RequestError(f"{what} is empty: give at least a word").of("text.empty")
    return text


def _read_row(text: str) -> dict[str, Any]:
    """Return a row. Raises RequestError if the text is not a JSON object."""
    try:
        row = json.loads(text)
        json.dumps(row, allow_nan=False)  # Python reads NaN and infinity, which are not JSON
    except ValueError as error:
        raise RequestError(f"a row is {text!r}, which is not JSON: expected an object such as {_ROW}").of(
            "json.invalid", "--row"
        ) from error
    if not isinstance(row, dict):
        raise RequestError(f"a row is {text}: expected an object such as {_ROW}").of("row.not_an_object", "--row")
    return row


def _read_fields(fields: list[str]) -> dict[str, Any]:
    """Return a record. Raises RequestError for a field without a value."""
    record: dict[str, Any] = {}
    for given in fields:
        name, equals, value = given.partition("=")
        if not equals:
            raise RequestError(f"--field {given}: expected NAME=VALUE, or NAME=@FILE for the content of a file").of(
                "field.no_value", "--field"
            )
        record[name] = _read_value(value)
    return record


def _read_value(value: str) -> Any:
    """Return the content of the file after an @, the text after the first of two, a JSON object, or the text itself."""
    if value.startswith("@"):
        return value[1:] if value.startswith("@@") else _read_image(value[1:])
    with suppress(RequestError):
        return _read_row(value)
    return value


def _in_short(prediction: Prediction) -> str:
    """Return a label with its probability; the whole answer of another task as JSON."""
    if prediction.label is None or prediction.scores is None:
        return prediction.model_dump_json(exclude_none=True)
    return f"{prediction.label}  {prediction.scores[prediction.label]:.3f}"


def _read_image(path: str) -> str:
    try:
        return base64.b64encode(_content_of(path)).decode()
    except OSError as error:
        raise RequestError(f"image {path!r} cannot be read ({error.strerror}): give the path of a PNG or JPEG file").of(
            "file.unreadable", "--image"
        ) from error
