"""Clusters that a plan is made for: devices, their memory and rates, and the links between them.

Bytes are bytes, rates are per second, and the rates of links are of one direction and one device. Figures come from
vendors' data sheets (dense, without sparsity) and describe what the hardware could do at most.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
import yaml
from pydantic import Field, PositiveInt, ValidationError

from app.config import TrainConfig, parse_yaml, yaml_problem
from app.config.plan import Device as DeviceKind
from app.config.plan import Precision
from app.config.section import Section
from app.engines.architecture import granted_memory, usable_cores
from app.errors import PlanError
from app.import_string import did_you_mean

GIB = 2**30
Rate = Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True)
class Link:
    """What a device can send to another, by the alpha-beta model (Hockney 1994): time = latency + bytes / bandwidth."""

    bandwidth: float
    """Bytes per second, in one direction, of one device."""
    latency_s: float
    """Seconds until the first byte arrives."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one worker process on CPUs."""

    name: str
    kind: DeviceKind
    memory: int
    """Bytes that programs can allocate."""
    memory_bandwidth: float
    half_flops: float
    """Operations per second in bf16 or fp16, with sums in fp32."""
    float_flops: float
    """Operations per second in fp32, which is TF32 where the device has it."""
    launch_s: float
    """Seconds that a small operation takes at least, from Python to the end of its kernel."""
    units: int = 1
    """Multiprocessors, among which a product's tiles are dealt out."""
    threads: int = 1
    """Threads of a worker process on CPUs."""

    def flops(self, precision: Precision) -> float:
        """Return the operations per second of matrix products in ``precision``."""
        return self.float_flops if precision == "fp32" else self.half_flops


@dataclass(frozen=True)
class Cluster:
    """Equal devices on equal nodes. The last node may be partly filled."""

    device: Device
    devices: int
    devices_per_node: int
    node_link: Link
    """Between the devices of a node."""
    network: Link
    """Between nodes."""
    host_memory: int
    """Bytes of memory of a node, for what is offloaded."""
    host_link: Link
    """Between a device and its node's memory."""
    disk_bandwidth: float
    """Bytes per second of a node's local disk."""

    @property
    def nodes(self) -> int:
        """Nodes that hold the devices."""
        return math.ceil(self.devices / self.devices_per_node)

    def resized(self, devices: int, per_node: int) -> "Cluster":
        """Return a cluster of the same hardware with another number of devices, at most ``per_node`` on a node."""
        return replace(self, devices=devices, devices_per_node=min(per_node, devices))

    def __str__(self) -> str:
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.devices} x {self.device.name}{nodes}"


def _gpu(name: str, memory: float, bandwidth: float, half: float, single: float, units: int) -> Device:
    """Return a GPU from GiB, GB/s, teraFLOP/s and multiprocessors."""
    return Device(name, "gpu", int(memory * GIB), bandwidth * 1e9, half * 1e12, single * 1e12, _GPU_LAUNCH_S, units)


_GPU_LAUNCH_S = 10e-6
"""PyTorch takes 5 to 10 microseconds to launch a kernel, and eager training two or three launches an operation."""
_CPU_LAUNCH_S = 8e-6


_NODE_LATENCY_S, _NETWORK_LATENCY_S, _HOST_LATENCY_S = 5e-6, 12e-6, 10e-6
"""Small messages of NCCL through NVLink and through InfiniBand, and a copy to pinned memory."""


def _node(
    device: Device, devices: int, node_link: float, network: float, memory: float, host_link: float, disk: float = 6.0
) -> Cluster:
    """Return a node as it is usually sold, from links in GB/s a device, memory in GiB and the disk in GB/s."""
    return Cluster(
        device=device,
        devices=devices,
        devices_per_node=devices,
        node_link=Link(node_link * 1e9, _NODE_LATENCY_S),
        network=Link(network * 1e9, _NETWORK_LATENCY_S),
        host_memory=int(memory * GIB),
        host_link=Link(host_link * 1e9, _HOST_LATENCY_S),
        disk_bandwidth=disk * 1e9,
    )


# Data sheets: A100 and T4 (nvidia.com/en-us/data-center/a100, tesla-t4), H100 SXM, H200 SXM, B200 in HGX, L4. Memory is
# what nvidia-smi shows. h100-500w is Meta's Grand Teton (HBM2e of 2.4 TB/s, torchtitan's docs). Its peak is taken to
# fall with the square root of the power, 500 of 700 W. Networks: HDR InfiniBand of a DGX A100 (200 Gb/s a GPU), NDR of
# DGX H100, H200 and B200 (400 Gb/s), 100 Gb/s a node with L4 (Google g2-standard-96) and T4 (AWS g4dn.metal).
_NODES = {
    "a100-40": _node(_gpu("a100-40", 39.4, 1555, 312, 156, 108), 8, 300, 25, 1024, 25),
    "a100-80": _node(_gpu("a100-80", 79.2, 2039, 312, 156, 108), 8, 300, 25, 2048, 25),
    "h100": _node(_gpu("h100", 79.1, 3350, 989.4, 494.7, 132), 8, 450, 50, 2048, 50),
    "h100-500w": _node(_gpu("h100-500w", 94.5, 2400, 836, 418, 132), 8, 450, 50, 2048, 50),
    "h200": _node(_gpu("h200", 139.8, 4800, 989.4, 494.7, 132), 8, 450, 50, 2048, 50),
    "b200": _node(_gpu("b200", 178.3, 7700, 2250, 1125, 148), 8, 900, 50, 2048, 50),
    "l4": _node(_gpu("l4", 22.0, 300, 121, 60, 58), 8, 16, 1.56, 384, 16, 2.0),
    "t4": _node(_gpu("t4", 14.6, 320, 65, 8.1, 40), 8, 8, 1.56, 384, 8, 1.0),
}

