"""The models of a pool, which share its replicas."""

from pathlib import Path

from upath import UPath

from app.serving.config import DeployedModel
from app.serving.demand import Scaling
from app.serving.pool_configs import PoolConfigs
from app.serving.pools import SHARED
from tests.engine_contract import exported
from tests.toy import publish, version_config
from tests.wording import refused

STEADY = {"market": "on-demand"}


def test_the_models_of_a_pool_are_on_the_same_nodes(tmp_path: Path) -> None:
    storage = UPath(tmp_path)
    (version,) = publish(storage, exported())
    production, pool = version_config(storage, version), "vision"

    def model(**scaling: object) -> DeployedModel:
        return DeployedModel(production=production, scaling=Scaling.model_validate(scaling))

    pools = PoolConfigs().serving(pool, "one", model(labels=STEADY, fallback_labels={"market": "spot"}))
    with refused("pool.labels", "serve.labels"):
        pools.serving(pool, "other", model(labels={"market": "spot"}))
    with refused("pool.labels", "serve.fallback_labels"):
        pools.serving(pool, "other", model(labels=STEADY))
    both = pools.serving(pool, "other", model(labels=STEADY, fallback_labels={"market": "spot"}))
    assert both[pool].demand.placement.fallback_labels == {"market": "spot"}


def test_only_one_pool_and_those_of_another_release_get_new_replicas(tmp_path: Path) -> None:
    storage = UPath(tmp_path)
    (version,) = publish(storage, exported())
    model = DeployedModel(production=version_config(storage, version), scaling=Scaling())
    given = PoolConfigs().serving("old", "one", model).serving("kept", "two", model).serving("changed", "three", model)
    running = given.on_new_replicas(SHARED)
    assert all(config.is_of_this_release for config in running.by_pool.values()), "none had replicas"
    old = running["old"].model_copy(update={"revision": "0.0-1"})
    before = PoolConfigs({**running.by_pool, "old": old})
    after = before.on_new_replicas("changed")
    assert {pool for pool in before.by_pool if after[pool].revision != before[pool].revision} == {"old", "changed"}
    assert after["old"].is_of_this_release
