"""Measure how well planted near duplicates are found."""

import random
import statistics
import time
from pathlib import Path

import numpy as np

from app.data.preparation.near_duplicates import NearDuplicates
from app.data.preparation.signatures import SignatureFiles
from app.storage import to_path
from benchmarks.markdown import Goal, verdict

_ROUNDS, _BATCH, _THRESHOLD = 5, 4096, 0.8


def measure_near_duplicates(folder: Path) -> list[Goal]:
    """Sign texts, look for the planted ones, and return goals."""
    joined, planted = _texts()
    files, rates = SignatureFiles(to_path(folder), 0, _THRESHOLD), []
    for _ in range(_ROUNDS):
        started = time.process_time()
        with files.writer() as writer:
            for at in range(0, len(joined), _BATCH):
                writer.add(joined[at : at + _BATCH])
        codes = np.zeros(len(joined), np.uint8)
        NearDuplicates([files], np.array([0, len(joined)]), _THRESHOLD, 10**9).drop(codes)
        rates.append(len(joined) / (time.process_time() - started))
    found = set(np.flatnonzero(codes).tolist())
    precision, recall = len(found & planted) / max(1, len(found)), len(found & planted) / len(planted)
    rate = statistics.median(rates)
    spread = f"{rate:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
    return [
        Goal("near duplicates, precision", "≥ 0.99", f"{precision:.3f}", verdict(precision >= 0.99)),
        Goal("near duplicates, recall", "≥ 0.95", f"{recall:.3f}", verdict(recall >= 0.95)),
        Goal("documents a CPU-second, signed and compared", "≥ 15,000", spread, verdict(rate >= 15_000)),
    ]


def _texts() -> tuple[list[str], set[int]]:
    """Return 20,000 texts and 1,000 changed copies, and the places of the copies."""
    source = random.Random(0)
    words = [f"word{number}" for number in range(20_000)]
    texts = [source.choices(words, k=source.randint(60, 180)) for _ in range(20_000)]
    copies = [list(text) for text in texts[::20]]
    for copy in copies:
        for _ in range(max(1, len(copy) // 100)):
            copy[source.randrange(len(copy))] = source.choice(words)
    return [" ".join(text) for text in [*texts, *copies]], set(range(len(texts), len(texts) + len(copies)))
