"""JPEGs in shards on a local S3, decoded and changed, beside the same from memory: python -m benchmarks.data.pictures

Both use a process for each core. The ways take turns.
"""

import argparse
import io
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from app.config import Recipe, load_recipe
from app.data.augmentation import Augmentation, augmentation_of
from app.data.labelled import LabelledData, LabelledDataset, Split
from app.data.sharded_data import ShardedLabelledData
from app.engines.architecture import usable_cores
from app.storage import to_path
from app.tasks import prepare
from app.training.activity import Activity
from app.training.data.feed import Feed
from app.training.data.orders import order_of
from app.training.worker import Worker
from benchmarks.data.corpus import s3_of
from benchmarks.machine import load_average, machine, today, versions
from benchmarks.markdown import Goal, table, verdict

RESULTS = Path(__file__).with_name("PICTURES.md")
_SIZE, _LABELS, _BATCH, _GOAL = 224, 10, 64, 0.9
_IN_MEMORY = 2000
"""Pictures that are decoded from memory: again and again, as many as the S3 has."""
_AUGMENT = "train.augment={image: {crop: 0.6, flip: 0.5, color: 0.2}}"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.pictures", description=__doc__)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    arguments = parser.parse_args()
    cores = usable_cores()
    with tempfile.TemporaryDirectory(prefix="bench-pictures-") as temporary:
        folder = Path(temporary)
        os.environ["RAYLOOM_CACHE"] = f"{folder}/cache"
        num_bytes = write_pictures(folder / "bench/pictures", arguments.pictures)
        with s3_of(folder):
            recipe, data = _prepared(folder, cores)
            from_s3, from_memory = [], []
            for _ in range(arguments.rounds):
                from_s3.append(_read(recipe, data, folder / "cache"))
                from_memory.append(_decode(recipe, data, cores, arguments.pictures))
    text = page(from_s3, from_memory, arguments.pictures, num_bytes, cores)
    arguments.results.write_text(text, encoding="utf-8")
    print(text)


def write_pictures(folder: Path, count: int) -> int:
    """Write JPEGs of coarse and fine noise, each with its own, in a folder for each label. Return their bytes."""
    generator, total = np.random.default_rng(0), 0
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (7, 7, 3), np.uint8)).resize((_SIZE, _SIZE))
        fine = generator.integers(-12, 13, (_SIZE, _SIZE, 1))
        levels = np.clip(np.asarray(coarse, np.int16) + fine, 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(levels).save(buffer, "JPEG", quality=85)
        file = folder / str(number % _LABELS) / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(buffer.getvalue())
        total += len(buffer.getvalue())
    return total


def _prepared(folder: Path, cores: int) -> tuple[Recipe, ShardedLabelledData]:
    """Prepare shards on the disk that the S3 serves, and return the data as they lie on the S3."""
    keys = ["data.source=s3://bench/pictures", f"data.image={{size: {_SIZE}, channels: 3}}", _AUGMENT]
    keys += [f"storage={folder}/bench/storage", "data.shards={size: 32MB, window: 128MB}"]
    keys += [f"train.global_batch_size={_BATCH}", "train.workers=1", f"train.loader={{num_workers: {cores}}}"]
    recipe = load_recipe("recipes/digits.yaml", keys)
    data = prepare(recipe)
    assert isinstance(data, ShardedLabelledData)
    location = f"s3://bench/storage/data/{Path(data.reference.location).name}"
    served = replace(data, reference=data.reference.model_copy(update={"location": location}))
    served.save(to_path(folder / "served"))
    return recipe, ShardedLabelledData.load(to_path(folder / "served"), type(data.processor), type(data.targets))


def _read(recipe: Recipe, data: LabelledData, cache: Path) -> float:
    """Read an epoch from the S3 with an empty cache. Return pictures a second from the first batch on."""
    shutil.rmtree(cache, ignore_errors=True)
    order, worker = order_of(recipe, data), Worker(0, 1, torch.device("cpu"))
    with closing(Feed(data, recipe.train, recipe.train.layout(1), worker, Activity(), order)) as feed:
        batches = feed.train(1, range(order.num_batches(1)))
        next(batches)
        began = time.perf_counter()
        rows = sum(len(batch.targets) for batch in batches)
        return rows / (time.perf_counter() - began)


def _decode(recipe: Recipe, data: LabelledData, cores: int, count: int) -> float:
    """Decode and change pictures in memory, in a process for each core. Return pictures a second."""
    inputs, classes = data.train.split.take(range(min(_IN_MEMORY, len(data.train))))
    held = LabelledDataset(Split(inputs, classes), data.processor, data.targets)
    augmentation = augmentation_of(recipe.train, data)
    assert augmentation
    with multiprocessing.get_context("fork").Pool(cores, _hold, (held, augmentation)) as pool:
        pool.map(_decode_batch, range(cores))  # all have started
        began = time.perf_counter()
        rows = sum(pool.imap_unordered(_decode_batch, range(count // _BATCH)))
        return rows / (time.perf_counter() - began)


_held: list[tuple[LabelledDataset, Augmentation]] = []
"""What each process of the pool decodes."""


def _hold(dataset: LabelledDataset, augmentation: Augmentation) -> None:
    torch.set_num_threads(1)
    _held.append((dataset, augmentation))


def _decode_batch(number: int) -> int:
    dataset, augmentation = _held[0]
    rows = [(number * _BATCH + place) % len(dataset) for place in range(_BATCH)]
    return len(augmentation.batch(dataset, rows, (), 1, number).targets)


def page(from_s3: Sequence[float], from_memory: Sequence[float], count: int, num_bytes: int, cores: int) -> str:
    """Return the page of some rounds, in pictures a second."""
    share = statistics.median(from_s3) / statistics.median(from_memory)
    rows = [
        [name, f"{statistics.median(rates):,.0f}", " ".join(f"{rate:,.0f}" for rate in rates)]
        for name, rates in (("shards on S3, cold, by Rayloom's reader", from_s3), ("decoded from memory", from_memory))
    ]
    goal = Goal("pictures/s from S3, to those from memory", f"≥ {_GOAL}", f"{share:.2f}", verdict(share >= _GOAL))
    head = [
        "# Pictures on S3\n",
        f"Written by `python -m benchmarks.data.pictures --pictures {count}`. {count:,} JPEGs of {_SIZE} × {_SIZE}",
        f"pixels, {num_bytes / count / 1000:.1f} kB each, lie in shards on `rclone serve s3` on this machine. {cores}",
        "processes decode and cut them, mirror them, change their color and make tensors. The server shares the cores."
        "\n",
        f"{machine()}; {versions(['torch', 'pillow', 's3fs'])}; {today()}, load average {load_average()}\n",
    ]
    goals = table(["what", "goal", "reached", ""], [(goal.what, goal.goal, goal.reached, goal.verdict)])
    return "\n".join([*head, goals, "", table(["way", "pictures/s, median", "rounds"], rows)]) + "\n"


if __name__ == "__main__":
    main()