CATALOGUE = (*_NODES, "cpu")
"""Names of devices that ``--cluster`` knows."""


def cluster_of(text: str, threads: int = 1) -> Cluster:
    """Return the cluster that ``--cluster`` names.

    Args:
        text: ``64xa100-80`` (devices), ``8x4xh100`` (nodes and devices of each), ``2xcpu`` (worker processes of this
            machine), or the path of a YAML or JSON file.
        threads: those of a worker process on CPUs.

    Raises:
        PlanError: the device is unknown, the text is neither, or the file lacks something.
    """
    if text.endswith((".yaml", ".yml", ".json")):
        return _read_file(Path(text), threads)
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w.-]*)", text)
    if match is None:
        raise PlanError(
            f"cluster {text!r} is not known: expected devices and their name, such as 64xa100-80, nodes too, such as "
            "8x4xh100, or the path of a YAML or JSON file"
        ).of("cluster.unknown")
    nodes, count, name = match.groups()
    if int(count) < 1 or int(nodes or 1) < 1:
        raise PlanError(f"cluster {text!r} has no devices: give at least one, such as 1x{name}").of(
            "cluster.no_devices"
        )
    cluster = _named(name.lower(), int(count), threads)
    if nodes:
        cluster = replace(cluster, devices=int(nodes) * int(count), devices_per_node=int(count))
    return cluster


def _named(name: str, devices: int, threads: int) -> Cluster:
    """Return a cluster of the catalogue."""
    if name == "cpu":
        return this_machine(devices, threads)
    if name not in _NODES:
        alike = [known for known in CATALOGUE if known.startswith(name)]
        nearest = f"did you mean {' or '.join(alike)}?" if alike else did_you_mean(name, CATALOGUE)
        raise PlanError(f"device {name!r} is not in the catalogue, and others come from a file; {nearest}").of(
            "device.unknown"
        )
    node = _NODES[name]
    return node.resized(devices, node.devices_per_node)


def this_machine(workers: int, threads: int = 1) -> Cluster:
    """Return this machine's CPUs, shared by ``workers`` processes of so many threads, within the limits of its cgroup.

    The rates are typical ones: calibration measures.
    """
    # Physical cores, because hyperthreads share the units that compute matrix products.
    usable = usable_cores()
    cores = min(psutil.cpu_count(logical=False) or usable, usable)
    memory = int(min(psutil.virtual_memory().total, granted_memory()))
    share = min(threads, cores / workers)
    return Cluster(
        device=Device(
            name="cpu",
            kind="cpu",
            memory=memory // workers,
            memory_bandwidth=10e9 * share,
            # Most processors emulate bf16, which takes longer than fp32.
            half_flops=30e9 * share,
            float_flops=60e9 * share,
            launch_s=_CPU_LAUNCH_S,
            threads=threads,
        ),
        devices=workers,
        devices_per_node=workers,
        node_link=Link(1.5e9, 100e-6),
        network=Link(1e9, 200e-6),
        host_memory=memory,
        host_link=Link(10e9 * share, 1e-6),
        disk_bandwidth=0.5e9,
    )


_GPU_NAMES = {
    "a100-80": r"NVIDIA A100-SXM4?-80GB|A100-80G",
    "a100-40": r"NVIDIA A100-SXM4?-40GB|A100(-40G)?",
    "h100": r"NVIDIA H100 80GB HBM3|H100",
    "h200": r"(NVIDIA )?H200",
    "b200": r"(NVIDIA )?B200",
    "l4": r"(NVIDIA )?L4",
    "t4": r"(NVIDIA )?Tesla T4|NVIDIA T4|T4",
}
"""The whole names that CUDA and Ray give GPUs of the catalogue, whose cards on PCIe have other links and rates.

Ray's short names say neither. Its A100 is taken for the one with less memory, and the others for the catalogue's.
"""


def catalogue_name(gpu: str) -> str:
    """Return the catalogue's name of a GPU that CUDA or Ray calls ``gpu``. Raises PlanError if it has none."""
    found = next((name for name, pattern in _GPU_NAMES.items() if re.fullmatch(pattern, gpu)), None)
    if found is None:
        raise PlanError(f"GPU {gpu!r} is not in the catalogue: give --cluster a file with its figures").of(
            "device.unknown"
        )
    return found


