"""Which versions a recipe serves, and in which roles."""

from pathlib import Path

import pytest
from upath import UPath

from app.config import Recipe, load_recipe
from app.errors import RayloomError
from app.repository.repository import Repository
from app.serving.config import Scaling
from app.serving.deployment import deployed_model, promote_named
from app.tensors import Tensor
from tests.helpers import ROOT
from tests.publishing import CARD, files_in


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
    ("override", "words"),
    [
        ("serve.canary={percent: 10}", "run 'rayloom models promote toy VERSION --alias canary'"),
        ("serve.shadow={}", "has no shadow: run"),
        ("serve.canary={percent: 10, version: 1}", "serve.canary is version 1, and so is production"),
        ("serve.canary={percent: 10, version: 9}", "no version 9"),
        ("serve.shadow={version: 4}", "version 4 gives logits float32 [-1, 5], expected logits float32 [-1, 2]"),
    ],
)
def test_what_cannot_be_tried_is_refused(storage: UPath, override: str, words: str) -> None:
    with pytest.raises(RayloomError) as refused:
        deployed_model(recipe(override), storage)
    assert words in str(refused.value)
