"""Shared by every test: folders decide the kind of a test, and storage and cache are never the user's."""

import gc
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from upath import UPath

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests share the cores; torch reads it on import
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise torch starts processes that import torch
from tests.debian import pytest_runtest_setup, pytest_runtest_teardown
from tests.helpers import CLUSTER, ROOT, local_cluster
from tests.jobs import drivers
from tests.launch import Cluster, Launch, Trained
from tests.receiver import HttpReceiver
from tests.signal_stack import signal_stack
from tests.tables import Faults, Record, Tables, rendered
from tests.workers import forked_workers

for _part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _part, 60.0)  # httpx waits for five seconds, which a busy machine may need

__all__ = ["pytest_runtest_setup", "pytest_runtest_teardown"]
pytest_plugins = ["tests.wording"]
_MEMORY = Path("/dev/shm")
_MIN_FREE_BYTES = 8 * 2**30
_PACKAGES = {"browser": ("chromium", "chromium-driver"), "postgres": ("postgresql",)}
"""The Debian packages that fixtures need. A test that uses such a fixture needs its packages."""

_running = ExitStack()
"""The running cluster, if there is one. ``_end_cluster`` closes it."""

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from tests.postgres import PostgresServer
    from tests.s3 import S3Server


@cache
def _folder() -> Path | None:
    """Return the folder in memory for the files of tests; None for pytest's default.

    On a disk, storage and studies wait for each write. The tests write less than 2 GiB.
    """
    with suppress(OSError):  # before Linux 6.6, tmpfs has no direct I/O, which parameters on NVMe need
        os.close(os.open(_MEMORY, os.O_TMPFILE | os.O_DIRECT | os.O_RDWR))
        if shutil.disk_usage(_MEMORY).free > _MIN_FREE_BYTES:
            return _MEMORY
    return None


@pytest.hookimpl(tryfirst=True)  # pytest reads the option in the same hook
def pytest_configure(config: pytest.Config) -> None:
    """Write the files of tests to memory if there is room. ``pytest --basetemp=FOLDER`` keeps the files."""
    if _folder() and not config.option.basetemp:
        config.option.basetemp = tempfile.mkdtemp(prefix="rayloom-tests-", dir=_folder())
        config.add_cleanup(partial(shutil.rmtree, config.option.basetemp, ignore_errors=True))


@pytest.fixture
def tables(record_property: Record) -> Tables:
    """Where a test puts what a person wants to see."""
    return Tables(record_property)


@pytest.fixture
def faults(record_property: Record) -> Faults:
    """Where a test puts which fault it injected, and what came of it."""
    return Faults(record_property)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    found = [
        property_
        for report in reports
        if getattr(report, "when", None) == "call"
        for property_ in report.user_properties
    ]
    for table in rendered(found):
        terminalreporter.write_line("")
        terminalreporter.write_line(table)


