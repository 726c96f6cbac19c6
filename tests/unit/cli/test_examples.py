"""The commands that 'rayloom status' prints: each is a real input of the data that the model was trained on."""

import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from upath import UPath

from app.cli import examples
from app.cli.endpoint import EndpointClient
from app.cli.predict import _read_fields, _read_image, _read_row, _read_text
from app.config import load_recipe
from app.repository.repository import Repository
from app.runs import Run
from tests.helpers import ROOT
from tests.publishing import CARD, files_in


@pytest.fixture
def endpoint() -> Iterator[EndpointClient]:
    """An HTTP server that serves models of each kind, as far as lists of models go."""
    kinds = {"words": "text", "digits": "image", "lines": "row", "halves": "record"}
    natural = [{"name": name, "version": "1", "input": kind, "labels": []} for name, kind in kinds.items()]
    served = [{"name": name, "version": "1", "state": "READY", "reason": ""} for name in [*kinds, "tensors"]]

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps(natural if self.path == "/v1/models" else served).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield EndpointClient(f"http://127.0.0.1:{server.server_port}", None)
    server.shutdown()


def publish(storage: Path, name: str, recipe: str, *overrides: str) -> None:
    """Publish a version whose lineage leads to a training run of a recipe."""
    run = Run.start("train", load_recipe(ROOT / recipe, [f"storage={storage}", f"name={name}", *overrides]))
    run.open()
    lineage = CARD.lineage.model_copy(update={"train_run": str(run.folder)})
    Repository(UPath(storage)).publish(name, files_in(storage / name), CARD.model_copy(update={"lineage": lineage}))


def test_each_command_asks_with_a_real_input(
    endpoint: EndpointClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "_FOLDER", tmp_path / "examples")
    (tmp_path / "words.csv").write_text("text,label\nwhere is my parcel,a\nmy bill is wrong,b\n", encoding="utf-8")
    (tmp_path / "lines.csv").write_text("age,town,label\n40,Köln,a\n50,Bonn,b\n", encoding="utf-8")
    for label in ("a", "b"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "pictures" / label / "1.png")
    publish(tmp_path, "words", "recipes/reviews.yaml", f"data.source={tmp_path}/words.csv")
    publish(tmp_path, "digits", "recipes/digits.yaml", f"data.source={tmp_path}/pictures")
    table = ["data.columns={label: label}", "data.test_fraction=0.1"]
    publish(tmp_path, "lines", "recipes/breast_cancer.yaml", f"data.source={tmp_path}/lines.csv", *table)
    commands = [shlex.split(command) for command in examples.commands_for(endpoint, UPath(tmp_path))]
    words, digits, lines, halves, tensors = commands
    assert words == ["rayloom", "predict", "words", "where is my parcel"]
    assert _read_text(words[-1])
    assert digits[:-1] == ["rayloom", "predict", "digits", "--image"]
    assert _read_image(digits[-1])
    assert lines[:-1] == ["rayloom", "predict", "lines", "--row"]
    assert _read_row(lines[-1]) == {"age": 40, "town": "Köln"}
    assert _read_fields([halves[-1]])  # its run is gone
    assert tensors[0] == "curl"
