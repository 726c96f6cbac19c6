"""Measure preparation, reading and near duplicates on a local S3, and write RESULTS.md: python -m benchmarks.data"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.data.preparation.near_duplicates import NearDuplicates
from app.data.preparation.signatures import SignatureFiles
from app.data.sharded import ShardReference
from app.storage import to_path
from benchmarks.data.corpus import s3_of, write_texts
from benchmarks.data.readers import BATCH, READERS, Share, Source, read
from benchmarks.machine import load_average, machine, today, versions
from benchmarks.markdown import Goal, table, verdict

RESULTS = Path(__file__).with_name("RESULTS.md")
_HEAD = """# Data that does not fit into memory

Written by `python -m benchmarks.data`. The texts are made of 30,000 words by a power law, and lie in one Parquet file.
The S3 is `rclone serve s3` on the same machine, so its CPU time is not the readers'. Readers run in two new processes,
whose time includes their imports. Memory is the private memory (USS) above what the process took before it read. Ray
Data reads in one process with the CPUs of both. Near duplicates are planted: one word in a hundred of a twentieth of
the texts is another.
"""

_TOKENISED_MB = 20
Prepared = Mapping[str, Any]


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument(
        "--megabytes", type=int, nargs=2, default=[100, 1000], help="size of the texts, small and large"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-data-") as temporary:
        os.environ["RAYLOOM_CACHE"] = f"{temporary}/cache"
        goals, tables = _measure(Path(temporary), *arguments.megabytes)
    packages = versions(["pyarrow", "s3fs", "datasets", "ray", "rensa", "tokenizers"])
    rows = [(goal.what, goal.goal, goal.reached, goal.verdict) for goal in goals]
    page = [_HEAD, f"{machine()}; {packages}; {today()}, load average {load_average()}\n"]
    page += [table(["what", "goal", "reached", ""], rows), "", *tables]
    text = "\n".join(page).rstrip() + "\n"
    arguments.results.write_text(text, encoding="utf-8")
    print(text)


def _measure(folder: Path, small: int, large: int) -> tuple[list[Goal], list[str]]:
    bucket = folder / "bench"
    bucket.mkdir()
    sizes = {small: "small", large: "large"}
    for size, name in sizes.items():
        write_texts(bucket / f"{name}.parquet", size)
    with s3_of(folder):
        prepared = {
            name: _prepare("text-classification", f"s3://bench/{name}.parquet", str(bucket / "storage"))
            for name in sizes.values()
        }
        shares = {
            ("Rayloom", f"{size} MB, {state}"): _read("Rayloom", _source(prepared[name], name), state == "cold")
            for size, name in sizes.items()
            for state in ("cold", "warm")
        }
        seek = _source(prepared["large"], "large", seek=True)
        shares["Rayloom", "from the middle on"] = read("Rayloom", seek)
        for reader in list(READERS)[1:]:
            shares[reader, f"{small} MB"] = read(reader, _source(prepared["small"], "small"))
    write_texts(folder / "few.parquet", _TOKENISED_MB)
    tokenised, plain = _tokenise(folder, folder / "few.parquet")
    near = _near_duplicates(folder)
    goals = [*_reading_goals(shares, small, large), *_preparing_goals(prepared, tokenised, plain, large)]
    return [*goals, *near], [_reading_table(shares), "", _preparing_table(prepared, tokenised, plain, sizes)]


def _prepare(task: str, source: str, storage: str) -> Prepared:
    """Prepare in a new process, and return its figures."""
    command = [sys.executable, "-m", "benchmarks.data.preparing", task, source, storage]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: Prepared = json.loads(done.stdout.splitlines()[-1])
    return figures


def _tokenise(folder: Path, source: Path) -> tuple[Prepared, Prepared]:
    """Tokenise the same texts from a disk with and without the library, in turns. Return the faster run of each."""
    ours, plain = [], []
    for number in range(2):
        ours.append(_prepare("language-modeling", str(source), str(folder / f"tokens{number}")))
        plain.append(_prepare("plain", str(source), str(folder / f"plain{number}")))
    return min(ours, key=_cpu_s), min(plain, key=_cpu_s)


def _cpu_s(prepared: Prepared) -> float:
    return float(prepared["cpu_s"])


def _source(prepared: Prepared, name: str, seek: bool = False) -> Source:
    given = ShardReference.model_validate(prepared["reference"])
    # They were written to the disk that the S3 serves: s3fs waits without end for some of rclone's answers to a write.
    reference = given.model_copy(update={"location": f"s3://bench/storage/data/{Path(given.location).name}"})
    steps = reference.index.rows["train"] // BATCH
    return Source(parquet=f"s3://bench/{name}.parquet", shards=reference, seek_to=steps // 2 if seek else 0)


def _read(reader: str, source: Source, is_cold: bool) -> list[Share]:
    if is_cold:
        shutil.rmtree(os.environ["RAYLOOM_CACHE"], ignore_errors=True)
    return read(reader, source)


def _rate(shares: Sequence[Share]) -> tuple[float, float]:
    """Return rows and megabytes a second."""
    wall_s = max(share.wall_s for share in shares)
    return sum(share.rows for share in shares) / wall_s, sum(share.characters for share in shares) / wall_s / 1e6


def _reading_goals(shares: Mapping[tuple[str, str], Sequence[Share]], small: int, large: int) -> list[Goal]:
    cold, cold_mb = _rate(shares["Rayloom", f"{large} MB, cold"])
    small_cold, _ = _rate(shares["Rayloom", f"{small} MB, cold"])
    best = max(_rate(found)[0] for (reader, _), found in shares.items() if reader != "Rayloom")
    first = max(share.first_batch_s for share in shares["Rayloom", f"{large} MB, cold"])
    seek = max(share.first_batch_s for share in shares["Rayloom", "from the middle on"])
    peaks = {
        size: max(share.peak_bytes for share in shares["Rayloom", f"{size} MB, cold"]) / 1e6 for size in (small, large)
    }
    return [
        Goal(f"memory of a rank on {large} MB", "≤ 400 MB", f"{peaks[large]:.0f} MB", verdict(peaks[large] <= 400)),
        Goal(
            f"the same, to that of {small} MB", "≤ 1.1 times", f"{peaks[large] / peaks[small]:.2f}",
            verdict(peaks[large] <= 1.1 * peaks[small]),
        ),
        Goal("rows/s, cold, to the best other", "≥ 3", f"{small_cold / best:.1f}", verdict(small_cold >= 3 * best)),
        Goal(
            f"{large} MB, cold", "≥ 50,000 rows/s and 100 MB/s", f"{cold:,.0f} and {cold_mb:.0f}",
            verdict(cold >= 50_000 and cold_mb >= 100),
        ),
        Goal("first batch, with the imports", "≤ 5 s", f"{first:.1f} s", verdict(first <= 5)),
        Goal("first batch from the middle on", "≤ 2 s", f"{seek:.1f} s", verdict(seek <= 2)),
    ]  # fmt: skip


def _reading_table(shares: Mapping[tuple[str, str], Sequence[Share]]) -> str:
    rows = []
    for (reader, what), found in shares.items():
        rows_s, mb_s = _rate(found)
        peak = max(share.peak_bytes for share in found) / 1e6
        cpu_s, first = sum(share.cpu_s for share in found), min(share.first_batch_s or 1e9 for share in found)
        rows.append([reader, what, f"{rows_s:,.0f}", f"{mb_s:.0f}", f"{cpu_s:.1f}", f"{first:.1f}", f"{peak:.0f}"])
    return table(["reader", "texts", "rows/s", "MB/s", "CPU s", "first batch, s", "memory, MB"], rows)


def _preparing_goals(prepared: Mapping[str, Prepared], tokenised: Prepared, plain: Prepared, large: int) -> list[Goal]:
    peak = prepared["large"]["peak"] / 2**30
    share = plain["cpu_s"] / tokenised["cpu_s"]
    return [
        Goal(f"peak memory of preparing {large} MB in one file", "≤ 2 GiB", f"{peak:.2f} GiB", verdict(peak <= 2)),
        Goal(
            f"tokenising {_TOKENISED_MB} MB, CPU to the plain steps",
            "≥ 0.8 as fast",
            f"{share:.2f}",
            verdict(share >= 0.8),
        ),
    ]


def _preparing_table(
    prepared: Mapping[str, Prepared], tokenised: Prepared, plain: Prepared, sizes: Mapping[int, str]
) -> str:
    rows = [(f"{size} MB of examples, S3 to disk", prepared[name]) for size, name in sizes.items()]
    rows += [
        (f"{_TOKENISED_MB} MB, tokenised, on a disk", tokenised),
        (f"{_TOKENISED_MB} MB, plain pyarrow and tokenizers", plain),
    ]
    cells = [
        [
            what,
            f"{run['wall_s']:.1f}",
            f"{run['cpu_s']:.1f}",
            f"{run['peak'] / 1e6:,.0f}",
            f"{run['before'] / 1e6:,.0f}",
        ]
        for what, run in rows
    ]
    return table(["preparation", "wall s", "CPU s", "peak memory, MB", "of which imports"], cells)


def _near_duplicates(folder: Path) -> list[Goal]:
    """Plant near duplicates in other texts, and look for them."""
    source = random.Random(0)
    words = [f"word{number}" for number in range(20_000)]
    texts = [source.choices(words, k=source.randint(60, 180)) for _ in range(20_000)]
    copies = [list(text) for text in texts[::20]]
    for copy in copies:
        for _ in range(max(1, len(copy) // 100)):
            copy[source.randrange(len(copy))] = source.choice(words)
    joined = [" ".join(text) for text in [*texts, *copies]]
    rates = []
    files = SignatureFiles(to_path(folder), 0, 0.8)
    for _ in range(3):
        started = time.process_time()
        with files.writer() as writer:
            for at in range(0, len(joined), 4096):
                writer.add(joined[at : at + 4096])
        rates.append(len(joined) / (time.process_time() - started))
    codes = np.zeros(len(joined), np.uint8)
    NearDuplicates([files], np.array([0, len(joined)]), 0.8, 10**9).drop(codes)
    found, planted = set(np.flatnonzero(codes).tolist()), set(range(len(texts), len(joined)))
    precision, recall = len(found & planted) / max(1, len(found)), len(found & planted) / len(planted)
    rate = statistics.median(rates)
    return [
        Goal("near duplicates, precision", "≥ 0.99", f"{precision:.3f}", verdict(precision >= 0.99)),
        Goal("near duplicates, recall", "≥ 0.95", f"{recall:.3f}", verdict(recall >= 0.95)),
        Goal("documents a CPU-second", "≥ 15,000", f"{rate:,.0f}", verdict(rate >= 15_000)),
    ]


if __name__ == "__main__":
    main()
