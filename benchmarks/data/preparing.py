"""Preparation beside the same steps in plain pyarrow and tokenizers, each in a new process."""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from app.config import Recipe, load_recipe
from app.data.tokenizer import LanguageTokenizer
from app.tasks import prepare

_SAMPLE_ROWS = 15_000


def recipe_of(task: str, source: str, storage: str) -> Recipe:
    """A recipe whose data lie in shards."""
    recipe = "recipes/stdlib_gpt.yaml" if task == "language-modeling" else "recipes/reviews.yaml"
    keys = [f"data.source={source}", f"storage={storage}", "data.shards={size: 32MB, window: 128MB}"]
    return load_recipe(recipe, [*keys, *([] if task == "language-modeling" else ["train.linear_baseline=false"])])


def plain(source: str, folder: str) -> None:
    """Learn a tokenizer from some rows of a Parquet file, tokenise all, and write blocks as Arrow."""
    config = load_recipe("recipes/stdlib_gpt.yaml", []).data
    with pq.ParquetFile(source) as table:
        sample = next(table.iter_batches(_SAMPLE_ROWS, columns=["text"]))["text"].to_pylist()
        tokenizer = LanguageTokenizer.fit(sample, config)
        size = config.block_length + 1
        schema = pa.schema({"tokens": pa.list_(pa.uint16(), size)})
        with pa.ipc.new_file(f"{folder}/plain.arrow", schema) as file:
            for batch in table.iter_batches(4096, columns=["text"]):
                tokens = tokenizer.join(batch["text"].to_pylist()).astype(np.uint16)
                tokens = tokens[: len(tokens) // size * size]
                blocks = pa.FixedSizeListArray.from_arrays(pa.array(tokens), size)
                file.write_batch(pa.record_batch([blocks], schema))


def main() -> None:
    """Prepare as the arguments say, and print seconds and the peak of the resident memory."""
    task, source, place = sys.argv[1:]
    started, cpu_s = time.perf_counter(), time.process_time()
    before = _peak_bytes()
    found = {}
    if task == "plain":
        plain(source, place)
    else:
        data = prepare(recipe_of(task, source, place))
        found = json.loads(data.reference.model_dump_json())  # type: ignore[attr-defined]
    figures = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_s, "before": before}
    print(json.dumps({**figures, "peak": _peak_bytes(), "reference": found}))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    Path(sys.argv[3]).mkdir(parents=True, exist_ok=True) if "://" not in sys.argv[3] else None
    main()
