"""The context of a step: its device, its card, and the destination of its figures."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.config import Precision
from app.errors import PlanError
from app.planner.cluster import Cluster, catalogue_name, cluster_of, this_machine
from benchmarks.gpu.findings import Figure, Record
from benchmarks.gpu.floors import Floor

Device = Literal["gpu", "cpu"]
GOAL_MFU = 0.5


@dataclass(frozen=True)
class Bench:
    """The context of a step."""

    device: Device
    kit: Path
    """The folder with the kit's corpus and weights."""
    record: Record

    @property
    def is_small(self) -> bool:
        """Whether models and batches are small, because the step runs on a CPU."""
        return self.device == "cpu"

    @property
    def cluster(self) -> Cluster:
        """One card, with its data sheet's figures."""
        return hardware(self.device)

    @property
    def corpus(self) -> Path:
        """Labelled reviews, as JSON lines with ``text`` and ``label``."""
        return _existing(self.kit / "corpus/reviews.jsonl")

    @property
    def weights(self) -> Path:
        """A Hugging Face folder with the first layers of a pretrained encoder."""
        return _existing(self.kit / "weights/minilm")

    def figure(self, name: str, value: float | str, unit: str = "", reached: bool | None = None) -> None:
        """Record a figure without a reference."""
        self.record(Figure(name=name, value=value, unit=unit, reached=reached))

    def compare(
        self, name: str, value: float, unit: str, reference: float | None, source: str, reached: bool | None = None
    ) -> None:
        """Record a figure beside ``reference``, in the same unit."""
        self.record(Figure(name=name, value=value, unit=unit, reference=reference, source=source, reached=reached))

    def compare_with_floor(self, name: str, seconds: float, floor: Floor, precision: Precision) -> None:
        """Record a time in ms beside the minimum that the card's data sheet allows."""
        least = floor.seconds(self.cluster.device, precision)
        self.compare(name, 1e3 * seconds, "ms", 1e3 * least, f"floor: {floor.bound(self.cluster.device, precision)}")


def hardware(device: Device) -> Cluster:
    """Return the planner's description of one card of this machine; for a CPU, of the processor.

    Raises:
        PlanError: the planner's catalogue does not know the GPU.
    """
    if device == "cpu":
        return this_machine(1)
    import torch

    return cluster_of(f"1x{catalogue_name(torch.cuda.get_device_name())}")


def default_device() -> Device:
    """Return the device that the environment variable DEVICE names. The default is ``gpu``."""
    given = os.environ.get("DEVICE", "gpu")
    if given not in ("gpu", "cpu"):
        raise PlanError(f"DEVICE is {given!r}: expected gpu or cpu")
    return "cpu" if given == "cpu" else "gpu"


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: run 'make gpu-kit', and set KIT to its folder")
    return path
