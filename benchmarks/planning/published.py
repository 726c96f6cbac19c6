"""Published training runs, and what the planner says of each."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import numpy as np

from app.config.plan import Precision
from app.planner.cluster import Cluster, Device, Link, cluster_of
from app.planner.memory import GPU_PROCESS, ProcessMemory, memory
from app.planner.plan import ParallelPlan, Recompute
from app.planner.profile import ModelProfile
from app.planner.rates import Rates, rates_of
from app.planner.stages import Stage
from app.planner.step_time import StepEstimate, step_time
from benchmarks.planning.stacks import STACKS, Framework
from benchmarks.planning.transformer import TransformerShape, transformer_profile

TABLE = Path(__file__).parent / "published.csv"
LATER_TABLE = Path(__file__).parent / "published_later.csv"
"""Runs that were collected when the planner was done, and looked at once."""
EARLIER_TABLE = Path(__file__).parent / "published_earlier.csv"
"""Memory in the first tables of bigscience's log. It was collected last, and predicted before any change."""
_DEVICES = {"a100_40": "a100-40", "a100_80": "a100-80", "h100_sxm": "h100", "h100_500w": "h100-500w"}
_OMNI_PATH = 0.6
"""Its adapters leave the work to the processor, and data pass through the node's memory, without GPUDirect."""
_UNSTATED_MICRO_BATCHES = (1, 2, 4, 8)
"""Where a source does not say the micro-batch, the best of these is taken for the one that was published."""


