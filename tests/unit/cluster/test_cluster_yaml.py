"""cluster.yaml, by the launcher's own schema."""

import copy
import shlex

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.helpers import ROOT

CONFIG = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))


def test_the_launcher_accepts_it() -> None:
    validate_config(prepare_config(copy.deepcopy(CONFIG)))


def test_the_schema_would_refuse_a_wrong_key() -> None:
    with pytest.raises(Exception, match="idle_timeout"):
        validate_config(prepare_config({**copy.deepcopy(CONFIG), "idle_timeout": 1}))


def test_it_has_a_cpu_group_and_a_spot_gpu_group_that_starts_empty() -> None:
    groups = CONFIG["available_node_types"]
    assert CONFIG["head_node_type"] in groups
    assert groups["cpu"]["max_workers"] >= 1
    assert groups["gpu_spot"]["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
    assert groups["gpu_spot"]["min_workers"] == 0


@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_every_node_has_the_fast_ingress_and_the_same_storage(commands: str) -> None:
    *_, command = CONFIG[commands]
    settings, _, prepared = command.partition(";")
    given = dict(word.split("=", 1) for word in shlex.split(settings) if "=" in word)
    assert given == {"RAY_AUTH_MODE": "token", "RAYLOOM_STORAGE": "s3://YOUR-BUCKET/rayloom"}
    # A node whose settings fail must not start without them.
    assert prepared.strip().startswith('settings="$(rayloom node)" && eval "$settings" && {')
    assert "} && ray start " in prepared


def test_nodes_with_gpus_install_tensorrt_and_all_that_the_others_do() -> None:
    everywhere = CONFIG["setup_commands"]
    assert any("'.[demo,s3]'" in command for command in everywhere)
    expected = [command.replace("'.[demo,s3]'", "'.[demo,s3,tensorrt]'") for command in everywhere]
    assert CONFIG["available_node_types"]["gpu_spot"]["worker_setup_commands"] == expected
