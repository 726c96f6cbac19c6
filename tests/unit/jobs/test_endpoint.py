"""A change of the endpoint that is stopped or fails halfway."""

import os
import signal

import pytest

from app.errors import ClusterError
from app.serving.config import EndpointConfig
from app.serving.pool_configs import PoolConfigs
from app.serving.pools import SHARED, Pool
from jobs import _endpoint

BEFORE = PoolConfigs({SHARED: EndpointConfig(revision="earlier"), "rare": EndpointConfig(revision="earlier")})
AFTER = PoolConfigs({SHARED: EndpointConfig(revision="later"), "rare": EndpointConfig(revision="later")})


def is_earlier(pools: PoolConfigs) -> bool:
    return {config.revision for config in pools.by_pool.values()} == {"earlier"}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(None, "is deployed again"), (RuntimeError("no room"), "was not restored (no room): deploy its models again")],
)
def test_a_job_that_is_asked_to_stop_gives_back_what_was_served_before_and_awaits_nothing(
    error: Exception | None, outcome: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Pool] = []

    def give(pool: Pool, pools: PoolConfigs, _: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # the second one comes while it gives back
        assert is_earlier(pools)
        given.append(pool)
        if error and pool == "rare":
            raise error

    monkeypatch.setattr(_endpoint, "deployed_in", lambda _: {})
    monkeypatch.setattr(_endpoint, "_give", give)
    monkeypatch.setattr(_endpoint, "_await", lambda *_: given.clear())
    with pytest.raises(SystemExit):
        _endpoint.roll_out(BEFORE, AFTER, SHARED, 60.0)
    assert set(given) == set(BEFORE.by_pool)
    assert capsys.readouterr().out == f"stopped: what was served before {outcome}\n"


def test_a_failed_change_gives_every_pool_back_before_it_awaits_one(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def give(_: Pool, pools: PoolConfigs, *__: object) -> None:
        steps.append("give earlier" if is_earlier(pools) else "give later")

    def wait(_: Pool, pools: PoolConfigs, __: float) -> None:
        steps.append("await")
        if not is_earlier(pools) and len(steps) == 2 * len(AFTER.by_pool):
            raise RuntimeError("no such weights")

    monkeypatch.setattr(_endpoint, "deployed_in", lambda _: {})
    monkeypatch.setattr(_endpoint, "_give", give)
    monkeypatch.setattr(_endpoint, "_await", wait)
    with pytest.raises(ClusterError, match="goes on with what it served before: no such weights"):
        _endpoint.roll_out(BEFORE, AFTER, SHARED, 60.0)
    assert steps == ["give later", "await"] * 2 + ["give earlier"] * 2 + ["await"] * 2
