"""Every order of samples, in memory and in shards: what holds of its batches for any number of processes."""

import hashlib
import json
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import distributed

from app.config import Recipe, load_recipe
from app.data.labelled import LabelledDataset
from app.data.prepared import Indices
from app.tasks import prepare
from app.training.data.order import SampleOrder
from app.training.data.ranks import DataRank
from app.training.data.recipe_order import count_steps, order_of
from app.training.difficulty import find_difficulty
from tests.helpers import ROOT, in_fork, result_line
from tests.wording import refused

BATCH, ROWS, EPOCHS = 16, 400, (1, 2)
SHARDS = "data.shards={size: 4096, window: 12KB}"
TOKENS = ["train.global_batch_size=null", "train.tokens_per_batch=512", "train.workers=2"]
SOURCES = ["data.source=null", "data.sources=[{source: A, weight: 3}, {source: B, weight: 1}]"]
BALANCED, CURRICULUM = ["data.sampling=balanced"], ["train.curriculum={by: length, epochs: 1.5}"]
GROUPS = ["name=groups"]
RULES = {
    "shuffled": [],
    "classes equally often": BALANCED,
    "a curriculum": CURRICULUM,
    "a curriculum with classes equally often": [*CURRICULUM, *BALANCED],
    "of tokens": TOKENS,
    "several sources": SOURCES,
    "several sources in a curriculum": [*SOURCES, *CURRICULUM],
    "groups": GROUPS,
    "groups of tokens": [*GROUPS, *TOKENS],
    "groups in a curriculum with classes equally often": [*GROUPS, *CURRICULUM, *BALANCED],
}
CASES = {**RULES, **{f"{name}, in shards": [*keys, SHARDS] for name, keys in RULES.items()}}
"""Keys of a recipe with each order."""


@dataclass(frozen=True)
class Grouped(LabelledDataset):
    """Samples of three groups."""

    @property
    def groups(self) -> NDArray[np.str_]:
        return np.array(["text", "image", "both"])[np.arange(len(self)) * 31 % 3]


def recipe_of(folder: str, case: str) -> Recipe:
    keys = [key.replace(": A", f": {folder}/a.csv").replace(": B", f": {folder}/b.csv") for key in CASES[case]]
    fixed = [f"data.source={folder}/a.csv", "data.test_fraction=null", "train.linear_baseline=false", "tune=null"]
    return load_recipe(
        ROOT / "recipes/reviews.yaml", [*fixed, f"train.global_batch_size={BATCH}", *keys, f"storage={folder}"]
    )


def data_of(recipe: Recipe) -> Any:
    data: Any = prepare(recipe)
    if recipe.name == "groups":
        train = data.train
        return SimpleNamespace(train=Grouped(train.split, train.processor, train.targets), origins=None)
    return data


def make_order(folder: str, case: str) -> SampleOrder:
    """Return the order of a case, whose data are written or found in ``folder``."""
    recipe = recipe_of(folder, case)
    data = data_of(recipe)
    return order_of(recipe, data, find_difficulty(recipe, data) if recipe.train.curriculum else None)


def batches_of(order: SampleOrder) -> list[list[int]]:
    return [order.batch(epoch, n).tolist() for epoch in EPOCHS for n in range(order.num_batches(epoch))]


def shares_of(order: SampleOrder, rank: DataRank) -> list[list[int]]:
    def share(epoch: int, number: int) -> Indices:
        return order.share(epoch, number, rank)

    return [share(epoch, number).tolist() for epoch in EPOCHS for number in range(order.num_batches(epoch))]


def as_rank() -> None:
    """Exchange the shares of all batches in all orders between two processes, and print them."""
    folder = sys.argv[1]
    distributed.init_process_group("gloo")
    own = {case: shares_of(make_order(folder, case), DataRank(distributed.get_rank(), 2)) for case in CASES}
    both: list[Any] = [None, None]
    distributed.all_gather_object(both, own)
    if distributed.get_rank() == 0:
        print(f"RESULT {json.dumps({'both': both})}")
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
    done = in_fork(f"{__name__}:as_rank", folder, processes=2)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, list[list[int]]]] = result_line(done.stdout)["both"]
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


def resumed(folder: str, case: str, at: tuple[int, int], size: int) -> list[int]:
    """The batch that ranks read together, each of which has begun there."""
    shares = [make_order_again(folder, case).share(*at, DataRank(rank, size)) for rank in range(size)]
    read: list[int] = np.concatenate(shares).tolist()
    return read


def make_order_again(folder: str, case: str) -> SampleOrder:
    """A case's order that has entered no window."""
    if case not in _MADE:
        _MADE[case] = make_order(folder, case)
    made = _MADE[case]
    return SampleOrder(made.samples, made.rules, made.seed, made.mixtures)