@dataclass(frozen=True)
class PublishedRun:
    """A row of the table."""

    row: dict[str, str]

    @property
    def source(self) -> str:
        """The publication."""
        return self.row["source"]

    @property
    def is_held_out(self) -> bool:
        """Whether no constant was fitted on it."""
        return self.row["split"] == "held-out"

    @property
    def step_s(self) -> float:
        """Measured seconds of a step."""
        return float(self.row["step_s"])

    @property
    def memory(self) -> float | None:
        """Measured bytes of a rank."""
        return float(self.row["memory_GB"]) * 1e9 if self.row["memory_GB"] else None

    @property
    def group(self) -> str:
        """Runs that differ by their plan alone share it. bigscience gives several shapes the same name."""
        row = self.row
        return f"{row['group']} {row['layers']} x {row['hidden']}, {row['heads']} heads"

    @cached_property
    def stack(self) -> Framework:
        """The framework. bigscience set ``CUDA_LAUNCH_BLOCKING=1``, since its large runs hung without."""
        return replace(STACKS[self.row["framework"]], waits_for_kernels=self.source == "bigscience")

    @cached_property
    def device(self) -> Device:
        """The GPU."""
        return cluster_of(f"1x{_DEVICES[self.row['gpu']]}").device

    @cached_property
    def cluster(self) -> Cluster:
        """The GPUs and their links."""
        number = self._number
        share = _OMNI_PATH if "Omni-Path" in self.row["assumed"] else 1.0
        cluster = cluster_of(f"{number('gpus')}x{self.device.name}")
        return replace(
            cluster,
            devices_per_node=min(number("node"), number("gpus")),
            node_link=Link(number("intra_GBps") * 1e9, cluster.node_link.latency_s),
            network=Link(number("inter_Gbps") / 8 * 1e9 * share, cluster.network.latency_s),
        )

    @cached_property
    def profile(self) -> ModelProfile:
        """The model."""
        number, is_llama = self._number, self.row["gated"] == "1"
        precision: Precision = "fp16" if self.row["precision"] == "fp16" else "bf16"
        shape = TransformerShape(
            layers=number("layers"),
            hidden=number("hidden"),
            heads=number("heads"),
            vocabulary=number("vocab"),
            sequence=number("seq"),
            feed_forward=number("ffn"),
            key_value_heads=number("kv_heads"),
            precision=precision,
            gated=is_llama,
            fused_attention=self.row["flash"] == "1",
            dropout=self.row["framework"] in ("megatron", "megatron-deepspeed"),
            learned_positions=not is_llama,
            tied=not is_llama,
        )
        profile = transformer_profile(self.row["model"], shape)
        return replace(profile, layers=tuple(map(self.stack.compiled, profile.layers)))

    @cached_property
    def plans(self) -> tuple[ParallelPlan, ...]:
        """The plan; several where the source does not say the micro-batch."""
        number = self._number
        recompute: dict[str, Recompute] = {
            "none": "none",
            "full": "full",
            "selective": "selective",
            "selective-op": "selective_op",
        }
        share = number("global_batch") // number("dp")
        stated = (number("micro_batch"),) if number("micro_batch") else _UNSTATED_MICRO_BATCHES
        interleaves = (number("interleave"),) if number("interleave") else self._interleaves()
        return tuple(
            ParallelPlan(
                tensor=number("tp"),
                pipeline=number("pp"),
                data=number("dp"),
                micro_batch=size,
                accumulation=max(1, share // size),
                zero_stage=number("zero"),
                recompute=recompute[self.row["recompute"]],
                overlap=self.row["overlap"] == "1",
                interleave=interleave,
                sequence_parallel=self.row["seq_parallel"] == "1",
            )
            for size in stated
            for interleave in interleaves
            if size <= share
        )

    def _interleaves(self) -> tuple[int, ...]:
        """Parts of a stage that the source may have used."""
        blocks = self._number("layers") // self._number("pp")
        return tuple(parts for parts in (1, 2, 4) if self._number("pp") > 1 and blocks % parts == 0) or (1,)

    def _number(self, key: str) -> int:
        return int(float(self.row[key] or 0))

    def estimate(self, rates: Rates | None = None) -> StepEstimate:
        """Return the planner's step time, of the fastest plan that the source may have meant."""
        rates = rates or rates_of(self.device)
        rates = replace(rates, attention=rates.attention * self.stack.attention_factor)
        estimates = [
            step_time(self.profile, plan, self.cluster, self.stack, self._stages(plan), rates) for plan in self.plans
        ]
        return min(estimates, key=lambda estimate: estimate.step_s)

    def memory_estimate(self, process: ProcessMemory = GPU_PROCESS) -> float:
        """Return the planner's bytes of the fullest rank, as the source measures them.

        bigscience reads nvidia-smi. torchtitan prints what PyTorch's allocator has reserved, without CUDA's context.
        """
        plan = self.plans[0]
        stages = self._stages(plan)
        estimates = [
            memory(self.profile, plan, self.stack, stages, position, process=process)
            for position in (0, len(stages) - 1)
        ]
        return max(found.total - (found.context if self.source == "torchtitan" else 0.0) for found in estimates)

    def _stages(self, plan: ParallelPlan) -> tuple[Stage, ...]:
        """Return the layers of each stage: as many blocks in each, and the embedding and the output beside them.

        Later runs of bigscience count the embedding and the output as layers.
        """
        layers = self.profile.layers
        if "embeddings cut as layers" in self.row["assumed"]:
            bounds = np.linspace(0, len(layers), plan.pipeline + 1).astype(int)
        else:
            bounds = np.linspace(0, len(layers) - 2, plan.pipeline + 1).round().astype(int) + 1
            bounds[[0, -1]] = 0, len(layers)
        return tuple(layers[start:end] for start, end in pairwise(bounds))


def published_runs(table: Path = TABLE) -> list[PublishedRun]:
    """Return all rows of a table."""
    with table.open(encoding="utf-8") as file:
        return [PublishedRun(row) for row in csv.DictReader(file)]


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions, signed: above 0 too slow, or too much."""

    by_source: dict[str, list[float]]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, float, float]]) -> "Errors":
        """Return the errors of (source, predicted, measured)."""
        found: dict[str, list[float]] = {}
        for source, predicted, measured in pairs:
            found.setdefault(source, []).append(predicted / measured - 1)
        return cls(found)

    @property
    def all(self) -> list[float]:
        """Absolute errors of all rows."""
        return [abs(error) for errors in self.by_source.values() for error in errors]

    def median_of(self, source: str) -> float:
        """Return the median absolute error of a source."""
        return median(map(abs, self.by_source[source]))

    @property
    def mean_of_medians(self) -> float:
        """The mean over sources of the median error."""
        return mean(map(self.median_of, self.by_source))

    def percentile(self, percent: float) -> float:
        """Return a percentile of the absolute errors of all rows."""
        return float(np.percentile(self.all, percent))
