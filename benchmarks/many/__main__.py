"""Measure the cost of many runs, trials, versions and deployed models, on a disk and on S3. Write RESULTS.md."""

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
from tenacity import retry, stop_after_delay, wait_fixed
from upath import UPath

from app import ports
from app.process_state import sigterm_exits
from app.storage import open_storage, to_path, write_atomically
from benchmarks.machine import Conditions, machine, versions
from benchmarks.many.deploys import of_deploys
from benchmarks.many.measures import Cost, of_endpoint, of_runs, of_versions
from benchmarks.many.nodes import nodes_table
from benchmarks.many.trials import of_trials
from benchmarks.markdown import table

RESULTS = Path(__file__).with_name("RESULTS.md")
_HEAD = """# The cost of many runs, trials, versions and models

Written by `python -m benchmarks.many`. Each cell is the time of one call and, on S3, its number of requests. S3 is a
moto server on the same machine. It answers one request at a time, in a few milliseconds each. Over a network, the
number of requests matters most. Lists send 32 requests at a time.

"Trials of a study" is the time of the search process, without the training of trials. The study already has the
given number of trials. `resume` is measured once. The other rows are medians of 5 trials, after one warm-up trial.
The space is `tune_spaces.image:space`, and the sampler is `tpe`.

"Nodes of a cluster" has the costs of Rayloom's own parts on a cluster of simulated nodes, each with one rank and one
replica. A cell is the time of a call, and the bytes that it reads or sends. Rayloom's parts, PyTorch's store,
HAProxy and the S3 server are real. The nodes exist only in simulated answers of Ray, so Ray's own work is not
counted. The second-to-last column compares the cost per node on the largest and the smallest cluster, in bytes, or
in time where no bytes are given. The cost of a part that runs once for all nodes is divided by the number of nodes.
"""
_MODELS = 100
_BUCKET = "s3://many"

Costs = Mapping[str, Cost]


def main() -> None:
    """Measure the chosen sections and write the page. Keep its other sections as they are."""
    arguments = _arguments()
    page = _sections_of(arguments.results)
    with sigterm_exits(), _s3():
        for title in arguments.sections:
            conditions = Conditions()
            rows = _SECTIONS[title]()
            packages = versions(["s3fs", "moto", "ray", "optuna", "sqlalchemy"])
            page[title] = f"{machine()}; {packages}; {conditions}\n\n{rows}\n"
            text = "\n".join([_HEAD, *(f"## {name}\n\n{page[name]}" for name in _SECTIONS if name in page)])
            # Save after each section: 10,000 entries on S3 take minutes, and the run may be stopped.
            write_atomically(to_path(str(arguments.results)), text.encode())
    print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many", description=__doc__)
    parser.add_argument("--sections", nargs="+", choices=_SECTIONS, default=list(_SECTIONS), help="default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    return parser.parse_args()


def _sections_of(results: Path) -> dict[str, str]:
    """Return the sections of a page by title; none if there is no page yet."""
    parts = results.read_text(encoding="utf-8").split("## ")[1:] if results.exists() else []
    return {title: text.strip() + "\n" for title, _, text in (part.partition("\n") for part in parts)}


def _stored(measure: Callable[[UPath, int], Costs], counts: Sequence[int], on_s3: Sequence[int]) -> str:
    """Return a table of the costs with each count on a disk and on S3. Each column has a new storage folder."""
    columns: dict[str, Costs] = {}
    with tempfile.TemporaryDirectory(prefix="bench-many-") as disk:
        for place, root, measured in (("a disk", disk, counts), ("S3", _BUCKET, on_s3)):
            for count in measured:
                columns[f"{count:,} on {place}"] = measure(open_storage(f"{root}/{secrets.token_hex(4)}"), count)
    first = next(iter(columns.values()))
    return _table(list(columns), {call: [costs[call] for costs in columns.values()] for call in first})


def _deploys() -> str:
    return _table(["with 1 other model", f"with {_MODELS} other models"], of_deploys(_MODELS))


def _table(columns: Sequence[str], costs: Mapping[str, Sequence[Cost]]) -> str:
    return table(["", *columns], [[call, *map(str, row)] for call, row in costs.items()])


@contextmanager
def _s3() -> Iterator[None]:
    """Run an S3 server with a bucket until the end of the block."""
    (port,) = ports.unused(1)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            retry(wait=wait_fixed(0.2), stop=stop_after_delay(30))(httpx.get)(os.environ["AWS_ENDPOINT_URL"])
            to_path(_BUCKET).mkdir()
            yield
        finally:
            server.terminate()


_SECTIONS: Mapping[str, Callable[[], str]] = {
    # With 10,000 on S3, moto takes minutes.
    "Runs": lambda: _stored(of_runs, [1_000, 10_000], [1_000, 10_000]),
    "Trials of a study": lambda: _stored(of_trials, [100, 1_000, 10_000], []),  # a search writes to a local disk
    "Versions of one model": lambda: _stored(of_versions, [1_000, 10_000], [1_000, 10_000]),
    "Versions of 100 models": lambda: _stored(partial(of_versions, models=_MODELS), [1_000, 10_000], [1_000, 10_000]),
    "Models in a replica": lambda: _stored(of_endpoint, [1, _MODELS], [1, _MODELS]),
    "Deploys on a local cluster": _deploys,
    "Nodes of a cluster": nodes_table,
}


if __name__ == "__main__":
    main()
