"""Reading the same texts on S3 with two processes, by Rayloom, Hugging Face datasets and Ray Data."""

import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence

from app.data.sharded import ShardReference
from app.storage import to_path
from benchmarks.data.corpus import LARGE, SMALL, Corpora, s3_of
from benchmarks.data.readers import BATCH, Reading, Source, read
from benchmarks.markdown import Goal, table, verdict
from benchmarks.rounds import turns

_ROUNDS, _PEER_ROWS, _LARGE_ROWS = 2, 200_000, 2_000_000
TITLE = "Reading texts from S3"
HEAD = f"""\
The texts are those of [preparation](PREPARING.md). Two new processes read each row at most once. `rclone serve s3`
serves them, on the same two cores. "Cold" means that the cache of shards is empty, and "warm" that it holds all
shards. Rayloom's processes stop after {_LARGE_ROWS:,} rows each, which is more than the smaller corpus has. Peers
read the Parquet files, and stop after {_PEER_ROWS:,} rows per process. Ray Data reads in one process, with both
CPUs. All readers shuffle in memory.

"rows/s" and "MB/s" include the start of the processes, imports and the first batch. "rows/s from the first batch on"
excludes them, because peers start more slowly. The first two goals use it. "Rows a CPU second" excludes the server
and the workers of Ray Data. Memory is the growth of a process's private memory (USS) since it began to read. It
includes the pages of shards that the process has mapped. mosaicml-streaming is not included, because it cannot be
installed together with numpy 2.2 and transformers 5."""
_LIMITS = """\
When their first batch arrives, Ray Data and datasets have already read ahead for seconds. Their rates from the first
batch on include these rows. In three runs of 2026-11-30, this rate was 123,000 to 226,000 for Ray Data, and 383,000
to 395,000 for Rayloom, warm. So the first two ratios were 1.7 and 3.1 in one of the runs.

Before its first batch, a seek reads a window of 256 MB: one or two shards of 8 MB for each of 16 streams. The
S3 server runs on the same two cores and uses 5 to 9 ms of CPU per MB. So the window takes a second or more."""
_COLD, _WARM, _DATASETS, _RAY_DATA = "Rayloom, cold", "Rayloom, warm", "datasets", "Ray Data"
Readings = Mapping[str, Sequence[Reading]]


def measure(corpora: Corpora) -> tuple[list[Goal], list[str]]:
    """Measure, and return goals and tables."""
    with s3_of(corpora.folder):
        runs: dict[str, list[Reading]] = {name: [] for name in (_COLD, _WARM, _DATASETS, _RAY_DATA)}
        for order in turns([_COLD, _DATASETS, _RAY_DATA], _ROUNDS):
            for name in order:
                runs[name].append(_WAYS[name](corpora))
                if name == _COLD:
                    runs[_WARM].append(read("Rayloom", source_of(corpora, SMALL)))
        large = _cold(corpora, LARGE)
        seeks = [_seek(corpora, share) for share in (0.3, 0.6, 0.9)]
    return _goals(runs, large, seeks, corpora), [_table(runs, large, corpora), "", _seek_table(seeks), "", _LIMITS]


def source_of(corpora: Corpora, name: str, seek_to: int = 0, max_rows: int | None = None) -> Source:
    """Return the texts of a corpus, as files and as shards."""
    reference = ShardReference.find(to_path(corpora.storage(name) / "served"))
    assert reference is not None
    return Source(parquet=corpora.uri(name), shards=reference, seek_to=seek_to, max_rows=max_rows)


def empty_cache() -> None:
    """Remove the cached shards."""
    shutil.rmtree(os.environ["RAYLOOM_CACHE"], ignore_errors=True)


def _cold(corpora: Corpora, name: str = SMALL) -> Reading:
    empty_cache()
    return read("Rayloom", source_of(corpora, name, max_rows=_LARGE_ROWS))


def _peer(reader: str) -> Callable[[Corpora], Reading]:
    return lambda corpora: read(reader, source_of(corpora, SMALL, max_rows=_PEER_ROWS))


_WAYS: dict[str, Callable[[Corpora], Reading]] = {
    _COLD: _cold,
    _DATASETS: _peer("datasets"),
    _RAY_DATA: _peer("Ray Data"),
}


def _seek(corpora: Corpora, share: float) -> Reading:
    """Begin in the middle of the large corpus, with an empty cache."""
    empty_cache()
    steps = source_of(corpora, LARGE).shards.index.rows["train"] // BATCH
    return read("Rayloom", source_of(corpora, LARGE, int(share * steps), 10 * BATCH))


def _goals(runs: Readings, large: Reading, seeks: Sequence[Reading], corpora: Corpora) -> list[Goal]:
    cold, warm = (statistics.median(one.steady_rate for one in runs[name]) for name in (_COLD, _WARM))
    best = max(statistics.median(one.steady_rate for one in runs[name]) for name in (_DATASETS, _RAY_DATA))
    first = max(one.first_batch_s for one in [*runs[_COLD], large])
    seek = max(one.seek_s for one in seeks)
    is_fast = large.rate >= 50_000 and large.megabytes >= 100
    size = corpora.megabytes[LARGE]
    return [
        Goal("rows/s, cold, to the best peer", "≥ 3", f"{cold / best:.1f}", verdict(cold >= 3 * best)),
        Goal("rows/s, warm, to the best peer", "≥ 3", f"{warm / best:.1f}", verdict(warm >= 3 * best)),
        Goal(
            f"{size:,} MB, cold", "≥ 50,000 rows/s and 100 MB/s", f"{large.rate:,.0f} and {large.megabytes:.0f}",
            verdict(is_fast),
        ),
        Goal("first batch, cold, from the start of the processes", "≤ 3 s", f"{first:.1f} s", verdict(first <= 3)),
        Goal("seek to a step, cold, after the imports", "≤ 1.5 s", f"{seek:.1f} s", verdict(seek <= 1.5)),
    ]  # fmt: skip


def _table(runs: Readings, large: Reading, corpora: Corpora) -> str:
    named = {f"{name}, {corpora.megabytes[SMALL]:,} MB": found for name, found in runs.items()}
    named[f"{_COLD}, {corpora.megabytes[LARGE]:,} MB"] = [large]
    rows = [[name, *_cells(found)] for name, found in named.items()]
    header = [
        "reader",
        "rows/s",
        "rows/s from the first batch on",
        "MB/s",
        "rows a CPU second",
        "first batch, s",
        "memory, MB",
    ]
    return table(header, rows)


def _cells(found: Sequence[Reading]) -> list[str]:
    """The cells of a reader; of several rounds the median, and the range of the rates."""
    rates = [one.rate for one in found]
    spread = f" ({min(rates):,.0f} to {max(rates):,.0f})" if len(rates) > 1 else ""
    return [
        f"{statistics.median(rates):,.0f}{spread}",
        f"{statistics.median(one.steady_rate for one in found):,.0f}",
        f"{statistics.median(one.megabytes for one in found):.0f}",
        f"{statistics.median(one.rows_per_cpu_s for one in found):,.0f}",
        f"{statistics.median(one.first_batch_s for one in found):.1f}",
        f"{max(one.peak_bytes for one in found) / 1e6:.0f}",
    ]


def _seek_table(seeks: Sequence[Reading]) -> str:
    rows = [
        [f"{share:.0%} of the epoch", f"{one.first_batch_s:.2f}", f"{one.seek_s:.2f}"]
        for share, one in zip((0.3, 0.6, 0.9), seeks, strict=True)
    ]
    return table(["seek to", "s from the start of the processes", "s after the imports"], rows)
