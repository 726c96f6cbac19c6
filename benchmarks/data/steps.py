"""Preparation beside the same steps in plain pyarrow and tokenizers, each in a new process."""

import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from app.config import Recipe, load_recipe
from app.data.labelled import LabelledData
from app.data.language import LanguageData
from app.data.preparation.sample import SAMPLE_SIZE
from app.data.tokenizer import LanguageTokenizer
from app.storage import to_path
from app.tasks import prepare
from benchmarks.data.memory import PeakMemory, family_bytes

WINDOW = 128_000_000
_BATCH = 4096


class Prepared(BaseModel):
    """Time and memory of a preparation."""

    wall_s: float
    cpu_s: float
    """Of this process."""
    peak: int
    """Bytes of this process and its children (PSS)."""
    peak_without_services: int
    """The same without Ray's own services."""
    before: int
    """Bytes when the preparation began."""


def prepare_once(way: str, source: str, folder: Path) -> Prepared:
    """Prepare in a new process, and return its time and memory.

    Args:
        way: ``cluster`` for labelled examples, by Ray tasks on two CPUs; ``tokens`` for blocks of tokens, in one
            process; ``plain`` for the same blocks without the library.
        source: folder or file of Parquet.
        folder: a new folder on a disk, for shards.
    """
    command = [sys.executable, "-m", "benchmarks.data.steps", way, source, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return Prepared.model_validate_json(done.stdout.splitlines()[-1])


def recipe_of(way: str, source: str, storage: str) -> Recipe:
    """A recipe whose data lie in shards."""
    keys = [f"data.source={source}", f"storage={storage}", f"data.shards={{window: {WINDOW}}}"]
    if way == "tokens":
        return load_recipe("recipes/stdlib_gpt.yaml", keys)
    return load_recipe("recipes/reviews.yaml", [*keys, "train.linear_baseline=false"])


def prepare_library(way: str, source: str, folder: Path) -> None:
    """Prepare shards in ``folder``, and write a reference to them, as they lie on the S3 that serves it."""
    recipe = recipe_of(way, source, str(folder))
    if way == "cluster":
        import ray

        from jobs._shards import _run_units

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        data = prepare(recipe, partial(_run_units, to_path(folder), recipe.train.preparation))
    else:
        data = prepare(recipe)
    assert isinstance(data, LabelledData | LanguageData)
    # Shards were written to the disk that the S3 serves: s3fs waits without end for some of rclone's answers.
    location = f"s3://{folder.parent.name}/{folder.name}/data/{Path(data.reference.location).name}"
    served = replace(data, reference=data.reference.model_copy(update={"location": location}))
    served.save(to_path(folder / "served"))


def prepare_plainly(source: str, folder: Path) -> None:
    """Learn a tokenizer from a sample, tokenise all rows, and write blocks as Arrow."""
    config = load_recipe("recipes/stdlib_gpt.yaml", []).data
    with pq.ParquetFile(source) as table:
        sample = table.read_row_group(0, columns=["text"])["text"].to_pylist()
        wanted = SAMPLE_SIZE * len(sample) // max(1, sum(map(len, sample)))
        sample = [text for batch in table.iter_batches(wanted, columns=["text"]) for text in batch["text"].to_pylist()][
            :wanted
        ]
        tokenizer = LanguageTokenizer.fit(sample, config)
        size = config.block_length + 1
        schema = pa.schema({"tokens": pa.list_(pa.uint16(), size)})
        with pa.ipc.new_file(str(folder / "plain.arrow"), schema) as file:
            for batch in table.iter_batches(_BATCH, columns=["text"]):
                tokens = tokenizer.join(batch["text"].to_pylist()).astype(np.uint16)
                tokens = tokens[: len(tokens) // size * size]
                blocks = pa.FixedSizeListArray.from_arrays(pa.array(tokens), size)
                file.write_batch(pa.record_batch([blocks], schema))


def _main() -> None:
    """Prepare as the arguments say, and print time and memory."""
    way, source, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [family_bytes()]

    def measure() -> int:
        sizes.append(family_bytes())
        return sizes[-1][0]

    started, cpu = time.perf_counter(), psutil.Process().cpu_times()
    with PeakMemory(measure, every_s=0.2):
        if way == "plain":
            prepare_plainly(source, folder)
        else:
            prepare_library(way, source, folder)
    used = psutil.Process().cpu_times()
    figures = Prepared(
        wall_s=time.perf_counter() - started,
        cpu_s=used.user + used.system - cpu.user - cpu.system,
        peak=max(total for total, _ in sizes),
        peak_without_services=max(own for _, own in sizes),
        before=sizes[0][0],
    )
    print(figures.model_dump_json())


if __name__ == "__main__":
    _main()
