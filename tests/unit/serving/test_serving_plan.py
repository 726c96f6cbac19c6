"""Which versions a recipe serves, and in which roles."""

from pathlib import Path

import pytest
from upath import UPath

from app.config import Placement, Recipe, load_recipe
from app.repository.repository import Repository
from app.serving.demand import Scaling
from app.serving.deployment import deployed_model, promote_named
from app.tensors import Tensor
from jobs._cluster import cores_of_nodes
from tests.helpers import ROOT
from tests.publishing import CARD, files_in
from tests.wording import refused


@pytest.fixture
def storage(tmp_path: Path) -> UPath:
    """With versions 1, in production, 2, 3, and 4, which answers otherwise."""
    repository, files = Repository(UPath(tmp_path / "storage")), files_in(tmp_path / "files")
    for outputs in (2, 2, 2, 5):
        answer = Tensor(name="logits", dtype="float32", shape=(-1, outputs))
        repository.publish("toy", files, CARD.model_copy(update={"outputs": (answer,)}))
    repository.promote("toy", 1)
    return UPath(tmp_path / "storage")


def recipe(*overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/reviews.yaml", ["name=toy", *overrides])


def test_a_recipe_names_versions_and_aliases_stand_for_the_rest(storage: UPath) -> None:
    repository = Repository(storage)
    repository.promote("toy", 2, "canary")
    alone = deployed_model(recipe(), storage)
    assert [served.version for served in alone.versions] == [1]
    assert alone.scaling == Scaling(
        min_replicas=2, max_replicas=2, upscale_delay_s=5, downscale_delay_s=300
    )  # as was measured
    tried = recipe(
        "serve.canary={percent: 10}", "serve.shadow={version: 3}", "serve.replicas=[1, 4]", "serve.threads=3"
    )
    model = deployed_model(tried, storage)
    assert model.canary is not None
    assert model.shadow is not None
    assert [served.version for served in model.versions] == [1, 2, 3]
    assert (model.canary.percent, model.shadow.percent) == (10, 100)
    assert (model.scaling.min_replicas, model.scaling.max_replicas, model.production.threads) == (1, 4, 3)
    promote_named(tried, repository)
    assert [repository.aliases("toy").of(version) for version in (1, 2, 3)] == [["production"], ["canary"], ["shadow"]]


def test_replicas_and_threads_fit_on_the_nodes_that_serve(storage: UPath) -> None:
    said: list[str] = []
    serving = CARD.serving.model_copy(update={"replicas": 64, "threads": 4})
    Repository(storage).publish(
        "toy", files_in(Path(storage.parent.path) / "large"), CARD.model_copy(update={"serving": serving})
    )
    model = deployed_model(recipe("serve.version=5"), storage, lambda: [2, 16], said.append)
    assert (model.scaling.max_replicas, model.production.threads) == (2, 2)
    assert said == [
        "toy, version 5, was measured with replicas=64 of threads=4, and the smallest of 2 nodes that may serve it has "
        "2 cores: replicas=2 of threads=2 are served; set serve.replicas and serve.threads for others"
    ]
    explicit = recipe("serve.version=5", "serve.replicas=64", "serve.threads=4")
    assert deployed_model(explicit, storage, lambda: [2], said.append).scaling.max_replicas == 64
    assert len(said) == 1


def test_only_nodes_with_room_for_a_replica_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [{"CPU": 8.0, "rack": 1.0}, {"memory": 1.0}, {"CPU": 2.0}, {"CPU": 4.0, "GPU": 1.0, "rack": 1.0}]
    nodes = [{"Alive": True, "Resources": resources} for resources in held]
    monkeypatch.setattr("ray.nodes", lambda: [*nodes, {"Alive": False, "Resources": {"CPU": 16.0}}])
    assert cores_of_nodes(Placement({"CPU": 0.0, "GPU": 0.0})) == [8, 2, 4]
    assert cores_of_nodes(Placement({"CPU": 3.0, "GPU": 0.0})) == [8, 4]
    assert cores_of_nodes(Placement({"CPU": 0.0, "GPU": 0.5, "rack": 1.0})) == [4]
    for node, market in zip(nodes, ["on-demand", "spot", "spot", "other"], strict=True):
        node["Labels"] = {"market": market}
    assert cores_of_nodes(Placement({}, {"market": "on-demand"})) == [8]
    assert cores_of_nodes(Placement({}, {"market": "on-demand"}, {"market": "spot"})) == [8, 2], "the fallback's, too"


def test_a_version_is_not_tried_any_more_once_it_is_in_production(storage: UPath) -> None:
    repository = Repository(storage)
    promote_named(recipe("serve.canary={percent: 10, version: 2}"), repository)
    promote_named(recipe("serve.version=2", "serve.canary={percent: 10, version: 3}"), repository)
    assert [repository.aliases("toy").of(version) for version in (1, 2, 3)] == [
        ["previous"],
        ["production"],
        ["canary"],
    ]


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("serve.canary={percent: 10}", "candidate.none"),
        ("serve.shadow={}", "candidate.none"),
        ("serve.canary={percent: 10, version: 1}", "versions.equal"),
        ("serve.canary={percent: 10, version: 9}", "version.unknown"),
        ("serve.shadow={version: 4}", "versions.differ"),
    ],
)
def test_what_cannot_be_tried_is_refused(storage: UPath, override: str, rule: str) -> None:
    with refused(rule):
        deployed_model(recipe(override), storage)
