"""The commands that 'rayloom status' prints: each is a real input of the data that the model was trained on."""

import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner
from upath import UPath

from app.cli import examples, jobs
from app.cli.endpoint import EndpointClient
from app.cli.main import app
from app.cli.predict import _read_fields, _read_image, _read_row, _read_text
from app.cluster.state import ClusterState
from app.config import load_recipe
from app.repository.repository import Repository
from app.runs import Run
from tests.helpers import ROOT
from tests.publishing import CARD, GENERATION, files_in

ASKED: list[dict[str, object]] = []
"""The requests for predictions that the endpoint has received."""
RESPONSE = {"model_name": "m", "model_version": "1", "predictions": [{"label": "a", "scores": {"a": 1.0}}]}


@pytest.fixture
def endpoint() -> Iterator[EndpointClient]:
    """An HTTP server that lists models of each kind, and answers each request for a prediction alike."""
    kinds = {"words": "text", "digits": "image", "lines": "row", "halves": "record"}
    natural = [{"name": name, "version": "1", "input": kind, "labels": []} for name, kind in kinds.items()]
    served = [{"name": name, "version": "1", "state": "READY", "reason": ""} for name in [*kinds, "tensors", "writer"]]

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            received = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if is_prediction := self.command == "POST" and self.path.endswith("/predict"):
                ASKED.append(json.loads(received))
            body = json.dumps(RESPONSE if is_prediction else natural if self.path == "/v1/predict" else served).encode()
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
    Repository(UPath(tmp_path)).publish(
        "writer", files_in(tmp_path / "writer"), CARD.model_copy(update={"generation": GENERATION})
    )
    commands = [shlex.split(command) for command in examples.commands_for(endpoint, UPath(tmp_path))]
    words, digits, lines, halves, tensors, writer = commands
    assert words == ["rayloom", "predict", "words", "where is my parcel"]
    assert _read_text(words[-1])
    assert digits[:-1] == ["rayloom", "predict", "digits", "--image"]
    assert _read_image(digits[-1])
    assert lines[:-1] == ["rayloom", "predict", "lines", "--row"]
    assert _read_row(lines[-1]) == {"age": 40, "town": "Köln"}
    assert _read_fields([halves[-1]])  # its run is gone
    assert tensors[0] == "curl"
    assert writer[:3] == ["curl", f"{endpoint.url}/v1/chat/completions", "-d"]
    assert json.loads(writer[3]) == {"model": "writer", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("model", "recipe", "given"),
    [
        ("words", "reviews", "- where is my parcel"),
        ("words", "reviews", "https://example.com/login.html"),
        ("halves", "digit_halves", "@user thanks!"),
        ("halves", "digit_halves", "{x} is a set"),
    ],
)
def test_a_printed_command_sends_the_first_text_as_it_is(
    model: str, recipe: str, given: str, endpoint: EndpointClient, tmp_path: Path
) -> None:
    column = "text" if model == "words" else "words"
    rows = [{column: given, "picture": None, "label": "1"}, {column: "more", "label": "2"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    publish(tmp_path, model, f"recipes/{recipe}.yaml", f"data.source={tmp_path}/rows.jsonl")
    (command,) = examples.commands_for(endpoint, UPath(tmp_path), model)
    name, *arguments = shlex.split(command)
    done = CliRunner().invoke(app, [*arguments[:1], "--endpoint", endpoint.url, *arguments[1:]])
    assert (name, done.exit_code) == ("rayloom", 0), done.output
    assert ASKED[-1]["inputs"] == [given if model == "words" else {"words": given}]


@pytest.mark.parametrize(
    ("option", "sent"), [([], "für alle"), (["--file"], "für alle"), (["--image"], "ZsO8ciBhbGxl")], ids=str
)
def test_a_hyphen_is_standard_input(option: list[str], sent: str, endpoint: EndpointClient) -> None:
    given = ["predict", "words", "--endpoint", endpoint.url, *option, "-"]
    done = CliRunner().invoke(app, given, input="für alle".encode())
    assert done.exit_code == 0, done.output
    assert ASKED[-1]["inputs"] == [sent]


def succeed(*_: object) -> int:
    """Submit a job that succeeds."""
    print("RESULT {}")
    return 0


@pytest.mark.parametrize(("option", "is_asked"), [((), True), (("--json",), False), (("-q",), False)])
def test_the_result_is_the_last_line_for_programs(
    option: tuple[str, ...],
    is_asked: bool,
    endpoint: EndpointClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = int(endpoint.url.rpartition(":")[2])
    cluster = ClusterState(
        id="c",
        gcs_port=1,
        dashboard_port=9,
        serve_port=port,
        grpc_port=1,
        storage=str(tmp_path),
        num_cpus=1,
        runtime=tmp_path,
    )
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", cluster.dashboard)
    monkeypatch.setattr(jobs, "read_state", lambda: cluster)
    monkeypatch.setattr(jobs, "submit_job", succeed)
    monkeypatch.setattr(ClusterState, "processes", lambda _: ["ray"])  # it runs, without a dashboard
    done = CliRunner().invoke(app, ["submit", "deploy", str(ROOT / "recipes/digits.yaml"), *option])
    assert done.exit_code == 0, done.output
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["RESULT {}", *["ask it"] * is_asked]
