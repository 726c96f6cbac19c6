"""How many files somebody opens to follow one request for inference."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
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
MAX_MODULES = {True: 16, False: 18}
"""On the fast path, and through ASGI."""
MAX_MOVES = {True: 60, False: 110}
"""How often the next function that is called is in another file."""


class Profile:
    """The calls of functions of ``app`` by threads that were started since."""

    def __init__(self) -> None:
        self.files: list[str] = []
        """The file of each function, in the order of the calls."""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(APP):
            self.files.append(str(path.relative_to(APP)))

    def request(self, client: http.client.HTTPConnection) -> list[str]:
        """Send a request, and return the files of its functions."""
        self.files.clear()
        client.request("POST", "/v2/models/toy/infer", orjson.dumps(body(rows(2))), {"Accept-Encoding": ""})
        assert orjson.loads(client.getresponse().read())["outputs"]
        return self.files.copy()


@contextmanager
def profiled() -> Iterator[Profile]:
    profile = Profile()
    threading.setprofile(profile)
    try:
        yield profile
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("fast", [True, False], ids=["plain", "through ASGI"])
def test_a_request_for_inference_enters_few_modules_and_moves_seldom_between_them(tmp_path: Path, fast: bool) -> None:
    publish(UPath(tmp_path), exported(), answering(1))
    with profiled() as profile, serving(fast=fast) as server:
        server.run(server.endpoint.update(config(UPath(tmp_path))))
        client = http.client.HTTPConnection(server.http, timeout=60)
        profile.request(client)  # which fills caches
        # On a busy machine a request comes in pieces, or its call runs in a thread meanwhile.
        files = min((profile.request(client) for _ in range(6)), key=len)
        client.close()
        plain = server.fast_path.answered
    moves = sum(one != other for one, other in pairwise(files))
    assert plain == (7 if fast else 0)
    assert "serving/batching/batcher.py" in files, "the threads that answer are seen"
    assert len(set(files)) <= MAX_MODULES[fast], "\n".join(sorted(set(files)))
    assert moves <= MAX_MOVES[fast], "\n".join(files)
