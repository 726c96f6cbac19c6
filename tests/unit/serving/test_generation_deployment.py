"""How a recipe deploys a published language model, and what of it is refused before anything starts."""

from pathlib import Path

import pytest
from upath import UPath

from app.config import Recipe, load_recipe
from app.repository.repository import Repository
from app.serving.config import DeployedGenerator, EndpointConfig
from app.serving.deployment import deployed_model, promote_named
from app.serving.pool_configs import PoolConfigs
from app.serving.pools import SHARED
from app.tensors import Tensor
from jobs._endpoint import require_room
from tests.helpers import ROOT
from tests.publishing import CARD, GENERATION, files_in
from tests.wording import refused


@pytest.fixture
def storage(tmp_path: Path) -> UPath:
    """Version 1, in production, and 2 generate tokens. 3 answers batches, 4 has no template, 5 is shorter."""
    repository, files = Repository(UPath(tmp_path / "storage")), files_in(tmp_path / "files")
    others = ({"vocab_size": 301}, None, {"has_chat": False}, {"context_length": 64})
    for change in ({}, *others):
        generation = None if change is None else GENERATION.model_copy(update=change)
        columns = generation.vocab_size if generation else 2
        answer = Tensor(name="logits", dtype="float32", shape=(-1, -1, columns))
        repository.publish("toy", files, CARD.model_copy(update={"generation": generation, "outputs": (answer,)}))
    repository.promote("toy", 1)
    return UPath(tmp_path / "storage")


def recipe(*overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/reviews.yaml", ["name=toy", "serve.batching={}", *overrides])


def test_the_version_decides_that_a_name_generates_tokens(storage: UPath) -> None:
    tried = recipe(
        "serve.canary={percent: 10, version: 2}", "serve.generation={cache_mb: 64, max_tokens: 7, priority_levels: 3}"
    )
    model = deployed_model(tried, storage, lambda: [1, 8])
    assert isinstance(model, DeployedGenerator)
    assert model.canary is not None
    assert (model.canary.version.version, model.canary.percent) == (2, 10)
    policy = model.production.policy
    assert (policy.max_tokens, policy.priority_levels, policy.default_priority) == (7, 3, 3)
    # As many threads as the smallest node has cores.
    assert (model.scaling.max_replicas, model.production.threads) == (2, 1)
    promote_named(tried, Repository(storage))
    assert Repository(storage).aliases("toy").of(2) == ["canary"]


def test_a_name_stands_for_one_model_of_either_kind(storage: UPath) -> None:
    tokens, batches = deployed_model(recipe(), storage), deployed_model(recipe("serve.version=3"), storage)
    config = EndpointConfig().serving("other", batches).serving("toy", batches).serving("toy", tokens)
    assert EndpointConfig.model_validate_json(config.model_dump_json()) == config
    assert (list(config.models), list(config.generators)) == (["other"], ["toy"])
    assert config.scaling.max_replicas == 2
    assert config.max_requests > 2 * 256 + 64
    assert list(config.without("toy").deployed) == ["other"]
    assert list(config.serving("toy", batches).models) == ["other", "toy"]


@pytest.mark.parametrize(
    ("override", "rule", "key"),
    [
        ("serve.shadow={version: 3}", "versions.differ", None),
        ("serve.canary={percent: 10, version: 4}", "versions.differ", None),
        ("serve.canary={percent: 10, version: 5}", "versions.differ", None),
        ("serve.batching={max_batch_size: 4}", "serve.kind", "serve.batching"),
        ("serve.cascade={before: [small]}", "serve.kind", "serve.cascade"),
        ("serve.tensor_parallel={size: 2}", "serve.kind", "serve.tensor_parallel"),
        ("serve.generation={cache_mb: 7}", "generation.cache", "serve.generation.cache_mb"),
    ],
)
def test_what_a_language_model_cannot_be_served_with_is_refused(
    storage: UPath, override: str, rule: str, key: str | None
) -> None:
    with refused(rule, key):
        deployed_model(recipe(override), storage)


def test_a_version_for_a_gpu_has_it_alone(storage: UPath, tmp_path: Path) -> None:
    key = CARD.engine_key.model_copy(update={"engine": "vllm", "device": "gpu", "precision": "bf16"})
    answer = Tensor(name="logits", dtype="float32", shape=(-1, -1, GENERATION.vocab_size))
    card = CARD.model_copy(update={"generation": GENERATION, "outputs": (answer,), "engine_key": key})
    Repository(storage).publish("toy", files_in(tmp_path / "plain"), card)
    with refused("generation.gpu", "serve.gpus_per_replica"):
        deployed_model(recipe("serve.version=6"), storage)
    with refused("generation.gpu", "serve.generation.tensor_parallel"):
        deployed_model(recipe("serve.generation.tensor_parallel=2"), storage)
    model = deployed_model(
        recipe("serve.version=6", "serve.gpus_per_replica=1", "serve.generation.tensor_parallel=2"), storage
    )
    assert isinstance(model, DeployedGenerator)
    config = EndpointConfig().serving("toy", model)
    assert (config.scaling.gpus, config.scaling.max_gpus) == (2, 2)
    assert config.demand.memory_bytes == model.production.weights_bytes
    settings = model.production.settings(Repository(storage).manifest("toy", 6))
    assert (settings.precision, settings.tensor_parallel) == ("bf16", 2)


def test_keys_of_language_models_are_refused_for_a_model_that_answers_batches(storage: UPath) -> None:
    Repository(storage).promote("toy", 3)
    with refused("serve.kind", "serve.generation"):
        deployed_model(recipe("serve.generation={max_streams: 2}"), storage)
    with refused("versions.differ"):
        deployed_model(recipe("serve.shadow={version: 1}"), storage)


def test_replicas_need_the_memory_of_their_caches(storage: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deployed_model(recipe("serve.replicas=2", "serve.generation={cache_mb: 1024}"), storage)
    before = PoolConfigs()
    after = before.serving(SHARED, "toy", model)
    demand = after.shared.demand

    def nodes(*gib: float) -> None:
        held = [{"CPU": 2.0, "memory": each * 2**30} for each in gib]
        alive = [
            {"Alive": True, "NodeID": str(number), "Resources": resources} for number, resources in enumerate(held)
        ]
        monkeypatch.setattr("ray.nodes", lambda: alive)

    nodes(1.5, 2.5)
    require_room(before, SHARED, demand)
    # A change needs room for one more replica.
    nodes(1.5, 1.5)
    require_room(before, SHARED, demand)
    with refused("endpoint.memory", "serve.generation.cache_mb"):
        require_room(after, SHARED, demand)
