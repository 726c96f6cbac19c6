"""How many replicas are wanted."""

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig

from app.config import TensorParallelConfig
from app.serving.batching.scheduler import BatchingPolicy
from app.serving.batching.statistics import RecentLatencies
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.serving.demand import Scaling
from app.serving.scaling import desired_replicas, target_ongoing_requests
from jobs._endpoint import desired_pools
from jobs._serve_internals import Deployed
from serve_deployments.autoscaling import DIRECT, ENDED, LATENCY, decide
from tests.wording import refused


@pytest.mark.parametrize(
    ("replicas", "ongoing", "latency_to_target", "wanted"),
    [
        (1, 8, 0.0, 1),
        (1, 24, 0.0, 3),
        (4, 8, 0.0, 1),
        (4, 0, 0.0, 0),  # Serve keeps the least
        (2, 8, 1.3, 2.6),  # slower than the target: more, though there is room for the load
        (2, 40, 1.3, 5),  # the load asks for still more
        (2, 8, 30.0, 4),  # twice as many at once, at most
        (2, 8, 0.8, 2),  # one fewer might miss the target
        (2, 24, 0.8, 3),
        (2, 8, 0.4, 1),
    ],
)
def test_load_and_latency_each_ask_for_replicas_and_the_most_are_wanted(
    replicas: int, ongoing: float, latency_to_target: float, wanted: float
) -> None:
    assert desired_replicas(replicas, ongoing, 8.0, latency_to_target) == pytest.approx(wanted)


def context(reported: dict[str, dict[str, float]], grown_s: float | None = None) -> SimpleNamespace:
    """What Serve tells of two replicas with four requests that it sees, at second 1,000."""
    return SimpleNamespace(
        aggregated_metrics=reported,
        last_scale_up_time=grown_s,
        current_time=1000.0,
        current_num_replicas=2,
        target_num_replicas=2,
        total_num_requests=4.0,
        config=AutoscalingConfig(target_ongoing_requests=8),
    )


@pytest.mark.parametrize(("grown_s", "wanted"), [(None, 3.0), (970.0, 3.0), (971.0, 2.0)])
def test_latency_asks_for_no_more_until_the_last_replica_has_had_its_effect(
    grown_s: float | None, wanted: float
) -> None:
    assert decide(context({LATENCY: {"one": 0.2, "other": 1.5}}, grown_s))[0] == wanted


def test_a_replica_that_has_not_started_yet_is_not_let_go_of() -> None:
    starting = context({LATENCY: {"one": 0.2, "other": 1.5}}, 971.0)
    starting.target_num_replicas = 3
    assert decide(starting)[0] == 3.0


def test_requests_that_serve_sees_and_those_that_it_does_not_ask_for_replicas_together() -> None:
    assert decide(context({DIRECT: {"one": 15.5, "other": 4.5}}))[0] == 3.0


def test_the_last_replica_stays_while_short_requests_come_between_two_reports() -> None:
    idle = context({ENDED: {"one": 0.0, "other": 0.0}})
    asked = context({ENDED: {"one": 0.0, "other": 0.2}})
    new = context({})
    idle.total_num_requests = asked.total_num_requests = new.total_num_requests = 0.0
    assert [decide(each)[0] for each in (idle, asked, new)] == [0.0, 1.0, 1.0]


def test_a_full_call_of_the_smallest_engine_is_what_a_replica_should_hold() -> None:
    assert target_ongoing_requests([32, 4]) == 4
    assert target_ongoing_requests([]) == 1


def test_models_that_share_replicas_get_what_each_asked_for() -> None:
    fixed = Scaling(min_replicas=2, max_replicas=2, cpus=0.5, gpus=0.25, upscale_delay_s=1, downscale_delay_s=900,
                    resources={"rack": 0.5, "disk": 1.0})  # fmt: skip
    one = Scaling(
        min_replicas=1,
        max_replicas=4,
        cpus=0.25,
        gpus=0.5,
        latency_target_s=0.2,
        upscale_delay_s=5,
        downscale_delay_s=60,
    )
    other = Scaling(
        min_replicas=1,
        max_replicas=3,
        resources={"rack": 0.25},
        latency_target_s=0.1,
        upscale_delay_s=20,
        downscale_delay_s=300,
    )
    together = Scaling.combined([fixed, one, other])
    assert (together.min_replicas, together.max_replicas, together.cpus, together.gpus) == (2, 4, 0.75, 0.75)
    assert (together.latency_target_s, together.upscale_delay_s, together.downscale_delay_s) == (0.1, 5, 300)
    assert together.resources == {"rack": 0.75, "disk": 1.0}
    assert Scaling.combined([]) == Scaling()


def test_an_endpoint_of_another_release_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    version = {"storage": "s", "name": "old", "version": 1, "threads": 1, "policy": {"max_batch_size": 8}}
    deployed = {"models": {"old": {"production": version}}}
    monkeypatch.setattr("jobs._endpoint.deployed_in", lambda *_: {"rayloom": Deployed(deployed, {}, [], 1, 0)})
    with refused("endpoint.other_release"):
        desired_pools()


def test_processes_that_share_a_model_are_reserved_beside_its_replica() -> None:
    split = TensorParallelConfig(size=4, cpus_per_process=2, gpus_per_process=1)
    version = VersionConfig(
        storage="s",
        name="large",
        version=1,
        seal="of its manifest",
        threads=1,
        policy=BatchingPolicy(max_batch_size=8),
        tensor_parallel=split,
    )
    large = DeployedModel(production=version, scaling=Scaling(cpus=0.5))
    again = EndpointConfig.model_validate_json(EndpointConfig(models={"large": large}).model_dump_json())
    assert again.demand.reserved == {"CPU": 8.5, "GPU": 4.0}
    assert again.models["large"].production == version


def test_latencies_are_forgotten_after_a_while() -> None:
    now_s = 0.0
    latencies = RecentLatencies(lambda: now_s)
    assert latencies.percentile_s(0.95) is None
    for milliseconds in range(1, 101):
        latencies.add(milliseconds / 1e3)
    assert latencies.percentile_s(0.95) == pytest.approx(0.095, abs=0.001)
    now_s = 9.0
    latencies.add(1.0)
    now_s = 11.0
    assert latencies.percentile_s(0.5) == 1.0
