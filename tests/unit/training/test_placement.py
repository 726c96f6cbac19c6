"""Selection of training nodes by kind of GPU, custom resources and labels."""

from typing import Any

import pytest
from optuna import Trial

from app.config import load_recipe
from app.training.ray_worker import resources_of, worker_slots
from app.tuning.space import load_space
from tests.helpers import ROOT
from tests.wording import refused

DIGITS = str(ROOT / "recipes/digits.yaml")


def node(labels: dict[str, str], alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Labels": labels, "Resources": {"CPU": 2.0, **resources}}


@pytest.mark.parametrize(
    ("selector", "selected"),
    [("a", "a"), ("!a", "bc-"), ("in(a, b)", "ab"), ("in(a,b)", "ab"), ("!in(a, b)", "c-"), ("ab", "")],
)
def test_a_label_selector_means_what_it_means_to_ray(selector: str, selected: str) -> None:
    placement = load_recipe(DIGITS, [f"train.labels={{zone: '{selector}'}}"]).train.placement
    zones: dict[str, dict[str, str]] = {"a": {"zone": "a"}, "b": {"zone": "b"}, "c": {"zone": "c"}, "-": {"other": "a"}}
    assert "".join(name for name, labels in zones.items() if placement.selects(node(labels))) == selected


def test_a_replica_falls_back_on_other_nodes() -> None:
    labels = ["serve.labels={market: on-demand}", "serve.fallback_labels={market: spot, zone: a}"]
    placement = load_recipe(DIGITS, labels).serve.placement
    assert placement.selects(node({"market": "on-demand", "zone": "b"}))
    assert placement.selects(node({"market": "spot", "zone": "a"}))
    assert not placement.selects(node({"market": "spot", "zone": "b"}))
    assert placement.options == {
        "label_selector": {"market": "on-demand"},
        "fallback_strategy": [{"label_selector": {"market": "spot", "zone": "a"}}],
    }


def test_a_worker_reserves_what_selects_its_node() -> None:
    train = load_recipe(
        DIGITS, ["train.device=gpu", "train.accelerator_type=A100-80G", "train.resources={fast: 0.5}"]
    ).train
    assert resources_of(train, 2) == {"CPU": 2.0, "GPU": 2.0, "accelerator_type:A100-80G": 0.002, "fast": 1.0}
    assert train.preparation.resources == {"CPU": 1.0, "fast": 0.5}
    has = {"GPU": 1.0, "accelerator_type:A100-80G": 1.0, "fast": 1.0}
    assert train.placement.fits(node({}, **has))
    assert not train.placement.fits(node({}, alive=False, **has))
    assert not train.placement.fits(node({}, **{**has, "fast": 0.25}))
    assert not train.placement.fits(node({}, **{"GPU": 1.0, "accelerator_type:T4": 1.0, "fast": 1.0}))


@pytest.mark.parametrize(
    ("held", "amount", "count"),
    [(2.0, 0.2, 10), (0.3, 0.1, 3), (1.0, 0.1, 10), (3 * 0.1, 0.3, 1), (1.0, 0.3, 3), (0.5, 1, 0)],
)
def test_amounts_are_counted_as_ray_does(
    held: float, amount: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_recipe(DIGITS, [f"train.cpus_per_worker={amount}"]).train
    monkeypatch.setattr("ray.nodes", lambda: [node({}, CPU=held) | {"NodeName": "a"}])
    assert worker_slots(config) == {"a": count}
    assert config.placement.fits(node({}, CPU=held)) is (count > 0)


@pytest.mark.parametrize(
    ("overrides", "rule", "key"),
    [
        (["train.accelerator_type=T4"], "keys.contradict", "train"),
        (["train.labels={zone: 'in()'}"], "labels.selector", "train.labels"),
        (["train.labels={zone: a}", "train.workers=[1,2]"], "keys.contradict", "train"),
        (["train.resources={GPU: 1}"], "resources.built_in", "train.resources"),
    ],
)
def test_what_selects_no_node_is_refused(overrides: list[str], rule: str, key: str) -> None:
    with refused(rule, key):
        load_recipe(DIGITS, overrides)


def test_all_trials_have_nodes_of_one_kind() -> None:
    recipe = load_recipe(DIGITS, ["train.resources={fast: 1}"])
    with refused("space.key_not_searched", "tune.space"):
        load_space(f"{__name__}:space", recipe)


def space(trial: Trial) -> None:
    trial.suggest_int("train.resources.fast", 1, 2)
