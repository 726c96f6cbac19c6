"""What training and the endpoint rely on in Ray's coordinator, which is private."""

from types import SimpleNamespace

import pytest
import ray.train
from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import ResourceRequestPriority
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import _AutoscalingCoordinatorActor
from ray.exceptions import GetTimeoutError
from ray.train._internal.autoscaling_coordinator_client import build_train_resource_request

from app.cluster.coordinator_internals import PLACED, WAITING, claim_of, has_waiting_replicas, on_node
from app.training.ray_trainer import DividingPolicy

NODES = [
    {"NodeID": name, "Alive": True, "Resources": {"CPU": 2.0, "memory": 1.0, f"node:10.0.0.{number}": 1.0}}
    for number, name in enumerate("ab")
]
TRAINING = "train"


def test_a_claim_takes_room_from_training_until_it_is_cancelled_or_expires() -> None:
    now_s = 0.0
    coordinator = _AutoscalingCoordinatorActor(lambda: now_s, lambda *_, **__: None, lambda: NODES)
    policy = DividingPolicy(ray.train.ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1}), [1, 2, 4])

    def workers() -> int:
        return policy._count_possible_workers(coordinator.get_reserved_resources(TRAINING))

    workers_of = [{"CPU": 1.0}] * 4
    coordinator.request_resources(TRAINING, workers_of, expire_after_s=180, priority=ResourceRequestPriority.HIGH)
    assert workers() == 4
    coordinator.request_resources(**claim_of(WAITING, [{"CPU": 1.0, "GPU": 0.0}]))
    assert coordinator.get_reserved_resources(WAITING)
    assert workers() == 2, "three CPUs are left, and three workers would not divide the batch"
    coordinator.request_resources(**claim_of(WAITING, [{"CPU": 2.0}, {"CPU": 2.0}]))
    assert workers() == 0
    coordinator.cancel_request(WAITING)
    assert workers() == 4
    coordinator.request_resources(**claim_of(PLACED, [on_node({"CPU": 2.0}, "10.0.0.1")]))
    assert list(coordinator.get_reserved_resources(PLACED)) == ["b"]
    assert workers() == 2
    now_s = 61.0
    coordinator._tick()
    assert workers() == 4


@pytest.mark.parametrize(("cpus", "amount", "workers"), [(0.5, 0.1, 5), (3.0, 0.3, 10), (3.0, 0.6, 5), (7.0, 0.7, 10)])
def test_fractions_of_a_cpu_are_counted_as_ray_counts_them(cpus: float, amount: float, workers: int) -> None:
    node = {"NodeID": "a", "Alive": True, "Resources": {"CPU": cpus}}
    coordinator = _AutoscalingCoordinatorActor(lambda: 0.0, lambda *_, **__: None, lambda: [node])
    policy = DividingPolicy(
        ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": amount}), range(1, workers + 1)
    )

    def send(config: ray.train.ScalingConfig, number: int) -> None:
        bundles, _ = build_train_resource_request(config, number)
        coordinator.request_resources(TRAINING, bundles, expire_after_s=180, priority=ResourceRequestPriority.HIGH)

    policy._coordinator_client = SimpleNamespace(send_resource_request=send)
    policy._send_resource_request()
    assert policy._count_possible_workers(coordinator.get_reserved_resources(TRAINING)) == workers
    coordinator.request_resources(**claim_of(WAITING, [{"CPU": amount}]))
    assert policy._count_possible_workers(coordinator.get_reserved_resources(TRAINING)) == workers - 1


def test_a_coordinator_that_is_lost_is_looked_up_again() -> None:
    policy = DividingPolicy(ray.train.ScalingConfig(num_workers=1), [1])
    policy._requester_id = TRAINING
    policy._coordinator_client = lost = SimpleNamespace(_autoscaling_coordinator=None)
    assert policy._get_reserved_resources() is None
    assert policy._coordinator_client is not lost


def test_a_slow_look_up_of_the_coordinator_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: object, **__: object) -> None:
        raise GetTimeoutError

    monkeypatch.setattr("ray.get_actor", time_out)
    assert not has_waiting_replicas()


def test_what_no_node_can_hold_takes_nothing() -> None:
    coordinator = _AutoscalingCoordinatorActor(lambda: 0.0, lambda *_, **__: None, lambda: NODES)
    coordinator.request_resources(**claim_of(WAITING, [{"CPU": 3.0}]))
    assert not coordinator.get_reserved_resources(WAITING)


def test_workers_are_asked_only_when_their_number_should_change() -> None:
    asked: list[str] = []
    worker = SimpleNamespace(execute_async=lambda asks: asked.append(asks.__name__))
    config = ray.train.ScalingConfig(
        num_workers=2, resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=0
    )

    class Policy(DividingPolicy):
        cpus = 0.0

        def _maybe_send_resource_request(self) -> None: ...

        def _get_reserved_resources(self) -> dict[str, dict[str, float]]:
            return {"a": {"CPU": self.cpus}}

    policy = Policy(config, [1, 2])
    for policy.cpus, num_workers, expected in ((2.0, 2, 0), (1.0, 2, 1), (1.0, 1, 0), (2.0, 1, 1)):
        group = SimpleNamespace(start_time=0.0, num_workers=num_workers, workers=[worker])
        policy.make_decision_for_running_worker_group(group, None)
        assert len(asked) == expected
        asked.clear()
