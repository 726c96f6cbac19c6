"""Tensor groups within nodes: what is refused before a run starts, and at its start."""

import pytest
import torch

from app.config import PlanConfig
from app.training.coordination.topology import require_groups_within_nodes, require_room_for_groups
from app.training.worker import Worker
from tests.wording import refused


@pytest.mark.parametrize(
    ("tensor", "workers", "slots"),
    [
        (1, 4, {"a": 1, "b": 1}),  # Ray itself waits for room
        (2, 4, {"a": 2, "b": 2}),
        (2, 4, {"a": 3, "b": 2, "c": 1}),
        (4, 8, {"a": 4, "b": 5}),
    ],
)
def test_nodes_that_hold_whole_groups_are_accepted(tensor: int, workers: int, slots: dict[str, int]) -> None:
    require_room_for_groups(PlanConfig(tensor=tensor), workers, slots)


@pytest.mark.parametrize(
    ("tensor", "workers", "slots"), [(4, 4, {"a": 3, "b": 3}), (2, 4, {"a": 3, "b": 1}), (2, 8, {"a": 2, "b": 2})]
)
def test_nodes_without_room_for_whole_groups_are_refused(tensor: int, workers: int, slots: dict[str, int]) -> None:
    with refused("tensor_group.no_room", "train.plan.tensor") as error:
        require_room_for_groups(PlanConfig(tensor=tensor), workers, slots)
    assert ", ".join(f"{name} {number}" for name, number in slots.items()) in str(error.value)


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize(
    ("rank", "local_rank", "local_size", "tensor", "is_refused"),
    [
        (2, 0, 2, 2, False),
        (5, 1, 4, 4, False),
        (2, 2, 3, 2, True),  # ranks 2 and 3 lie on two nodes of three workers
        (3, 0, 3, 2, True),
        (4, 1, 3, 2, False),
        (0, 0, 2, 4, True),
    ],
)
def test_a_group_that_straddles_nodes_is_refused_at_the_start(
    rank: int,
    local_rank: int,
    local_size: int,
    tensor: int,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
    worker = Worker(rank, 8, torch.device("cpu"))
    if not is_refused:
        require_groups_within_nodes(worker, PlanConfig(tensor=tensor))
        return
    with refused("tensor_group.split", "train.plan.tensor"):
        require_groups_within_nodes(worker, PlanConfig(tensor=tensor))