def local_cluster(config: TrainConfig) -> Cluster:
    """Return as many of this machine's devices as training has workers. Raises PlanError for an unknown GPU."""
    workers = config.workers_range[1]
    if config.device == "cpu":
        return this_machine(workers, config.threads)
    import torch

    name = catalogue_name(torch.cuda.get_device_name())
    return cluster_of(f"1x{name}").resized(workers, max(1, torch.cuda.device_count()))


class _LinkFile(Section):
    gigabytes_per_s: Rate = Field(description="of one device, in one direction")
    latency_us: Annotated[float, Field(ge=0.0)] = Field(default=10.0, description="until the first byte arrives")

    def link(self) -> Link:
        return Link(self.gigabytes_per_s * 1e9, self.latency_us * 1e-6)


class _DeviceFile(Section):
    name: str = Field(description="as the table shows it")
    kind: DeviceKind = Field(default="gpu", description="cpu or gpu")
    memory_gib: Rate = Field(description="memory that programs can allocate")
    memory_gigabytes_per_s: Rate = Field(description="bandwidth of the memory")
    half_teraflops: Rate = Field(description="dense matrix products in bf16 or fp16")
    float_teraflops: Rate = Field(description="the same in fp32 or TF32")
    launch_us: Rate = Field(default=10.0, description="time of a small operation")
    units: PositiveInt = Field(default=1, description="multiprocessors of a GPU")

    def device(self) -> Device:
        return Device(
            name=self.name,
            kind=self.kind,
            memory=int(self.memory_gib * GIB),
            memory_bandwidth=self.memory_gigabytes_per_s * 1e9,
            half_flops=self.half_teraflops * 1e12,
            float_flops=self.float_teraflops * 1e12,
            launch_s=self.launch_us * 1e-6,
            units=self.units,
        )


class ClusterFile(Section):
    """A cluster as a file describes it. A device of the catalogue brings its own links, which keys here replace."""

    device: str | _DeviceFile = Field(description="a name of the catalogue, or its figures")
    devices: PositiveInt = Field(description="all of them")
    devices_per_node: PositiveInt | None = Field(default=None, description="default: the catalogue's, else all")
    node_link: _LinkFile | None = Field(default=None, description="between the devices of a node")
    network: _LinkFile | None = Field(default=None, description="between nodes")
    host_memory_gib: Rate | None = Field(default=None, description="memory of a node, for offload")
    host_link: _LinkFile | None = Field(default=None, description="between a device and its node's memory")
    disk_gigabytes_per_s: Rate | None = Field(default=None, description="a node's local disk, for offload to nvme")


def _read_file(path: Path, threads: int) -> Cluster:
    """Return the cluster of a file. Raises PlanError if it cannot be read, or a link is missing."""
    try:
        file = ClusterFile.model_validate(parse_yaml(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise PlanError(f"cluster file {str(path)!r} cannot be read ({error.strerror}): give another path").of(
            "file.unreadable"
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(f"cluster file {str(path)!r} is not a text in UTF-8: give a YAML or JSON file").of(
            "text.encoding"
        ) from error
    except yaml.YAMLError as error:
        raise PlanError(f"cluster file {str(path)!r} is neither YAML nor JSON: {yaml_problem(error)}").of(
            "yaml.invalid"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise PlanError(
            f"cluster file {str(path)!r}: {key or 'the whole'}: {first['msg']}, got {first['input']!r}; known keys are "
            f"{', '.join(ClusterFile.model_fields)}"
        ).of(f"cluster.{first['type']}", key or None) from error
    return _from_file(file, path, threads)


def _from_file(file: ClusterFile, path: Path, threads: int) -> Cluster:
    base = _named(file.device, file.devices, threads) if isinstance(file.device, str) else None
    device = base.device if base else file.device.device()  # type: ignore[union-attr] # one of the two
    per_node = file.devices_per_node or (base.devices_per_node if base else file.devices)
    per_node = min(per_node, file.devices)

    def link(key: str, default: Link | None, is_needed: bool) -> Link:
        given: _LinkFile | None = getattr(file, key)
        if given is None and default is None and is_needed:
            raise PlanError(
                f"cluster file {str(path)!r} has no {key}, and {file.devices} devices with {per_node} a node need one: "
                f"add {key}: {{gigabytes_per_s: 25, latency_us: 10}}"
            ).of("cluster.no_link", "node_link")
        # A link that no two devices use costs nothing.
        return given.link() if given else default or Link(math.inf, 0.0)

    return Cluster(
        device=device,
        devices=file.devices,
        devices_per_node=per_node,
        node_link=link("node_link", base.node_link if base else None, per_node > 1),
        network=link("network", base.network if base else None, file.devices > per_node),
        host_memory=int(file.host_memory_gib * GIB) if file.host_memory_gib else base.host_memory if base else 0,
        host_link=link("host_link", base.host_link if base else Link(16e9, _HOST_LATENCY_S), is_needed=True),
        disk_bandwidth=file.disk_gigabytes_per_s * 1e9
        if file.disk_gigabytes_per_s
        else base.disk_bandwidth
        if base
        else 1e9,
    )
