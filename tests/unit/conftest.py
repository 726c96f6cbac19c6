"""Unit tests start no Ray."""

from collections.abc import Iterator

import pytest
from torch import distributed


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a unit test started Ray: move it to tests/integration")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture
def _process_group() -> Iterator[None]:
    """One of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
