"""Every order of samples: two processes together read the batches that one reads."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from app.config import load_recipe
from app.data.prepared import Batch, Dataset
from app.ports import unused
from app.tasks import prepare
from app.training.data.batches import DataRank, Indices, SampleOrder
from app.training.data.orders import order_of
from tests.helpers import ROOT

BATCH, ROWS, EPOCHS = 16, 400, (1, 2)
SHARDS = "data.shards={size: 4096, window: 12KB}"
TOKENS = ["train.global_batch_size=null", "train.tokens_per_batch=512", "train.workers=2"]
SOURCES = ["data.source=null", "data.sources=[{source: A, weight: 3}, {source: B, weight: 1}]"]
CASES = {
    "in memory": [],
    "classes equally often": ["data.sampling=balanced"],
    "a curriculum": ["train.curriculum={by: length, epochs: 1.5}"],
    "of tokens": TOKENS,
    "several sources": SOURCES,
    "in shards": [SHARDS],
    "of tokens in shards": [SHARDS, *TOKENS],
    "several sources in shards": [SHARDS, *SOURCES],
    "groups": [],
}
"""Keys of a recipe with each order."""


@dataclass(frozen=True)
class Grouped(Dataset):
    """Samples of three groups."""

    def __len__(self) -> int:
        return ROWS

    @property
    def lengths(self) -> Sequence[int]:
        return [number * 7919 % 97 for number in range(ROWS)]

    @property
    def groups(self) -> Any:
        return np.array(["text", "image", "both"])[np.arange(ROWS) * 31 % 3]

    def batch(self, indices: Sequence[int]) -> Batch:
        raise NotImplementedError


def make_order(folder: str, case: str) -> SampleOrder:
    """Return the order of a case, whose data are written or found in ``folder``."""
    keys = [key.replace(": A", f": {folder}/a.csv").replace(": B", f": {folder}/b.csv") for key in CASES[case]]
    fixed = [f"data.source={folder}/a.csv", "data.test_fraction=null", "train.linear_baseline=false", "tune=null"]
    recipe = load_recipe(
        ROOT / "recipes/reviews.yaml", [*fixed, f"train.global_batch_size={BATCH}", *keys, f"storage={folder}"]
    )
    if case == "groups":
        data: Any = SimpleNamespace(train=Grouped(), origins=None)
        return order_of(recipe, data)
    data = prepare(recipe)
    return order_of(recipe, data, np.asarray(data.train.lengths, np.float32) if recipe.train.curriculum else None)


def batches_of(order: SampleOrder) -> list[list[int]]:
    return [order.batch(epoch, n).tolist() for epoch in EPOCHS for n in range(order.num_batches(epoch))]


def shares_of(order: SampleOrder, rank: DataRank) -> list[list[int]]:
    def share(epoch: int, number: int) -> Indices:
        return order.share(epoch, number, rank)

    return [share(epoch, number).tolist() for epoch in EPOCHS for number in range(order.num_batches(epoch))]


def as_rank(rank: int, port: int, folder: str, answers: Any) -> None:
    """Exchange the shares of all batches in all orders between two processes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    own = {case: shares_of(make_order(folder, case), DataRank(rank, 2)) for case in CASES}
    both: list[Any] = [None, None]
    distributed.all_gather_object(both, own)
    if rank == 0:
        answers.put(both)
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two sources and the shards of all cases, so that two processes do not both prepare them."""
    made = tmp_path_factory.mktemp("orders")
    for name, rows in (("a", ROWS), ("b", ROWS // 4)):
        lines = [f"{name} {'w ' * (n * 7 % 41)}{n},{'xxy'[n % 3]}" for n in range(rows)]
        (made / f"{name}.csv").write_text("\n".join(["text,label", *lines]), encoding="utf-8")
    return str(made)


@pytest.fixture(scope="module")
def whole(folder: str) -> dict[str, list[list[int]]]:
    """The batches of one process."""
    return {case: batches_of(make_order(folder, case)) for case in CASES}


@pytest.fixture(scope="module")
def halves(folder: str, whole: dict[str, list[list[int]]]) -> list[dict[str, list[list[int]]]]:
    """The shares of two processes."""
    assert whole  # creates the shards
    context, (port,) = multiprocessing.get_context("spawn"), unused(1)
    answers = context.Queue()
    workers = [context.Process(target=as_rank, args=(rank, port, folder, answers)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    found: list[dict[str, list[list[int]]]] = answers.get(timeout=120)
    for worker in workers:
        worker.join()
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_processes_share_the_batches_of_one(
    case: str, whole: dict[str, list[list[int]]], halves: list[dict[str, list[list[int]]]]
) -> None:
    first, second = (half[case] for half in halves)
    assert len(whole[case]) > len(EPOCHS)
    for batch, *parts in zip(whole[case], first, second, strict=True):
        assert all(parts)
        assert sorted(parts[0] + parts[1]) == sorted(batch)
        assert abs(len(parts[0]) - len(parts[1])) <= 1
