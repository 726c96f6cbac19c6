"""Shards: written whole, refused when torn, and read in an order that does not depend on the number of workers."""

import gc
import os
import pickle
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from upath import UPath

from app.config import ShardsConfig, load_recipe
from app.config.layout import lay_out
from app.config.plan import PlanConfig
from app.data.language import TokenBlocks
from app.data.shard_cache import ShardCache, shared_shards
from app.data.sharded import ShardColumn, ShardedRows, ShardedSplit, ShardNumbers
from app.data.shards import LENGTH, Shard, ShardIndex, ShardPlace, ShardWriter
from app.storage import to_path
from app.training.data.order import SampleOrder
from app.training.data.ranks import DataRank, validation_share
from app.training.data.rules import Rules
from tests.wording import refused

SCHEMA = pa.schema({"input": pa.string(), "value": pa.int32(), "length": pa.int32()})
ROWS, BATCH = 3001, 24


def texts(count: int = ROWS) -> list[str]:
    """Texts of different lengths, each with its own number."""
    return [f"{number} " + "x" * (number * 7919 % 97) for number in range(count)]


def write_shards(folder: UPath, size: int = 9000, batch: int = 100) -> list[Shard]:
    """Write the texts as shards, in batches of rows."""
    writer = ShardWriter(ShardPlace(folder, "train", size), SCHEMA)
    for start in range(0, ROWS, batch):
        group = texts()[start : start + batch]
        columns = [group, [0] * len(group), [len(text) for text in group]]
        writer.add(pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA))
    return writer.close()


@pytest.fixture
def location(storage: str) -> str:
    """A folder for shards, on a disk and on S3."""
    return f"{storage}/data/some"


def rows_of(location: str, **config: object) -> ShardedRows:
    """Write shards, and open them."""
    shards = write_shards(to_path(location))
    return ShardedRows(location, shards, ShardsConfig.model_validate({"window": 60_000, **config}))


def test_shards_are_the_same_however_rows_arrive(tmp_path: Path) -> None:
    some = [shard.sha256 for shard in write_shards(UPath(tmp_path / "a"), batch=100)]
    others = [shard.sha256 for shard in write_shards(UPath(tmp_path / "b"), batch=777)]
    assert some == others
    assert len(some) > 10


def test_classes_are_counted_without_reading_the_shards(tmp_path: Path) -> None:
    writer = ShardWriter(ShardPlace(UPath(tmp_path), "train", 1000), SCHEMA)
    columns = [texts(300), [0, 2, 2] * 100, [1] * 300]
    writer.add(pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA))
    shards = writer.close()
    # Very many classes are not counted.
    for given in ([shard.model_copy(update={"class_rows": None}) for shard in shards], shards):
        assert ShardedSplit(ShardedRows(str(tmp_path), given, ShardsConfig())).class_counts(4).tolist() == [
            100,
            0,
            200,
            0,
        ]
        for file in tmp_path.glob("*.arrow"):
            file.unlink()


def test_rows_come_back_in_the_order_that_is_asked_for(location: str) -> None:
    rows, given = rows_of(location), texts()
    asked = np.random.default_rng(0).integers(ROWS, size=200)
    assert rows.read(asked)["input"].to_pylist() == [given[index] for index in asked]
    assert rows.read([5])["input"].to_pylist() == [given[5]]
    assert len(given[rows.longest]) == max(map(len, given))
    assert list(ShardColumn[str](rows, "input")) == given
    lengths, found = ShardNumbers(rows, LENGTH), [len(text) for text in given]
    assert np.array_equal(np.asarray(lengths), found)
    assert (lengths[7], lengths[5:9], lengths[asked].tolist()) == (found[7], found[5:9], [found[row] for row in asked])
    assert len(lengths[asked[:0]]) == 0
    copied = pickle.loads(pickle.dumps(rows))  # a loader process under spawn
    assert copied.read([7])["input"].to_pylist() == [given[7]]


