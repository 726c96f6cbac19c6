"""Preparing texts on S3 as shards with two CPUs, and tokenising them beside plain pyarrow and tokenizers."""

import shutil
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.data.corpus import LARGE, SMALL, Corpora, s3_of, write_corpus
from benchmarks.data.near_duplicates import measure_near_duplicates
from benchmarks.data.steps import Prepared, prepare_once
from benchmarks.markdown import Goal, table, verdict
from benchmarks.rounds import turns

TITLE = "Preparing data that does not fit into memory"
HEAD = """\
Words are drawn from a vocabulary of 30,000 by a power law. Each text is one of 120,000 with its own number appended, so
there are no duplicates. The texts are stored in uncompressed Parquet files: a tenth in one file, the rest in files of
100 MB. `rclone serve s3` serves them on the same two cores. Shards are written to a disk.

Ray tasks prepare labelled examples on two CPUs, as `jobs.prepare` does. Memory is the sum over the process and its
children (PSS), sampled five times per second. Ray's own services are its scheduler, object store and similar
processes, but not its workers.

Language modelling reads its texts from a disk. "Plain" learns the same tokenizer from a sample of the same size,
encodes, and writes blocks as Arrow. It does not look for duplicates, split by content or write checksums. Each runs
in one process.

Near duplicates are planted among 20,000 texts of 60 to 180 words: 1,000 copies, in which one word in a hundred is
replaced."""
_ROUNDS = 1


def measure(corpora: Corpora, tokenised_mb: int = 500) -> tuple[list[Goal], list[str]]:
    """Measure, and return goals and tables."""
    prepared = prepare_all(corpora, anew=True)
    folder = corpora.folder / "tokenised"
    source = next(iter(write_corpus(folder, tokenised_mb, in_files=False)))
    runs: dict[str, list[Prepared]] = {"tokens": [], "plain": []}
    for number, order in enumerate(turns([*runs], _ROUNDS)):
        for way in order:
            runs[way].append(prepare_once(way, str(source), folder / f"{way}{number}"))
            shutil.rmtree(folder / f"{way}{number}")
    near = measure_near_duplicates(folder)
    shutil.rmtree(folder)
    goals = [*_goals(prepared, runs, corpora, tokenised_mb), *near]
    return goals, [_table(prepared, runs, corpora, tokenised_mb)]


def prepare_all(corpora: Corpora, anew: bool = False) -> dict[str, Prepared]:
    """Prepare both corpora from the S3, and return the costs. Keep existing ones, unless ``anew``."""
    found = {}
    with s3_of(corpora.folder):
        for name in (SMALL, LARGE):
            storage = corpora.storage(name)
            if anew:
                shutil.rmtree(storage, ignore_errors=True)
            if not (storage / "served").exists():
                found[name] = prepare_once("cluster", corpora.uri(name), storage)
    return found


def _goals(
    prepared: Mapping[str, Prepared], runs: Mapping[str, Sequence[Prepared]], corpora: Corpora, tokenised_mb: int
) -> list[Goal]:
    peak = prepared[LARGE].peak / 2**30
    shares = [plain.cpu_s / ours.cpu_s for ours, plain in zip(runs["tokens"], runs["plain"], strict=True)]
    share, size = median(shares), corpora.megabytes[LARGE]
    return [
        Goal(
            f"peak memory of preparing {size:,} MB, including a file of {size // 10:,} MB", "≤ 2 GiB",
            f"{peak:.2f} GiB", verdict(peak <= 2),
        ),
        Goal(
            f"rate of tokenising {tokenised_mb:,} MB, relative to plain, by CPU time", "≥ 0.8",
            ", ".join(f"{one:.2f}" for one in shares), verdict(share >= 0.8),
        ),
    ]  # fmt: skip


def _table(
    prepared: Mapping[str, Prepared], runs: Mapping[str, Sequence[Prepared]], corpora: Corpora, tokenised_mb: int
) -> str:
    rows = [(f"{corpora.megabytes[name]:,} MB of examples, two tasks", run) for name, run in prepared.items()]
    rows += [(f"{tokenised_mb:,} MB, tokenised", run) for run in runs["tokens"]]
    rows += [(f"{tokenised_mb:,} MB, plain pyarrow and tokenizers", run) for run in runs["plain"]]
    cells = [
        [what, f"{run.wall_s:.0f}", f"{run.cpu_s:.0f}", *_megabytes(run.peak, run.peak_without_services, run.before)]
        for what, run in rows
    ]
    header = ["preparation", "wall s", "CPU s of the process", "peak memory, MB", "without Ray's services", "at first"]
    return table(header, cells)


def _megabytes(*sizes: int) -> list[str]:
    return [f"{size / 1e6:,.0f}" for size in sizes]
