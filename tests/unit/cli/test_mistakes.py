"""What a person sees after a mistake: what was given, what was expected and what to do, once and in plain words."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from app.cli.main import main
from tests.helpers import BIN

Said = Callable[..., tuple[int, str]]

_FOREIGN = re.compile(
    r"Traceback|literal\[|PredictRequest|C error|Input should|Value error|validation error|Errno|httpx|\{\"error"
)
"""Words of libraries, which no person has typed."""
_MAX_CPU_S = 3.0

RECIPE = """
name: tickets
task: text-classification
data: {source: data/rows.csv}
model: {factory: app.models.text:encoder_classifier, args: {layers: 1, width: 32, heads: 2}}
train: {epochs: 1, global_batch_size: 8}
"""
ROWS = "text,label\n" + "".join(f"some words {number},{'ab'[number % 2]}\n" for number in range(40))
FILES: dict[str, bytes] = {
    "recipes/tickets.yaml": RECIPE.encode(),
    "data/rows.csv": ROWS.encode(),
    "data/semicolons.csv": ROWS.replace(",", ";").encode(),
    "data/latin.csv": ROWS.replace("some", "für").encode("latin-1"),
    "data/utf16.csv": ROWS.encode("utf-16"),
    "data/ragged.csv": ROWS.replace("some words 7,", "some, words, 7,").encode(),
    "data/quote.csv": ROWS.replace("some words 7", '"some words 7').encode(),
    "data/empty.csv": b"",
    "data/header.csv": b"text,label\n",
    "data/sheet.xlsx": b"PK\x03\x04 of Excel",
    "data/zip.csv": b"PK\x03\x04 of Excel",
    "data/rows.jsonl": b'{"text": "a", "label": "b"}\n{"text": \n',
    "unfinished/models.py": b"\ndef make(:\n",
    "broken/__init__.py": b"raise ValueError('no GPU')\n",
    "project/nets/small.py": b"def make(): ...\n",
    "pictures/cat/1.png": b"no picture",
    "pictures/dog/1.png": b"no picture",
    "token": b"",
    "none.txt": b"  \n",
    "storage/models/tickets/.keep": b"",
}


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Run ``rayloom`` in a project with mistakes in it. Return its exit code, and what it said on standard error."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "token").chmod(0o600)
    Image.new("L", (2, 2)).save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAYLOOM_STORAGE", raising=False)
    monkeypatch.setattr("sys.path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["rayloom", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(str(ended.value.code)), capsys.readouterr().err

    return run


SHOW, TRAIN = ["recipes", "show", "recipes/tickets.yaml"], ["submit", "train", "recipes/tickets.yaml"]
ASK = ["predict", "tickets", "--endpoint", "http://127.0.0.1:9"]
MISTAKES: list[tuple[list[str], list[str]]] = [
    # Names
    (["recipe", "show", "x"], ["'recipe'", "'recipes'"]),
    (["runs", "lst"], ["'lst'", "'list'"]),
    (["runs", "list", "--stoarge", "x"], ["--stoarge", "--storage"]),
    (["submit", "trian", "recipes/tickets.yaml"], ["'trian'", "did you mean 'train'"]),
    (["runs", "list", "--job", "trian"], ["'trian'", "did you mean 'train'"]),
    (["runs", "list", "--job", "foo"], ["'foo'", "expected one of lifecycle"]),
    ([*SHOW, "train.epcohs=3"], ["train.epcohs", "did you mean 'epochs'"]),
    ([*SHOW, "epochs=3"], ["unknown key epochs", "did you mean 'train.epochs'"]),
    ([*SHOW, "task=text-clasification"], ["'text-clasification'", "did you mean 'text-classification'"]),
    ([*SHOW, "train.early_stopping.metric=val_acuracy"], ["val_acuracy", "did you mean 'val_accuracy'"]),
    ([*SHOW, "compile.engines=onnxrt"], ["compile.engines is 'onnxrt'", "did you mean 'onnxruntime'"]),
    ([*SHOW, "compile.engines=[openvno]"], ["compile.engines.0 is 'openvno'", "did you mean 'openvino'"]),
    ([*SHOW, "train.precision=bf61"], ["train.precision is 'bf61'", "did you mean 'bf16'"]),
    ([*SHOW, "train.class_weights=balancd"], ["train.class_weights is 'balancd'", "did you mean 'balanced'"]),
    ([*TRAIN, "data.source=builtin:revews"], ["builtin:revews", "did you mean 'reviews'"]),
    ([*TRAIN, "data.columns.label=lable"], ["data.columns.label", "'lable'", "did you mean 'label'"]),
    ([*TRAIN, "model.factory=app.models.text:encoder_clasifier"], ["did you mean 'encoder_classifier'"]),
    ([*TRAIN, "model.factory=app.models.txt:encoder"], ["no module 'app.models.txt'"]),
    ([*TRAIN, "model.factory=unfinished.models:make"], ["'unfinished.models:make'", "line 2 of", "correct it"]),
    ([*TRAIN, "model.factory=nets.small:make"], ["no module 'nets.small'", "it is in 'project'", "change to that"]),
    (["plan", "recipes/tickets.yaml", "--cluster", "64xb900"], ["'b900'", "did you mean 'b200'"]),
    # Commands of other tools, and words in another order
    (["train", "recipes/tickets.yaml"], ["no command 'train'", "did you mean 'rayloom submit train'"]),
    (["deploy", "tickets"], ["no command 'deploy'", "'rayloom submit deploy'"]),
    (["logs", "20260101"], ["no command 'logs'", "'rayloom runs logs'"]),
    (["list"], ["no command 'list'", "'rayloom runs list' or 'rayloom models list' or 'rayloom data list'"]),
    (["models", "deploy", "tickets"], ["no command 'deploy'", "'rayloom submit deploy'"]),
    (["submit", "recipes/tickets.yaml", "train"], ["is not a job", "'rayloom submit train recipes/tickets.yaml'"]),
    (["submit", "train", "tickets"], ["'tickets' cannot be read", "did you mean 'recipes/tickets.yaml'"]),
    (["submit", "train", "recipes"], ["'recipes' cannot be read (Is a directory)", "YAML file"]),
    ([*TRAIN, "train.epochs", "=", "3"], ["'train.epochs' is not key=value", "without spaces"]),
    ([*TRAIN, "--train.epochs=3"], ["--train.epochs is no option", "without dashes"]),
    (["export", "recipes/tickets.yaml"], ["no run 'recipes/tickets.yaml'", "give a run's id, or JOB/ID"]),
    (["runs", "show", "trian/2026"], ["no run 'trian/2026'", "did you mean 'train'"]),
    (["runs", "compare", "a"], ["only 'a' is given", "two or more"]),
    # Values
    ([*SHOW, "train.epochs="], ["train.epochs is empty (null)", "a whole number"]),
    ([*SHOW, "train.workers=[1]"], ["train.workers", "a number, or [min, max]", "got [1]"]),
    ([*SHOW, "serve.replicas=[1]"], ["serve.replicas", "a number, or [min, max]", "got [1]"]),
    ([*SHOW, "train.epochs=three"], ["train.epochs is 'three'", "a whole number"]),
    ([*SHOW, "train.optimizer.lr=0"], ["train.optimizer.lr is 0", "a number greater than 0"]),
    ([*SHOW, "train.plan=fast"], ["train.plan", "'fast'", "auto"]),
    ([*SHOW, "train.loader.num_workers=-1"], ["train.loader.num_workers is -1", "'auto' or a number greater than"]),
    ([*SHOW, "serve.replicas=many"], ["serve.replicas", "'many'", "[min, max]"]),
    ([*SHOW, "data.columns=text"], ["data.columns is 'text'", "keys with values"]),
    ([*SHOW, "epochs"], ["'epochs'", "train.epochs=3"]),
    (["recipes", "show", "recipes/ticket.yaml"], ["'recipes/ticket.yaml'", "No such file"]),
    (["recipes", "show", "data/rows.csv"], ["'data/rows.csv'", "keys such as name"]),
    (["recipes", "show", "recipes"], ["'recipes'", "Is a directory"]),
    (["recipes", "show"], ["'recipe'", "rayloom recipes show -h"]),
    (["submit", "train"], ["no recipe is given"]),
    (["up", "--serve-port", "99999"], ["--serve-port is '99999'", "65535"]),
    (["up", "--serve-port", "http"], ["--serve-port is 'http'", "a whole number"]),
    (["up", "--notify", "recipes/tickets.yaml"], ["--notify is 'recipes/tickets.yaml'", "add --monitoring"]),
    (["up", "--retention", "90d"], ["--retention is '90d'", "no effect without --monitoring"]),
    (["runs", "list", "--limit", "0"], ["--limit is '0'", "greater than or equal to 1"]),
    (["models", "promote", "tickets", "one"], ["version is 'one'", "a whole number"]),
    (["models", "promote", "tickets", "1", "--alias", "prod"], ["--alias is 'prod'", "'production'"]),
    (["init", "My-Project"], ["'My-Project'", "such as my_project"]),
    (["init", "app"], ["'app'", "choose another name"]),
    # Data
    ([*TRAIN, "data.source=data/nothing.csv"], ["data.source 'data/nothing.csv' does not exist"]),
    ([*TRAIN, "data.source=data/semicolons.csv"], ["data/semicolons.csv", "separated by ';'", "data.columns.input"]),
    ([*TRAIN, "data.source=data/latin.csv"], ["data/latin.csv", "UTF-8"]),
    ([*TRAIN, "data.source=data/utf16.csv"], ["data/utf16.csv", "text in UTF-16", "write it in UTF-8"]),
    ([*TRAIN, "data.source=data/ragged.csv"], ["data/ragged.csv", "row 8", "4 cells", "2 columns"]),
    ([*TRAIN, "data.source=data/quote.csv"], ["data/quote.csv", "quote"]),
    ([*TRAIN, "data.source=data/sheet.xlsx"], ["data/sheet.xlsx", ".csv"]),
    ([*TRAIN, "data.source=data/zip.csv"], ["data/zip.csv", "save the sheet as csv"]),
    ([*TRAIN, "data.source=data/rows.jsonl"], ["data/rows.jsonl", "line 2"]),
    ([*TRAIN, "data.source=data/empty.csv"], ["data/empty.csv", "no examples"]),
    ([*TRAIN, "data.source=data/header.csv"], ["data/header.csv", "no examples"]),
    (
        [*TRAIN, "task=image-classification", "data.source=pictures"],
        ["'pictures'", "all 2 inputs", "repair or convert"],
    ),
    # Places
    (["runs", "list", "--storage", "nowhere"], ["--storage", "nowhere", "does not exist"]),
    (["runs", "list", "--storage", "data/rows.csv"], ["data/rows.csv", "is a file", "give a folder"]),
    (["runs", "show", "foo"], ["no run 'foo'", "rayloom runs list"]),
    (["pause", "foo"], ["no train run 'foo'", "rayloom runs list"]),
    (["stop", "foo"], ["no train run 'foo'", "rayloom runs list"]),
    (["export", "foo"], ["no train run 'foo'", "rayloom runs list"]),
    (["models", "show", "foo"], ["no model 'foo'", "rayloom submit compile"]),
    (["check", "foo"], ["no run 'foo'", "no model"]),
    (["status"], ["no local cluster is up", "rayloom up"]),
    ([*TRAIN, "model.factory=broken.models:make"], ["no local cluster is up", "rayloom up"]),
    (["follow", "train-1"], ["no local cluster is up", "rayloom up"]),
    # Asking a model
    (["predict", "tickets"], ["give inputs"]),
    (["predict", "my printer is on fire", "tickets"], ["'my printer is on fire'", "the name before the inputs"]),
    (["predict", "picture.png", "digits", "--image"], ["'picture.png'", "the name before the inputs"]),
    *(
        ([*ASK, text], ["nothing answers at http://127.0.0.1:9", "rayloom submit deploy"])
        for text in ("hello", "https://example.com/login.html", "/r/python", "/s", f"{'x' * 300}/y")
    ),
    ([*ASK, f"{'x' * 300}.txt"], ["looks like the path of a file"]),
    ([*ASK, "./models"], ["'./models'", "looks like the path of a file"]),
    ([*ASK, ""], ["the text is empty"]),
    ([*ASK, "nofile.txt"], ["'nofile.txt'", "does not exist", "--file"]),
    ([*ASK, "none.txt"], ["'none.txt'", "is the path of a file", "--file"]),
    ([*ASK, "picture.png"], ["'picture.png'", "is the path of a file", "--image"]),
    ([*ASK, "--file", "none.txt"], ["'none.txt'", "is empty"]),
    ([*ASK, "--file", "picture.png"], ["'picture.png'", "UTF-8"]),
    ([*ASK, "--image", "nofile.png"], ["'nofile.png'", "No such file"]),
    ([*ASK, "--row", "age=3"], ["age=3", "such as"]),
    ([*ASK, "--row", '{"age": NaN}'], ["NaN", "such as"]),
    ([*ASK, "--field", "x"], ["--field x", "NAME=VALUE"]),
    ([*ASK, "hello", "--token-file", "nofile"], ["'nofile'", "No such file"]),
    ([*ASK, "hello", "--token-file", "token"], ["'token'", "holds no token"]),
    (["predict", "tickets", "hello", "--endpoint", "localhost:8000"], ["'localhost:8000'", "such as http://localhost"]),
    *(
        (["predict", "tickets", "hello", "--endpoint", url], [url, "expected a URL"])
        for url in ("http://[::1", "http://..", "ftp://host")
    ),
    *(
        ([*ASK, *given], ["not valid UTF-8", "convert"])
        for given in (["caf\udce9"], ["--row", '{"a": "caf\udce9"}'], ["--field", "a=caf\udce9"])
    ),
    (["chat", "writer", "caf\udce9", "--endpoint", "http://127.0.0.1:9"], ["not valid UTF-8", "convert"]),
]


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=lambda given: " ".join(given))
def test_a_mistake_is_told_once_in_plain_words(said: Said, arguments: list[str], parts: list[str]) -> None:
    began = time.process_time()
    code, told = said(*arguments)
    assert code == 2, told
    assert told.startswith("error: ")
    assert [part for part in parts if part not in told] == [], told
    assert not _FOREIGN.search(told), told
    lines = told.strip().splitlines()
    assert len(lines) == len(set(lines)) == 1, told
    assert time.process_time() - began < _MAX_CPU_S


def test_output_that_cannot_be_written_is_told_in_one_sentence() -> None:
    command = f"{BIN}/rayloom recipes schema"
    done = subprocess.run(["bash", "-c", f"{command} >/dev/full"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr == "error: the output cannot be written (No space left on device): free some space\n"


@pytest.mark.parametrize(("errors", "printed"), [("strict", b"/caf\xe9"), ("backslashreplace", rb"/caf\udce9")])
def test_a_name_that_is_not_utf_8_is_printed_as_it_is(tmp_path: Path, errors: str, printed: bytes) -> None:
    storage = os.fsencode(tmp_path) + b"/caf\xe9"
    os.makedirs(storage + b"/runs")
    command, environment = ["runs", "list", "--storage", storage], {**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"}
    done = subprocess.run([f"{BIN}/rayloom", *command], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert os.fsencode(tmp_path) + printed in done.stdout


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize(
    "arguments",
    [["chat", "writer", "-", *ASK[2:]], ["chat", "writer", *ASK[2:]], [*ASK, "-"], ["submit", "train", "-"]],
    ids=" ".join,
)
def test_standard_input_that_is_not_utf_8_is_refused(arguments: list[str], errors: str) -> None:
    command, environment = [f"{BIN}/rayloom", *arguments], {**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"}
    done = subprocess.run(command, input=b"caf\xe9\n", env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert b"UTF-8" in done.stderr


def test_a_refusal_of_the_endpoint_is_a_sentence_and_no_json(said: Said) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = b'{"error": "the text has 9 tokens: expected 8 at most"}'
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert said("predict", "tickets", "hello", "--endpoint", url) == (
        2,
        f"error: {url} answered 400: the text has 9 tokens: expected 8 at most\n",
    )
    server.shutdown()
