"""Measure data that do not fit into memory, on a local S3, and write a page for each part: python -m
benchmarks.data"""

import argparse
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.data import preparing, reading, training
from benchmarks.data.corpus import LARGE, SMALL, Corpora
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import Goal, goals_table

_PACKAGES = ["pyarrow", "s3fs", "datasets", "ray", "rensa", "tokenizers", "torch"]
Measure = Callable[[Corpora], tuple[list[Goal], list[str]]]
_PARTS: dict[str, tuple[str, str, Measure]] = {
    "preparing": (preparing.TITLE, preparing.HEAD, preparing.measure),
    "reading": (reading.TITLE, reading.HEAD, reading.measure),
    "training": (training.TITLE, training.HEAD, training.measure),
}


def main() -> None:
    """Measure the chosen parts, and write their pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"default: all of {', '.join(_PARTS)}")
    parser.add_argument("--megabytes", type=int, nargs=2, default=[1000, 10_000], help="texts of the two corpora")
    parser.add_argument("--folder", type=Path, help="keep texts and shards here for the next part; takes 30 GB")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent, help="folder of the pages")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-data-")))
        os.environ["RAYLOOM_CACHE"] = f"{folder}/cache"
        corpora = Corpora(folder, dict(zip((SMALL, LARGE), arguments.megabytes, strict=True)))
        corpora.write()
        for part in arguments.parts or _PARTS:
            if part != "preparing":
                preparing.prepare_all(corpora)
            page = _page(part, *_PARTS[part], corpora)
            (arguments.results / f"{part.upper()}.md").write_text(page, encoding="utf-8")
            print(page, flush=True)


def _page(part: str, title: str, head: str, measure: Measure, corpora: Corpora) -> str:
    conditions = Conditions()
    goals, tables = measure(corpora)
    written = f"Written by `python -m benchmarks.data {part}`.\n{head}"
    facts = f"{machine()}.\n{versions(_PACKAGES)}.\n{conditions}"
    return "\n".join([f"# {title}\n", f"{written}\n", f"{facts}\n", goals_table(goals), "", *tables]).rstrip() + "\n"


if __name__ == "__main__":
    main()