_MADE: dict[str, SampleOrder] = {}


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_exactly_anywhere_on_any_number_of_workers(
    folder: str, case: str, whole: dict[str, list[list[int]]]
) -> None:
    order = make_order_again(folder, case)
    positions = [(epoch, number) for epoch in EPOCHS for number in range(order.num_batches(epoch))]
    assert len(positions) == len(whole[case])
    for place, size in product((0, 7, len(positions) // 2, len(positions) - 1), (1, 2, 4)):
        assert sorted(resumed(folder, case, positions[place], size)) == sorted(whole[case][place])


@pytest.mark.parametrize("case", [case for case in CASES if "sources" not in case and "equally" not in case])
def test_an_epoch_has_each_sample_once_but_those_that_fill_no_batch(folder: str, case: str) -> None:
    order = make_order_again(folder, case)
    total, seen_first = len(order.samples), set[int]()
    for epoch in EPOCHS:
        batches = [order.batch(epoch, number).tolist() for number in range(order.num_batches(epoch))]
        seen = Counter(row for batch in batches for row in batch)
        assert set(seen.values()) == {1}
        if case.startswith("groups") and "tokens" not in case:
            # Each group of each window may lack a sample less than a batch.
            windows = len(order.periods[0].starts(epoch)) - 1
            assert total - 3 * windows * (BATCH - 1) <= len(seen)
        else:
            assert len(seen) == (total if "tokens" in case else total // BATCH * BATCH)
        assert epoch == 1 or len(seen) == total or seen_first != seen.keys()
        seen_first = {*seen}


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("groups")])
def test_a_batch_has_samples_of_one_group(folder: str, case: str) -> None:
    order = make_order_again(folder, case)
    groups = order.rules.groups
    assert groups is not None
    met = [{*groups[order.batch(1, number)].tolist()} for number in range(order.num_batches(1))]
    assert {len(names) for names in met} == {1}
    assert set.union(*met) == {"text", "image", "both"}
    # They are spread over the window.
    assert len({*map(tuple, met[: len(met) // 2])}) == 3


class OneRare(Grouped):
    """Samples of which enough for a batch are of a group of their own, but not in a window of shards."""

    @property
    def groups(self) -> NDArray[np.str_]:
        return np.where(np.arange(len(self)) % 20, "text", "image")


def test_a_group_that_fills_no_batch_of_any_window_is_refused(folder: str) -> None:
    for case in ("shuffled", "shuffled, in shards"):
        recipe = recipe_of(folder, case)
        train: Any = prepare(recipe).train
        data: Any = SimpleNamespace(train=OneRare(train.split, train.processor, train.targets), origins=None)
        if "shards" in case:
            with refused("batch.fields", "train.global_batch_size"):
                order_of(recipe, data)
        else:
            counts = np.unique(data.train.groups, return_counts=True)[1]
            assert order_of(recipe, data).num_batches(1) == sum(counts // BATCH)


@pytest.mark.parametrize("case", [case for case in CASES if "equally" in case])
def test_a_window_has_all_labels_equally_often(folder: str, case: str) -> None:
    order = make_order_again(folder, case)
    rows = np.arange(len(order.samples))
    classes = order.samples.classes_at(rows)
    assert 1.8 < np.divide(*np.bincount(classes)) < 2.2
    starts = order.periods[0].starts(1)
    for first, last in pairwise(starts.tolist()):
        counts = np.bincount(classes[np.concatenate([order.batch(1, n) for n in range(first, last)])])
        # Each of three groups has one more of a label, and leaves out what fills no batch.
        assert np.ptp(counts) <= (1 if "groups" not in case else 3 * BATCH)


@pytest.mark.parametrize("case", [case for case in CASES if "curriculum" in case])
def test_easy_samples_of_a_window_come_first(folder: str, case: str) -> None:
    order = make_order_again(folder, case)
    curriculum = order.rules.curriculum
    assert curriculum is not None
    starts = order.periods[0].starts(1)
    hardest = [curriculum.difficulty[order.batch(1, n)].max() for n in range(order.num_batches(1))]
    wide = [(first, last) for first, last in pairwise(starts.tolist()) if last - first > 8]
    if "shards" not in case:
        assert wide
    for first, last in wide:
        assert max(hardest[first : first + 2]) < max(hardest[first:last])
    assert len(starts) == 2 or "shards" in case


@pytest.mark.parametrize("case", [case for case in CASES if "shards" in case])
def test_steps_are_known_before_any_shard_is_read(
    folder: str, case: str, whole: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = make_order_again(folder, case)
    monkeypatch.setattr(order.samples, "lengths_at", None)
    monkeypatch.setattr(order.samples, "classes_at", None)
    recipe = recipe_of(folder, case)
    recipe = recipe.with_plan(recipe.train.plan, epochs=len(EPOCHS), max_steps=None)
    assert count_steps(recipe, order) == len(whole[case])
    assert len(order.periods[0].starts(1)) > 2, "there are several windows"


def test_the_recorded_order_stays_as_it_was(whole: dict[str, list[list[int]]]) -> None:
    """Checkpoints count batches in it. A change of the order needs a new name."""
    digests = {case: hashlib.sha256(repr(whole[case]).encode()).hexdigest()[:8] for case in CASES}
    assert (SampleOrder.name, hashlib.sha256(repr(digests).encode()).hexdigest()[:16]) == (
        "windows-2",
        "e8db489a64224bca",
    )


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ([*TOKENS, *BALANCED], "train.tokens_per_batch"),
        ([*TOKENS, *SOURCES], "train.tokens_per_batch"),
        ([*TOKENS, *CURRICULUM], "train.tokens_per_batch"),
        ([*SOURCES, *BALANCED], "data.sampling"),
        ([*BALANCED, "train.class_weights=balanced"], "train.class_weights"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(keys: list[str], key: str) -> None:
    with refused("keys.contradict", key):
        load_recipe(ROOT / "recipes/reviews.yaml", keys)


def test_a_run_that_balances_labels_twice_is_resumed() -> None:
    keys = [*BALANCED, "train.class_weights=balanced", "train.resume=20261101-101500-reviews-12ab"]
    assert load_recipe(ROOT / "recipes/reviews.yaml", keys).data.sampling == "balanced"
