"""The memory of two ranks that train on texts on S3, on a small and on a large corpus."""

from collections.abc import Mapping, Sequence

from benchmarks.data.corpus import LARGE, SMALL, Corpora, s3_of
from benchmarks.data.rank import BATCH, STEPS, WINDOWS, RankMemory
from benchmarks.data.reading import empty_cache
from benchmarks.data.steps import WINDOW
from benchmarks.launch import torchrun
from benchmarks.markdown import Goal, table, verdict

TITLE = "Memory of a rank that trains on texts on S3"
HEAD = f"""\
The texts are those of [preparation](PREPARING.md), in shards on `rclone serve s3`, with an empty cache. Two ranks under
torchrun train a Transformer of one layer and width 32 with batches of {BATCH} texts. They train {STEPS} steps in each
of {WINDOWS} windows of {WINDOW // 10**6} MB, spread evenly over the first epoch. Texts are encoded in
training, so a whole epoch would take hours.

Memory is the private memory (USS) of a rank, including the pages of shards that it has mapped. "Above the model" is the
growth after the engine with model and optimizer is initialized. It includes gradients, optimizer state and
activations."""
Ranks = Mapping[str, Sequence[RankMemory]]


def measure(corpora: Corpora) -> tuple[list[Goal], list[str]]:
    """Measure, and return goals and tables."""
    found = {}
    with s3_of(corpora.folder):
        for name in (SMALL, LARGE):
            empty_cache()
            lines = torchrun(2, "benchmarks.data.rank", str(corpora.storage(name) / "served")).splitlines()
            found[name] = [RankMemory.model_validate_json(line) for line in lines if line.startswith("{")]
    return _goals(found, corpora), [_table(found, corpora)]


def _goals(found: Ranks, corpora: Corpora) -> list[Goal]:
    small, large = (max(rank.peak - rank.with_model for rank in found[name]) / 1e6 for name in (SMALL, LARGE))
    size, other = corpora.megabytes[LARGE], corpora.megabytes[SMALL]
    is_flat = large <= 1.1 * small
    return [
        Goal(f"memory above the model, on {size:,} MB", "≤ 400 MB", f"{large:.0f} MB", verdict(large <= 400)),
        Goal(f"the same, relative to {other:,} MB", "≤ 1.1 times", f"{large / small:.2f}", verdict(is_flat)),
    ]


def _table(found: Ranks, corpora: Corpora) -> str:
    rows = [
        [
            f"{corpora.megabytes[name]:,} MB, rank {number}",
            f"{rank.rows:,}",
            f"{rank.steps:,}",
            f"{rank.samples:,}",
            *(f"{size / 1e6:,.0f}" for size in (rank.with_model, rank.peak, rank.peak - rank.with_model)),
        ]
        for name, ranks in found.items()
        for number, rank in enumerate(ranks)
    ]
    header = ["texts", "rows of the epoch", "steps", "samples read", "with the model, MB", "peak, MB", "above it, MB"]
    return table(header, rows)
