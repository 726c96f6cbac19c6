"""Small sources of texts, and recipes that prepare them as small shards."""

import csv
import json
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from upath import UPath

from app.config import DataConfig, Recipe, load_recipe
from app.data import builtin
from app.data.examples import CleaningReport, Input
from app.data.labelled import LabelledData
from app.data.language import LanguageData
from app.data.preparation.data import prepare_labelled, prepare_tokens
from app.data.preparation.samples import Documents, Labelled
from app.data.preparation.writers import LabelledWriter, labelled_schema
from app.data.prepared import PreparedData
from app.data.processor import Processor
from app.data.sharded import ShardReference
from app.data.shards import ShardIndex, ShardPlace
from app.data.targets import Classes, Targets
from app.models.factory import blueprint_of
from app.tasks import find_task, prepare
from app.tasks.objective import objective_of

WORDS = ["river", "stone", "lantern", "orchard", "velvet", "copper", "meadow", "harbour", "thistle", "ember"]


def text(number: int) -> str:
    """A text of its own for each number."""
    source = random.Random(number)
    return f"{number}: " + " ".join(source.choices(WORDS, k=source.randint(3, 30)))


ROWS = [(text(number), ("good", "bad", "fair")[number % 3], f"author {number // 20}") for number in range(1200)]


def write_table(
    path: Path, rows: Sequence[tuple[Any, ...]], names: Sequence[str] = ("text", "label", "author")
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


def prepared(source: Path | str, *overrides: str) -> LabelledData:
    """The data of such a recipe."""
    data = prepare(recipe_of(source, *overrides))
    assert isinstance(data, LabelledData)
    return data


def data_of(config: DataConfig, processor: type[Processor], storage: Path | None = None) -> LabelledData:
    """The data of a recipe's section, with one label each."""
    return prepare_labelled(_recipe_with("reviews", config, storage), Labelled(processor.modality, Classes), processor)


def documents_of(config: DataConfig) -> LanguageData:
    """The data of a recipe's section, as documents."""
    return prepare_tokens(_recipe_with("stdlib_gpt", config), Documents(), LanguageData)


def _recipe_with(name: str, config: DataConfig, storage: Path | None = None) -> Recipe:
    given = load_recipe(f"recipes/{name}.yaml", [] if storage is None else [f"storage={storage}"])
    return given.model_copy(update={"data": config})


def in_shards(
    folder: UPath, processor: Processor, targets: Targets, **splits: Sequence[tuple[Input, str]]
) -> LabelledData:
    """Labelled samples in the splits that are given, as preparation writes them."""
    config, written = DataConfig(source="-"), {}
    for split, rows in splits.items():
        inputs, labels = [item for item, _ in rows], [label for _, label in rows]
        read = partial(targets.read, config=config)
        schema = labelled_schema(processor.modality, targets.rule)
        place = ShardPlace(folder, split, 10**6)
        writer = LabelledWriter(place, schema, read, lambda items: [len(item) for item in items])
        writer.add(inputs, labels)
        written[split] = writer.close()
    index = ShardIndex(fingerprint="", created=datetime.now(UTC), task="", source="-", settings={}, splits=written)
    index.save(folder)
    reference = ShardReference(location=str(folder), sha256=index.sha256, config=config.shards)
    count = sum(map(len, splits.values()))
    report = CleaningReport(what="examples", given=count, kept=count, dropped={})
    return LabelledData.open(reference, processor, targets, report)


def rows_in(data: LabelledData) -> dict[str, list[tuple[Any, str]]]:
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


def first_losses(recipe: Recipe, data: PreparedData, batches: int = 4, size: int = 8) -> list[float]:
    """The losses of the first rows, of a small model that learns from each batch of them."""
    torch.manual_seed(0)
    model = blueprint_of(recipe.model, data.facts).model.eval()  # without dropout
    objective, optimizer = objective_of(find_task(recipe.task), recipe.train, data), torch.optim.SGD(model.parameters())
    losses = []
    for first in range(0, batches * size, size):
        batch = data.train.batch(range(first, first + size))
        output = model(**{name: torch.from_numpy(tensor) for name, tensor in batch.inputs.items()})
        loss = objective.mean(output, torch.from_numpy(batch.targets))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def read_fewer_files(name: str, one_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function of ``app.data.builtin`` read one in ``one_in`` files of the standard library.

    All files take ten seconds. The function forgets what it has read when the test ends.
    """
    found = list(builtin.BUILTIN_DOCUMENTS["stdlib"]())[::one_in]
    monkeypatch.setattr(builtin, "_standard_library", lambda: found)
    monkeypatch.setattr(builtin, name, cache(getattr(builtin, name).__wrapped__))
