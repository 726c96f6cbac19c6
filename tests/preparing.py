"""Small sources of texts, and recipes that prepare them as small shards."""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from app.config import Recipe, load_recipe
from app.data.sharded_data import ShardedLabelledData
from app.tasks import prepare

WORDS = ["river", "stone", "lantern", "orchard", "velvet", "copper", "meadow", "harbour", "thistle", "ember"]


def text(number: int) -> str:
    """A text of its own for each number."""
    source = random.Random(number)
    return f"{number}: " + " ".join(source.choices(WORDS, k=source.randint(3, 30)))


ROWS = [(text(number), ("good", "bad", "fair")[number % 3], f"author {number // 20}") for number in range(1200)]


def write_table(
    path: Path, rows: Sequence[tuple[str | bytes, ...]], names: Sequence[str] = ("text", "label", "author")
) -> None:
    """Write rows in the format that the file's name has."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    table = pa.table(dict(zip(names, columns, strict=True)))
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=100)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=100)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([names, *rows])
    else:
        lines = [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8")


def recipe_of(source: Path | str, *overrides: str) -> Recipe:
    """A recipe of small shards."""
    shards = "data.shards={size: 5KB, window: 20KB}"
    return load_recipe(
        "recipes/reviews.yaml", [f"data.source={source}", "train.linear_baseline=false", shards, *overrides]
    )


def prepared(source: Path | str, *overrides: str) -> ShardedLabelledData:
    """The data of such a recipe."""
    data = prepare(recipe_of(source, *overrides))
    assert isinstance(data, ShardedLabelledData)
    return data


def rows_in(data: ShardedLabelledData) -> dict[str, list[tuple[Any, str]]]:
    """The inputs and labels of each split."""
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    return {
        name: [(item, data.labels[label]) for item, label in zip(*split.split.take(range(len(split))), strict=True)]
        for name, split in splits.items()
        if split
    }


def language_recipe(source: Path, *overrides: str) -> Recipe:
    keys = [f"data.source={source}", "data.block_length=16", "data.tokenizer.vocab_size=300"]
    return load_recipe("recipes/stdlib_gpt.yaml", [*keys, "data.shards={size: 5KB, window: 20KB}", *overrides])
