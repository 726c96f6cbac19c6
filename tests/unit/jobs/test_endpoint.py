"""A change of the endpoint that is stopped halfway."""

import os
import signal

import pytest

from app.serving.config import EndpointConfig
from app.serving.pool_configs import PoolConfigs
from app.serving.pools import SHARED
from jobs import _endpoint


def test_a_job_that_is_asked_to_stop_gives_back_what_was_served_before(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def run(_: object, pools: PoolConfigs, *__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # the second one comes while it gives back
        given.append(pools.shared.revision)

    monkeypatch.setattr(_endpoint, "deployed_in", lambda _: {})
    monkeypatch.setattr(_endpoint, "_run", run)
    before = PoolConfigs({SHARED: EndpointConfig(revision="earlier")})
    with pytest.raises(SystemExit):
        _endpoint.roll_out(before, before, SHARED, 60.0)
    assert given == ["earlier"]