@pytest.fixture
def http() -> Iterator[Callable[..., HttpReceiver]]:
    receivers: list[HttpReceiver] = []

    def start(*statuses: int) -> HttpReceiver:
        receivers.append(HttpReceiver(*statuses))
        return receivers[-1]

    yield start
    for receiver in receivers:
        receiver.open.set()
        receiver.server.shutdown()
        receiver.server.server_close()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: "WorkerController", error: object) -> None:
    """Print how a test process died. A negative status is the signal that killed it."""
    if error:
        status = node.gateway._io.wait()
        memory = psutil.virtual_memory()
        print(f"\n{node.gateway.id} ended with status {status}; {memory.available >> 20} MiB are available", flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported, and exempt their objects from later collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder: 'pytest -m integration'.

    With several test processes, all tests of the cluster run in the same one, and so do the tests of one file. The
    cluster's group takes longest, so it starts first. Unit tests are short, so they start last and keep both processes
    busy until the end.
    """
    for item in items:
        for fixture in _PACKAGES.keys() & getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.debian(*_PACKAGES[fixture]))
        item.add_marker(item.path.relative_to(ROOT / "tests").parts[0])
        if not item.get_closest_marker("xdist_group"):
            needs_cluster = CLUSTER in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group(CLUSTER if needs_cluster else item.path.stem))
    items.sort(key=lambda item: (not _needs_cluster(item), "unit" in item.keywords))


def _needs_cluster(item: pytest.Item) -> bool:
    group = item.get_closest_marker("xdist_group")
    return group is not None and group.args == (CLUSTER,)


@pytest.hookimpl(specname="pytest_runtest_teardown", wrapper=True)
def _end_cluster(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Stop the cluster after its last test, to leave its memory to the unit tests."""
    result = yield
    if _needs_cluster(item) and not (nextitem and _needs_cluster(nextitem)):
        _running.close()
    return result


@pytest.fixture(autouse=True)
def _own_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLOOM_STORAGE", str(tmp_path / "storage"))
    monkeypatch.setenv("RAYLOOM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Give PyTorch one thread again after each test. Compile and engines of PyTorch set the number for their process.

    With two threads, each small operation waits for a core that the other test process uses.
    """
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _signal_stack() -> Iterator[None]:
    """Fail a test that leaves this thread another signal stack, as a model of OpenVINO does on a CPU with AMX.

    The stack is freed with the model. After that, a signal such as that of a child's end kills the test process.
    """
    before = signal_stack()
    yield
    assert signal_stack() == before, "load the model on a thread that ends, as app.engines.openvino does"


@pytest.fixture(scope="session")
def s3_server() -> Iterator["S3Server"]:
    """One S3 server for all tests."""
    from tests.s3 import S3Server  # which takes a second to load

    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3(s3_server: "S3Server") -> dict[str, str]:
    """The environment that reaches the S3 server."""
    return s3_server.environment


@pytest.fixture(scope="session")
def postgres() -> Iterator["PostgresServer"]:
    """One database server for all tests."""
    from tests.postgres import PostgresServer  # needs a driver that the machine for tests/gpu lacks

    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a test keeps its models: on a disk, and in a bucket of its own."""
    if request.param == "local":
        return str(tmp_path / "storage")
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{secrets.token_hex(4)}"
    UPath(f"s3://{bucket}").mkdir()
    return f"s3://{bucket}/storage"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts torchrun in the background; after the test nothing of it may be left."""
    launch = Launch(tmp_path)
    yield launch
    launch.check()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What the run that other tests interrupt comes to when nothing happens."""
    return Trained.uninterrupted(tmp_path_factory.mktemp("uninterrupted"))


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """A short folder for the state of a cluster of our own."""
    folder = Path(tempfile.mkdtemp(prefix="rayloom-test-", dir=_folder()))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(home: Path) -> Iterator[dict[str, str]]:
    """Start one cluster for all tests, and yield the environment of its clients.

    ``make test`` sets RAYLOOM_TEST_FORKED_WORKERS, so that its workers are forked. Other tests, such as those that
    measure how fast workers restart, get workers as Ray starts them.
    """
    forked = "RAYLOOM_TEST_FORKED_WORKERS" in os.environ
    with _running:
        _running.callback(drivers.cache_clear)
        yield _running.enter_context(local_cluster(home, **(forked_workers(home) if forked else {})))


@pytest.fixture
def ray(cluster: dict[str, str]) -> Cluster:
    """The same, to be looked at and harmed."""
    return Cluster(cluster)


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT with random weights, as a folder of transformers with a tokenizer and a chat template."""
    from tests.generating import make_language_model

    return make_language_model(tmp_path_factory.mktemp("language_model"))


@pytest.fixture(scope="session")
def exported_model(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, exported for an engine."""
    from tests.generating import export_language_model

    return export_language_model(language_model, tmp_path_factory.mktemp("exported_model"))


@pytest.fixture(scope="session")
def generating_storage(language_model: Path, exported_model: Path, tmp_path_factory: pytest.TempPathFactory) -> UPath:
    """Storage whose repository has the same model as version 1 of ``writer``, in production. Do not change it."""
    from tests.generating import publish_language_model

    storage = UPath(tmp_path_factory.mktemp("generating") / "storage")
    publish_language_model(storage, "writer", language_model, exported_model)
    return storage
