"""The models of a pool, which share its replicas."""

from pathlib import Path

from upath import UPath

from app.serving.config import DeployedModel
from app.serving.demand import Scaling
from app.serving.pool_configs import PoolConfigs
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
