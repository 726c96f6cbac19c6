"""How many files somebody opens to follow one request for inference."""

import http.client
import threading
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


class Profile:
    """The modules of ``app`` whose functions are called while it records, by threads that were started since."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.is_recording = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_recording and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(APP):
                self.modules.add(str(path.relative_to(APP)))


@contextmanager
def profiled() -> Iterator[Profile]:
    profile = Profile()
    threading.setprofile(profile)
    try:
        yield profile
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("fast", [True, False], ids=["plain", "through ASGI"])
def test_a_request_for_inference_enters_few_modules(tmp_path: Path, fast: bool) -> None:
    publish(UPath(tmp_path), exported(), answering(1))
    with profiled() as profile, serving(fast=fast) as server:
        server.run(server.endpoint.update(config(UPath(tmp_path))))
        client = http.client.HTTPConnection(server.http, timeout=60)
        for profile.is_recording in (False, True):  # the first request fills caches
            client.request("POST", "/v2/models/toy/infer", orjson.dumps(body(rows(2))), {"Accept-Encoding": ""})
            answer = orjson.loads(client.getresponse().read())
        profile.is_recording = False
        client.close()
        plain = server.fast_path.answered
    assert answer["outputs"]
    assert plain == (2 if fast else 0)
    assert "serving/batching/batcher.py" in profile.modules, "the threads that answer are seen"
    assert len(profile.modules) <= MAX_MODULES, "\n".join(sorted(profile.modules))