def test_a_forked_process_reads_what_its_parent_has_opened(location: str) -> None:
    rows, given = rows_of(location), texts()
    rows.read([0])
    rows.prefetch(range(len(rows.shard_rows)))
    child = os.fork()
    if not child:
        os._exit(0 if rows.read([0, 2000])["input"].to_pylist() == [given[0], given[2000]] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_torn_shard_is_refused(location: str) -> None:
    rows = rows_of(location)
    torn = sorted(to_path(location).iterdir(), key=str)[1]
    content = bytearray(torn.read_bytes())
    content[-500] ^= 1
    torn.write_bytes(bytes(content))
    assert rows.read([0]).num_rows == 1
    with refused("shard.torn"):
        rows.read([rows.first_rows[1]])
    assert not [path for path in shared_shards().rglob("*") if "tmp" in path.name]


def test_a_missing_shard_and_another_index_are_refused(location: str) -> None:
    rows = rows_of(location)
    folder = to_path(location)
    (folder / "train-002.arrow").unlink()
    with refused("shard.missing"):
        rows.read([rows.first_rows[2]])
    with refused("shards.incomplete"):
        ShardIndex.load(folder)
    empty = ShardIndex(fingerprint="", created=datetime.now(UTC), task="", source="", settings={}, splits={})
    empty.model_copy(update={"format": "arrow-0"}).save(folder)
    with refused("shards.format"):
        ShardIndex.load(folder)


def test_shards_of_earlier_windows_are_closed(tmp_path: Path) -> None:
    rows = rows_of(str(tmp_path), window=20_000)
    order = order_of(rows)
    mapped = []
    for number in range(order.num_batches(1)):
        rows.read(order.batch(1, number))
        mapped.append(Path("/proc/self/maps").read_text().count(str(tmp_path)))
    assert max(mapped) <= 2 * order.num_streams < len(rows.shard_rows)
    last = Path("/proc/self/maps").read_text()
    gone = next(path for path in sorted(tmp_path.glob("*.arrow")) if str(path) not in last)
    gone.unlink()
    with refused("shard.missing"):
        rows.read(range(len(rows)))


def test_closed_shards_leave_no_file_open(tmp_path: Path) -> None:
    rows = rows_of(str(tmp_path))
    gc.disable()  # a cycle of references would keep them until it runs
    try:
        rows.read_arrays(range(ROWS), "input", LENGTH)
        rows.close()
        assert not [file for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_texts_that_were_read_take_no_memory(tmp_path: Path) -> None:
    writer = ShardWriter(ShardPlace(UPath(tmp_path), "train", 30_000_000), SCHEMA)
    given = [f"{number} 书".ljust(10_000) for number in range(2000)] + [""]
    columns = [given, [0] * len(given), [len(text) for text in given]]
    writer.add(pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA))
    (shard,) = writer.close()
    rows, order = ShardedRows(str(tmp_path), [shard], ShardsConfig()), np.random.default_rng(0).permutation(len(given))
    assert rows.read_arrays(order, "input")[0].tolist() == [given[row] for row in order]
    assert list(ShardColumn[str](rows, "input")) == given
    mapped = [found.rss for found in psutil.Process().memory_maps() if found.path == str(tmp_path / shard.name)]
    assert 0 < sum(mapped) < shard.bytes / 3


def test_the_cache_stays_within_its_size(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    UPath("s3://cached").mkdir(exist_ok=True)
    rows = rows_of("s3://cached/data", window=20_000, cache=40_000)
    for start in range(0, ROWS, 50):
        rows.read(range(start, min(start + 50, ROWS)))
        assert sum(path.stat().st_size for path in shared_shards().glob("*.arrow")) <= 40_000
        assert ".arrow (deleted)" not in Path("/proc/self/maps").read_text()  # it would go on taking disk
    given = texts()
    assert rows.read([0, ROWS - 1])["input"].to_pylist() == [given[0], given[-1]]


def test_a_torn_copy_in_the_cache_is_downloaded_again(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    UPath("s3://torn").mkdir(exist_ok=True)
    rows_of("s3://torn/data").read([0])
    (cached,) = shared_shards().glob("*.arrow")
    whole = cached.read_bytes()
    cached.write_bytes(whole[:-500])
    left = cached.with_name(".left.arrow.1234.tmp")
    left.write_bytes(b"")
    os.utime(left, (0, 0))
    rows = rows_of("s3://torn/data")
    assert rows.read([0])["input"].to_pylist() == texts(1)
    assert cached.read_bytes() == whole
    assert not left.exists()

    cached.write_bytes(whole[:-500])
    shard = to_path("s3://torn/data/train-000.arrow")
    shard.write_bytes(whole[:-400])
    reader = ShardCache("s3://torn/data", rows._shards, 10**6)
    with refused("shard.torn"):
        reader.open(0)
    assert not cached.exists()


def order_of(rows: ShardedRows, batch: int = BATCH) -> SampleOrder:
    return SampleOrder(rows, Rules(batch), seed=0)


@pytest.mark.parametrize("batch", [24, 7, 64, 3001])
def test_an_epoch_has_each_sample_once_but_those_of_an_incomplete_batch(tmp_path: Path, batch: int) -> None:
    order = order_of(rows_of(str(tmp_path)), batch=batch)
    left_out = []
    for epoch in (1, 2):
        seen = Counter(np.concatenate([order.batch(epoch, number) for number in range(order.num_batches(1))]).tolist())
        assert set(seen.values()) == {1}
        assert len(seen) == ROWS // batch * batch
        left_out.append(set(range(ROWS)) - set(seen))
    assert ROWS % batch == 0 or left_out[0] != left_out[1]


def test_a_rank_reads_shards_of_its_own(tmp_path: Path) -> None:
    rows = rows_of(str(tmp_path))
    order, size = order_of(rows, batch=32), 2
    assert order.num_streams == 16
    opened = []
    for rank in range(size):
        shares = [order.share(1, number, DataRank(rank, size)) for number in range(order.num_batches(1))]
        opened.append(set((np.searchsorted(rows.first_rows, np.concatenate(shares), side="right") - 1).tolist()))
    # They share the shard at the border of their streams, and the one where the epoch begins and ends.
    assert len(opened[0] & opened[1]) <= 2


def test_batches_are_shuffled_and_of_similar_lengths(tmp_path: Path) -> None:
    rows = rows_of(str(tmp_path))
    order = order_of(rows)
    first, second = (order.batch(epoch, 0) for epoch in (1, 2))
    assert not np.array_equal(np.sort(first), np.sort(second))
    lengths = np.array([len(text) for text in texts()])
    padded = [lengths[order.batch(1, number)].max() for number in range(order.num_batches(1))]
    assert np.mean(padded) < 0.75 * lengths.max()
    assert abs(np.corrcoef(np.arange(len(padded)), padded)[0, 1]) < 0.3


def test_the_first_batch_of_any_step_reads_one_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(str(tmp_path))
    order, read = order_of(rows, batch=7), set[int]()  # of one stream
    numbers_of = rows.numbers_of
    monkeypatch.setattr(rows, "numbers_of", lambda shard, column: read.add(shard) or numbers_of(shard, column))
    order.batch(1, 200)
    assert len(read) < len(rows.shard_rows) / 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_validate_each_sample_once_in_as_many_batches(tmp_path: Path, size: int) -> None:
    rows = rows_of(str(tmp_path))
    for some in (None, np.arange(1, ROWS, 3)):  # all rows, and those of one source
        shares = [list(validation_share(TokenBlocks(rows, 1), DataRank(rank, size), 5, some)) for rank in range(size)]
        assert len({len(share) for share in shares}) == 1
        seen = Counter(index for share in shares for batch, _ in share for index in batch.tolist())
        assert seen == Counter(range(ROWS) if some is None else some.tolist())


def test_every_plan_shares_out_a_sharded_batch(tmp_path: Path) -> None:
    layout = lay_out(PlanConfig(micro_batch=3), BATCH, workers=4)
    order = order_of(rows_of(str(tmp_path)))
    share = order.share(1, 0, DataRank(1, layout.data))
    assert [len(part) for part in np.array_split(share, layout.gradient_accumulation)] == [3, 3]


@pytest.mark.parametrize(
    ("override", "rule", "key"),
    [
        ("data.shards={cache: 1MB}", "shards.cache", "data.shards"),
        ("data.shards={size: 10}", "shards.size", "data.shards"),
        ("data.shards={size: 4GB, memory: 64GB}", "shards.size", "data.shards"),
        ("data.shards={size: big}", "recipe.byte_size", "data.shards.size"),
    ],
)
def test_wrong_keys_are_refused(override: str, rule: str, key: str) -> None:
    with refused(rule, key):
        load_recipe("recipes/reviews.yaml", [override])
