"""What the endpoint claims above training, and how long a deployment waits."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError
from ray.serve import context
from ray.serve.schema import ApplicationStatus

from app.cluster.coordinator_internals import on_node
from app.config import TensorParallelConfig
from app.serving.demand import Demand, Scaling
from jobs._claim import awaited_by, held_by
from jobs._endpoint import _await_running
from jobs._serve_internals import Deployed, deployed_in

SHARD = {"CPU": 2.0}
SHARDED = Demand(scaling=Scaling(cpus=1.0), sharded=(TensorParallelConfig(size=2, cpus_per_process=2),))
REPLICA = SHARDED.bundles[0]


def deployed(*replicas: tuple[str, str | None], target: int) -> Deployed:
    details = [{"state": state, "node_ip": address} for state, address in replicas]
    return Deployed.of(
        {"replicas": details, "target_num_replicas": target, "deployment_config": {"user_config": {}}},
    )


def test_the_shards_of_a_replica_that_loads_are_waited_for() -> None:
    pool = (SHARDED, deployed(("RUNNING", "10.0.0.1"), ("STARTING", "10.0.0.2"), target=3))
    assert awaited_by([pool]) == [REPLICA, SHARD, SHARD, SHARD, SHARD]
    assert held_by([pool]) == [on_node(REPLICA, "10.0.0.1"), on_node(REPLICA, "10.0.0.2"), SHARD, SHARD]


def test_a_replica_that_stops_holds_what_it_has_and_waits_for_nothing() -> None:
    pool = (SHARDED, deployed(("STOPPING", "10.0.0.1"), target=0))
    assert not awaited_by([pool])
    assert held_by([pool]) == [on_node(REPLICA, "10.0.0.1"), SHARD, SHARD]


def test_a_serve_that_others_shut_down_is_not_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception, *_: object, **__: object) -> None:
        raise error

    controller = SimpleNamespace(check_alive=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(context, "_global_client", SimpleNamespace(_controller=controller))
    monkeypatch.setattr(context, "_cached_client_from_current_session", lambda: context._global_client is not None)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get", partial(fail, RayActorError()))
    monkeypatch.setattr("ray.get_actor", partial(fail, ValueError("there is no such actor")))
    assert not deployed_in("toy")


@pytest.mark.parametrize("ready_s", [10.5, 99.0])
def test_a_slow_serve_is_asked_until_the_deadline_and_once_more(
    ready_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, asked = [0.0], list[float]()

    def status() -> SimpleNamespace:
        asked.append(now_s[0])
        now_s[0] += 1.0
        state = ApplicationStatus.RUNNING if now_s[0] >= ready_s else ApplicationStatus.DEPLOYING
        return SimpleNamespace(applications={"toy": SimpleNamespace(status=state, deployments={})})

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr("jobs._endpoint.time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    monkeypatch.setattr("ray.serve.status", status)
    with pytest.raises(TimeoutError) if ready_s > 11 else nullcontext():
        _await_running("toy", 10.0)
    assert asked == [0.0, 3.0, 6.0, 9.0, 10.0]
