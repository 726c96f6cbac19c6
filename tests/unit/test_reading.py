"""The files that somebody has to read to follow one request: few enough to keep in mind."""

import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import orjson
import pytest
from upath import UPath

import app
from tests.engine_contract import exported, rows
from tests.serving import serving
from tests.toy import answering, body, config, publish

APP = Path(app.__file__).parent
MAX_MODULES = 20


class Entered:
    """The modules of ``app`` in which a function was called, while it records, by threads that were started since."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.is_recording = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if self.is_recording and event == "call" and path.is_relative_to(APP):
            self.modules.add(str(path.relative_to(APP)))


@contextmanager
def profiled() -> Iterator[Entered]:
    """Record in all threads that are started in here."""
    entered = Entered()
    threading.setprofile(entered)
    try:
        yield entered
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("hot", [True, False], ids=["hot", "asgi"])
def test_a_request_for_inference_enters_few_modules(tmp_path: Path, hot: bool) -> None:
    publish(UPath(tmp_path), exported(), answering(1))
    with profiled() as entered, serving(hot=hot) as server:
        server.run(server.endpoint.update(config(UPath(tmp_path))))
        request = urllib.request.Request(
            f"http://{server.http}/v2/models/toy/infer",
            orjson.dumps(body(rows(2))),
            {"content-type": "application/json"},
        )
        entered.is_recording = True
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = orjson.loads(response.read())
        entered.is_recording = False
    assert answer["outputs"]
    assert "serving/batching/batcher.py" in entered.modules  # the threads that answered were seen
    print(sys.version_info, len(entered.modules), sorted(entered.modules))
    assert len(entered.modules) <= MAX_MODULES, sorted(entered.modules)
