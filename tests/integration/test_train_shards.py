"""Training on shards: the same for any number of workers, under torchrun and on a cluster, prepared by either."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.config import load_recipe
from app.data.shards import ShardIndex
from app.storage import to_path
from app.tasks import prepare
from tests.helpers import SGD, losses, train_alone
from tests.jobs import run_job

SHARDS = "data.shards={size: 20KB, window: 60KB}"
DIGITS = ["recipes/digits.yaml", SHARDS, "train.epochs=2", "model.args.width=8", "data.test_fraction=0.1"]


def plain(source: str) -> list[str]:
    model = ["data.block_length=32", "data.tokenizer={kind: bytes}", "model.args={layers: 1, width: 32, heads: 2}"]
    return [f"data.source={source}", SHARDS, *model, *SGD, "train.precision=fp32", "train.epochs=2"]


def test_two_processes_learn_what_one_does_from_documents_in_shards(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(200):
        (folder / f"{number}.txt").write_text(f"{number} + {number} = {2 * number}\n" * 20, encoding="utf-8")
    keys = [*plain(str(folder)), f"storage={tmp_path / 'storage'}"]
    one = train_alone(*keys, recipe="recipes/stdlib_gpt.yaml")
    two = train_alone(*keys, "train.loader.num_workers=1", processes=2, recipe="recipes/stdlib_gpt.yaml")
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    assert losses(one)[-1] < losses(one)[0]


def test_a_cluster_prepares_the_shards_that_a_process_does_and_trains_on_them(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    storage = f"storage={tmp_path / 'storage'}"
    prepared = run_job(cluster, "prepare", *DIGITS, storage)
    rows = [prepared["metrics"][f"{split}_rows"] for split in ("train", "validation", "test")]
    assert min(rows) > 0
    assert sum(rows) == prepared["metrics"]["given"] == 1797
    index = ShardIndex.load(to_path(prepared["artifacts"]["data"]))
    here: Any = prepare(load_recipe(DIGITS[0], [*DIGITS[1:], f"storage={tmp_path / 'other'}"]))
    assert here.reference.sha256 == index.sha256

    trained = run_job(cluster, "train", *DIGITS, storage, "train.workers=2")
    assert trained["metrics"]["val_accuracy"] > 0.3
    assert ShardIndex.load(to_path(prepared["artifacts"]["data"])).created == index.created  # not made again


@pytest.mark.slow
def test_a_cluster_prepares_tags_in_shards(cluster: dict[str, str], tmp_path: Path) -> None:
    rows = [{"tokens": ["to", f"w{number}"], "tags": ["O", "city"]} for number in range(1200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    source = f"data.source={tmp_path / 'rows.jsonl'}"
    tagged = run_job(cluster, "prepare", "recipes/python_tokens.yaml", source, f"storage={tmp_path / 'storage'}")
    found = tagged["metrics"]
    assert found["train_rows"] + found["validation_rows"] == found["given"] - found["dropped"] > 1000
