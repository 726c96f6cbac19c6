"""Picture loading for a GPU, and the device metrics in a whole run's records."""

import tempfile
from pathlib import Path

import torch

from app.telemetry.usage import read_usage
from app.training.data.feed import MicroBatch
from benchmarks.compile.samples import write_pictures
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.card import median_s, torch_device
from benchmarks.gpu.runs import TrainedRun, trained

_RECIPE = "benchmarks/compile/resnet50.yaml"
_EPOCHS, _BATCH, _SIDE = 3, 32, 224
_COPIES = 30
"""Number of copies of each picture, so that an epoch lasts for seconds."""
_SMALL = ("model.factory=app.models.image:small_cnn", "data.image={size: 32, channels: 3}")
_FIRST_STEPS = 8
"""Steps of the last epoch to ignore, because the loader restarts in each epoch."""


def measure(bench: Bench) -> None:
    """Train ResNet-50 on real pictures, and record data stall, memory, energy, and copies to the device."""
    precision = "train.precision=" + ("fp32" if bench.is_small else "bf16")
    epochs, copies = (2, 5) if bench.is_small else (_EPOCHS, _COPIES)
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder) / "pictures")
        _multiply(Path(folder) / "pictures", copies)
        overrides = [
            f"data.source={folder}/pictures",
            f"train.device={bench.device}",
            precision,
            f"train.epochs={epochs}",
            f"train.global_batch_size={_BATCH}",
            "train.loader.num_workers=auto",
            "data.clean.deduplicate=false",
            *(_SMALL if bench.is_small else ()),
        ]
        run = trained(_RECIPE, overrides, Path(folder) / "storage")
        _record_run(bench, run)
    _record_copies(bench)


def _multiply(folder: Path, copies: int) -> None:
    """Link each picture until there are ``copies`` of it."""
    for picture in list(folder.rglob("*.png")):
        for number in range(1, copies):
            picture.with_stem(f"{picture.stem}_{number}").hardlink_to(picture)


def _record_run(bench: Bench, run: TrainedRun) -> None:
    last = [step for step in run.steps if step["epoch"] == run.steps[-1]["epoch"]]
    late = last[_FIRST_STEPS:]
    stall = sum(step["data_stall"] for step in late) / len(late)
    bench.compare("data stall", stall, "", 0.02, "goal", stall <= 0.02 if bench.device == "gpu" else None)
    bench.figure("samples", late[-1]["samples_per_s"], "/s")
    memory = late[-1]["memory"]
    bench.figure("peak memory", memory["peak_bytes"] / 2**30, "GiB")
    if memory.get("fragmentation") is not None:
        bench.figure("fragmentation", memory["fragmentation"])
    (usage,) = read_usage(run.folder)
    for source, joules in usage.energy_j.items():
        bench.figure(f"mean power of the {source}, of the whole run", joules / usage.seconds, "W")
    if usage.gpu_busy_s is not None:
        bench.figure("utilisation of the GPU, of the whole run", usage.gpu_busy_s / usage.seconds)


def _record_copies(bench: Bench) -> None:
    """Record the copy rate of a micro-batch to the device from pageable and pinned memory."""
    device = torch_device(bench)
    if device.type == "cpu":
        return
    pictures = torch.randn(_BATCH, 3, _SIDE, _SIDE)
    batch = MicroBatch({"pixel_values": pictures}, torch.zeros(_BATCH, dtype=torch.int64))
    link = bench.cluster.host_link.bandwidth / 1e9
    for name, read in (("pageable", batch), ("pinned", batch.pin_memory())):
        source = read.inputs["pixel_values"]
        seconds = median_s(lambda source=source: source.to(device, non_blocking=True), device)  # type: ignore[misc]
        bench.compare(f"copy of {name} memory", source.nbytes / seconds / 1e9, "GB/s", link, "the link")
