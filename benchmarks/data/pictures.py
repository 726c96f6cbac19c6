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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from app.config import Recipe, load_recipe
from app.data.augmentation import Augmentation, augmentation_of
from app.data.builtin import BUILTIN
from app.data.labelled import LabelledData, LabelledDataset, Split
from app.engines.architecture import usable_cores
from app.storage import to_path
from app.tasks import prepare
from app.training.activity import Activity
from app.training.data.feed import Feed
from app.training.data.recipe_order import order_of
from app.training.worker import Worker
from benchmarks.data.corpus import s3_of
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import Goal, goals_table, table, verdict
from benchmarks.rounds import turns

RESULTS = Path(__file__).with_name("PICTURES.md")
_SIZE, _BATCH, _GOAL = 224, 64, 0.95
_FROM_S3, _FROM_DISK = "shards on S3, cold, by Rayloom's reader", "shards on the disk, by Rayloom's reader"
_FROM_MEMORY = "decoded from memory, and dropped"
_DRAWN = 20_000
"""Pictures that are drawn. Others are the same with another comment."""
_IN_MEMORY = 2000
"""Pictures that are decoded from memory, again and again."""
_AUGMENT = "train.augment={image: {crop: 0.6, flip: 0.5, color: 0.2}}"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data.pictures", description=__doc__)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--window", type=int, default=10_000, help="pictures of the epoch that a round reads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    arguments = parser.parse_args()
    conditions = Conditions()
    cores = usable_cores()
    with tempfile.TemporaryDirectory(prefix="bench-pictures-") as temporary:
        folder = Path(temporary)
        os.environ["RAYLOOM_CACHE"] = f"{folder}/cache"
        num_bytes = write_pictures(folder / "bench/pictures", arguments.pictures)
        with s3_of(folder):
            recipe, on_disk, data = _prepared(folder, cores)
            steps = min(arguments.window // _BATCH, order_of(recipe, data).num_batches(1))
            ways: dict[str, Callable[[], float]] = {
                _FROM_S3: lambda: _from_s3(recipe, data, folder / "cache", steps),
                _FROM_DISK: lambda: _read(recipe, on_disk, steps),
                _FROM_MEMORY: lambda: _decode(recipe, data, cores, steps),
            }
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for order in turns([*ways], arguments.rounds):
                for name in order:
                    rates[name].append(ways[name]())
    text = page(rates, arguments.pictures, steps * _BATCH, num_bytes, cores, conditions)
    arguments.results.write_text(text, encoding="utf-8")
    print(text)


def write_pictures(folder: Path, count: int) -> int:
    """Write JPEGs in a folder for each label. Return their bytes.

    Each is a picture of Fashion-MNIST, enlarged, tinted and with noise. The first ones come again, with other comments.
    """
    examples = BUILTIN["fashion"]()
    labels = [label.replace("/", "-") for label in examples.labels[: min(count, _DRAWN)]]
    for label in set(labels):
        (folder / label).mkdir(parents=True, exist_ok=True)
    # An executor ends its processes by a message. A pool uses SIGTERM, which they may ignore.
    with ProcessPoolExecutor(usable_cores(), multiprocessing.get_context("fork")) as pool:
        drawn = list(pool.map(_draw, range(len(labels)), examples.inputs, chunksize=200))
    total = 0
    for number in range(count):
        comment = f"picture {number}".encode()
        # A comment is a segment behind the two bytes that every JPEG begins with.
        content = drawn[number % len(drawn)]
        content = content[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + content[2:]
        total += (folder / labels[number % len(drawn)] / f"{number}.jpg").write_bytes(content)
    return total


def _draw(number: int, content: bytes) -> bytes:
    generator = np.random.default_rng(number)
    enlarged = np.asarray(Image.open(io.BytesIO(content)).resize((_SIZE, _SIZE)), np.int16)[:, :, None]
    tint = generator.integers(-40, 41, 3, np.int16)
    noise = generator.integers(-12, 13, (_SIZE, _SIZE, 1), np.int16)
    levels = np.clip(enlarged + tint + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _run_units(work: Callable[[int], int], units: Sequence[int]) -> Iterator[int]:
    """Work on units in a process for each core."""
    with multiprocessing.get_context("fork").Pool(usable_cores()) as pool:
        yield from pool.imap_unordered(work, units)


def _prepared(folder: Path, cores: int) -> tuple[Recipe, LabelledData, LabelledData]:
    """Prepare shards on the disk that the S3 serves, and return the data as they lie there and on the S3."""
    keys = [f"data.source={folder}/bench/pictures", f"data.image={{size: {_SIZE}, channels: 3}}", _AUGMENT]
    keys += [f"storage={folder}/bench/storage", "data.shards={window: 128MB}"]
    keys += [f"train.global_batch_size={_BATCH}", "train.workers=1", f"train.loader={{num_workers: {cores}}}"]
    recipe = load_recipe("recipes/digits.yaml", keys)
    data = prepare(recipe, _run_units)
    assert isinstance(data, LabelledData)
    location = f"s3://bench/storage/data/{Path(data.reference.location).name}"
    served = replace(data, reference=data.reference.model_copy(update={"location": location}))
    served.save(to_path(folder / "served"))
    return recipe, data, LabelledData.load(to_path(folder / "served"), type(data.processor), type(data.targets))


def _from_s3(recipe: Recipe, data: LabelledData, cache: Path, steps: int) -> float:
    """Read the first steps of an epoch with an empty cache. Return pictures a second, from the first batch on."""
    shutil.rmtree(cache, ignore_errors=True)
    return _read(recipe, data, steps)


def _held_in_memory(data: LabelledData) -> LabelledDataset:
    inputs, classes = data.train.split.take(range(min(_IN_MEMORY, len(data.train))))
    return LabelledDataset(Split(list(inputs), classes), data.processor, data.targets)


def _read(recipe: Recipe, data: LabelledData, steps: int) -> float:
    """Read the first steps of an epoch. Return pictures a second, from the first batch on."""
    order, worker = order_of(recipe, data), Worker(0, 1, torch.device("cpu"))
    with closing(
        Feed(data, recipe.train, recipe.train.layout(1), worker, Activity(), order, augmentation_of(recipe.train, data))
    ) as feed:
        each = order.num_batches(1)
        epochs = range(1, -(-steps // each) + 1)
        parts = (feed.train(epoch, range(min(each, steps - (epoch - 1) * each))) for epoch in epochs)
        batches = chain.from_iterable(parts)
        next(batches)
        began = time.perf_counter()
        rows = sum(len(batch.targets) for batch in batches)
        return rows / (time.perf_counter() - began)


def _decode(recipe: Recipe, data: LabelledData, cores: int, steps: int) -> float:
    """Decode and change pictures in memory, in a process for each core. Return pictures a second."""
    held, augmentation = _held_in_memory(data), augmentation_of(recipe.train, data)
    assert augmentation
    with multiprocessing.get_context("fork").Pool(cores, _hold, (held, augmentation)) as pool:
        pool.map(_decode_batch, range(cores))  # all have started
        began = time.perf_counter()
        rows = sum(pool.imap_unordered(_decode_batch, range(steps)))
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


def page(
    rates: Mapping[str, Sequence[float]], count: int, read: int, num_bytes: int, cores: int, conditions: Conditions
) -> str:
    """Return the page of some rounds, in pictures a second."""
    shares = [one / other for one, other in zip(rates[_FROM_S3], rates[_FROM_MEMORY], strict=True)]
    share = statistics.median(shares)
    of_loader = statistics.median(one / other for one, other in zip(rates[_FROM_S3], rates[_FROM_DISK], strict=True))
    rows = [
        [name, f"{statistics.median(found):,.0f}", " ".join(f"{rate:,.0f}" for rate in found)]
        for name, found in rates.items()
    ]
    kilobytes, reached = num_bytes / count / 1000, f"{share:.2f} ({min(shares):.2f} to {max(shares):.2f})"
    goals = [
        Goal("pictures/s from S3, to those decoded from memory", f"≥ {_GOAL}", reached, verdict(share >= _GOAL)),
        Goal("the same, to those on the disk by the same reader", "–", f"{of_loader:.2f}", "–"),
    ]
    return f"""# Pictures on S3

Written by `python -m benchmarks.data.pictures`. {count:,} JPEGs of {_SIZE} × {_SIZE} pixels, {kilobytes:.1f} kB each,
are made from Fashion-MNIST and noise. {_DRAWN:,} of them are distinct, and the others repeat these with different
JPEG comments. They are stored in shards on `rclone serve s3` on this machine. A round reads the first {read:,}
pictures of an epoch, with an empty cache.

{cores} processes decode and crop pictures, mirror them, change their color and create tensors. Rayloom's reader also
passes the tensors to the training process. "Decoded from memory" uses the same number of processes. They do the same
with {_IN_MEMORY:,} pictures that they hold in memory, and drop the tensors. The server and the downloads share the
cores with the readers. Timing starts at the first batch. The methods take turns.

{machine()}.
{versions(["torch", "pillow", "s3fs"])}.
{conditions}

{goals_table(goals)}

{table(["method", "pictures/s, median", "rounds"], rows)}

Reading from S3 costs little: the same reader is about as fast with shards on the disk. Unlike plain decoding, a
reader passes tensors to the training process. A picture takes 602 kB in float32.
"""


if __name__ == "__main__":
    main()
