"""Unit tests start no Ray."""

import pytest


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a unit test started Ray: move it to tests/integration")

    monkeypatch.setattr(ray, "init", refuse)
