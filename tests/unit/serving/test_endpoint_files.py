"""What an endpoint refuses to serve: files that were changed, are not models, or were built for another machine."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from upath import UPath

from app.errors import EngineError, StorageError
from app.published import engine
from tests.engine_contract import exported
from tests.serving import Server, refused, serving
from tests.tables import Faults
from tests.toy import config, publish
from tests.troubled import answers

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> UPath:
    folder = UPath(tmp_path_factory.mktemp("serving"))
    publish(folder, exported())
    return folder


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


def truncated(content: bytes) -> bytes:
    return content[:-100]


def emptied(content: bytes) -> bytes:
    return b""


def random_bytes(content: bytes) -> bytes:
    return random.Random(0).randbytes(len(content))


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def foreign(content: bytes) -> bytes:
    return b"ftrt" + content[4:]


@pytest.mark.parametrize(
    "damage", [truncated, emptied, random_bytes, foreign, flipped], ids=lambda damage: damage.__name__
)
def test_a_file_that_was_changed_is_refused_before_an_engine_sees_it(
    server: Server,
    damage: Callable[[bytes], bytes],
    tmp_path: Path,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with faults(
        "S6", f"engine file {damage.__name__.replace('_', ' ')}", "refused unread in 5 s; the old one"
    ) as fault:
        storage = UPath(tmp_path)
        publish(storage, exported(), exported())
        server.run(server.endpoint.update(config(storage)))
        file = tmp_path / "models/toy/2/model.onnx"
        file.write_bytes(damage(file.read_bytes()))
        monkeypatch.setattr(engine, "open_engine", lambda *_: pytest.fail("an engine has read it"))
        fault.saw(refused(server, config(storage, 2), StorageError, "model.onnx"))
        assert answers(server)


@pytest.mark.parametrize("damage", [truncated, emptied, random_bytes, foreign], ids=lambda damage: damage.__name__)
def test_a_file_that_was_published_as_it_is_and_is_no_model_is_refused(
    server: Server, damage: Callable[[bytes], bytes], tmp_path: Path, faults: Faults
) -> None:
    injected = f"engine file {damage.__name__.replace('_', ' ')}, and its sha256 with it"
    with faults("S6", injected, "refused in 5 s; not ready") as fault:
        publish(UPath(tmp_path), damage(exported()))
        fault.saw(refused(server, config(UPath(tmp_path)), EngineError, "toy"))
        assert httpx.get(f"http://{server.http}/v2/models/toy/ready").status_code == 404
        assert httpx.get(f"http://{server.http}/v2/health/live").status_code == 200


@pytest.mark.parametrize(
    "key",
    [
        {"precision": "int8", "architecture": "of another machine"},
        {"engine": "tensorrt", "device": "gpu", "architecture": "sm_90", "precision": "fp16"},
    ],
    ids=lambda key: key["architecture"],
)
def test_what_was_built_for_another_machine_is_refused(
    server: Server, key: dict[str, str], tmp_path: Path, faults: Faults
) -> None:
    with faults("S6", f"engine built for {key['architecture']}", "refused in 5 s; not ready") as fault:
        publish(UPath(tmp_path), exported(), key=key)
        fault.saw(refused(server, config(UPath(tmp_path)), EngineError, key["architecture"]))
        assert httpx.get(f"http://{server.http}/v2/models/toy/ready").status_code == 404
