"""The batch sizes and the policy with which a version is served."""

from pathlib import Path

import pytest
from upath import UPath

from app.config import BatchingConfig, ServeConfig, TensorParallelConfig
from app.engines.base import ShapeProfile
from app.repository.manifest import ServingDefaults
from app.repository.repository import Repository
from app.serving.config import VersionConfig
from tests.engine_contract import rows
from tests.loading import model_card, publish_encoder
from tests.wording import refused


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(UPath(tmp_path / "storage"))


MEASURED = ServingDefaults(max_batch_size=16, preferred_batch_sizes=(4, 16), timeout_us=300, replicas=2, threads=3)
HALVES = TensorParallelConfig(size=2, cpus_per_process=4.5)
"""Compile measured the whole model."""


@pytest.mark.parametrize(
    ("cores", "given", "replicas", "threads"),
    [
        ([], ServeConfig(), 64, 2),
        ([128], ServeConfig(), 64, 2),
        ([2], ServeConfig(), 1, 2),
        ([1], ServeConfig(), 1, 1),
        ([5], ServeConfig(), 2, 2),
        ([64, 5], ServeConfig(), 4, 2),  # Serve spreads replicas evenly, so the smallest node counts
        ([8] * 32, ServeConfig(), 64, 2),
        ([4], ServeConfig(replicas=4), 4, 1),
        ([4], ServeConfig(replicas=8, threads=3), 8, 3),  # as the recipe sets
    ],
)
def test_no_node_serves_with_more_threads_than_cores(
    cores: list[int], given: ServeConfig, replicas: int, threads: int
) -> None:
    measured = MEASURED.model_copy(update={"replicas": 64, "threads": 2})
    card = model_card().model_copy(update={"serving": measured})
    served = card.within(cores).served(given)
    assert (served.replicas, served.threads) == (replicas, threads)


@pytest.mark.parametrize(
    ("given", "served"),
    [
        (ServeConfig(), MEASURED),
        (
            ServeConfig(batching=BatchingConfig(max_batch_size=8, timeout_us=0), replicas=5, threads=1),
            ServingDefaults(max_batch_size=8, preferred_batch_sizes=(4,), timeout_us=0, replicas=5, threads=1),
        ),
        (ServeConfig(threads=1), MEASURED.model_copy(update={"threads": 1})),
        (ServeConfig(replicas=3), MEASURED.model_copy(update={"replicas": 3, "threads": 2})),  # of the same six cores
        (ServeConfig(replicas=4), MEASURED.model_copy(update={"replicas": 4, "threads": 1})),
        (ServeConfig(replicas=8), MEASURED.model_copy(update={"replicas": 8, "threads": 1})),
        (
            ServeConfig(batching=BatchingConfig(max_batch_size=1)),
            MEASURED.model_copy(update={"max_batch_size": 1, "preferred_batch_sizes": ()}),
        ),
        (
            ServeConfig(batching=BatchingConfig(preferred_batch_sizes=[2, 16])),
            MEASURED.model_copy(update={"preferred_batch_sizes": (2, 16)}),
        ),
        (
            ServeConfig(batching=BatchingConfig(max_batch_size=64)),
            MEASURED.model_copy(update={"max_batch_size": 64}),
        ),
        (ServeConfig(tensor_parallel=HALVES), MEASURED.model_copy(update={"replicas": 1, "threads": 4})),
        (ServeConfig(tensor_parallel=HALVES, replicas=3), MEASURED.model_copy(update={"replicas": 3, "threads": 4})),
    ],
)
def test_a_recipe_wins_and_what_it_leaves_out_is_as_compile_measured(
    given: ServeConfig, served: ServingDefaults
) -> None:
    assert model_card().model_copy(update={"serving": MEASURED}).served(given) == served


@pytest.mark.parametrize(
    ("batching", "by_length"),
    [
        (BatchingConfig(timeout_us=7), {16: 16, 32: 2}),
        (BatchingConfig(preferred_batch_sizes=[]), {16: 16, 32: 2}),
        (BatchingConfig(max_batch_size=16), {}),
        (BatchingConfig(preferred_batch_sizes=[4]), {}),
    ],
)
def test_sizes_by_length_are_published_and_sizes_in_a_recipe_win(
    batching: BatchingConfig, by_length: dict[int, int], repository: Repository, tmp_path: Path
) -> None:
    measured = ServingDefaults.model_validate({**dict(MEASURED), "max_batch_size_by_length": {"16": 16, "32": 2}})
    publish_encoder(repository, tmp_path, model_card().model_copy(update={"serving": measured}))
    manifest = repository.manifest("toy", 1)
    assert manifest.serving == measured
    assert manifest.served(ServeConfig(batching=batching)).max_batch_size_by_length == by_length
    policy = VersionConfig.of("storage", manifest, ServeConfig(batching=batching)).policy
    assert [policy.max_rows(rows(1, length)) for length in (8, 32)] == ([16, 2] if by_length else [16, 16])


def test_a_manifest_without_sizes_by_length_has_one_size_for_all() -> None:
    earlier = MEASURED.model_dump()
    del earlier["max_batch_size_by_length"]
    assert ServingDefaults.model_validate(earlier) == MEASURED
    with pytest.raises(ValueError, match=r"max_batch_size_by_length is {8: 17}: expected 16"):
        ServingDefaults.model_validate({**earlier, "max_batch_size_by_length": {8: 17}})


def test_a_batch_is_not_larger_than_a_plan_takes() -> None:
    profile = ShapeProfile(batch_sizes=(1, 16), lengths=(16,))
    plan = model_card(engine="tensorrt", profile=profile).model_copy(update={"serving": MEASURED})
    assert plan.served(ServeConfig()) == MEASURED
    with refused("batching.sizes", "serve.batching.max_batch_size"):
        plan.served(ServeConfig(batching=BatchingConfig(max_batch_size=17)))


def test_rows_that_no_batch_reaches_are_not_preferred() -> None:
    measured = model_card().model_copy(update={"serving": MEASURED})
    with refused("batching.sizes", "serve.batching.preferred_batch_sizes"):
        measured.served(ServeConfig(batching=BatchingConfig(preferred_batch_sizes=[4, 17])))
