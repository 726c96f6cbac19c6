"""Unit tests start no Ray."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from sqlalchemy import make_url
from sqlalchemy.engine import URL
from torch import distributed

from tests.browser import started_browser


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a unit test started Ray: move it to tests/integration")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture
def _process_group() -> None:
    """A process group of this process only. It is not destroyed, because DeepSpeed caches groups created with it."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Handle SIGINT as in a terminal, here and in child processes. Shells make background processes ignore it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def browser() -> Iterator[WebDriver]:
    """A browser that tests share."""
    with started_browser() as browser:
        yield browser


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, where SQLite does not wait for a disk at each commit."""
    with tempfile.TemporaryDirectory(prefix="rayloom-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def url(memory: Path) -> URL:
    """The URL of a study's file."""
    return make_url(f"sqlite:///{memory / 'study.db'}")
