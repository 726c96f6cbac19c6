"""Every plan that a recipe could have on a cluster, and the rules that refuse some."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from app.config.layout import lay_out
from app.config.plan import PlanConfig, ZeroPlusPlusConfig
from app.config.plan_rules import Setting, broken_rule
from app.planner.cluster import Cluster
from app.planner.plan import ParallelPlan, parallel_plan

_NO_OPTION: dict[str, object] = {
    "offload": "none",
    "offload_param": "none",
    "zero_plus_plus": ZeroPlusPlusConfig(),
}
"""Keys of a plan that trade time for memory, or computation for traffic. No published run shows them."""
_MAX_MICRO_BATCH = 64
_MAX_SIZES = 7
"""Micro-batches that are tried for one layout."""


@dataclass
class Refusals:
    """Plans that were refused, by rule."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    """The reason that the first of them was given."""

    def add(self, rule: str, reason: str, count: int = 1) -> None:
        """Count plans that ``rule`` refuses."""
        self.counts[rule] = self.counts.get(rule, 0) + count
        self.examples.setdefault(rule, reason)


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number``, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def enumerate_plans(
    base: PlanConfig, setting: Setting, cluster: Cluster, global_batch: int, refusals: Refusals
) -> Iterator[tuple[PlanConfig, ParallelPlan]]:
    """Yield the plans that the rules let run on all devices. Those that they refuse are counted.

    Args:
        base: keys that are not searched, such as ``communication_data_type``, are taken from it.
    """
    devices = cluster.devices
    for tensor, pipeline in product(divisors(devices), divisors(devices)):
        if tensor * pipeline > devices or devices % (tensor * pipeline):
            continue
        data = devices // (tensor * pipeline)
        if global_batch % data:
            refusals.add("the batch divides", f"global batch {global_batch} does not divide over {data} ranks")
            continue
        sizes = _micro_batches(global_batch // data, pipeline)
        plans: list[PlanConfig] = []
        # Checked here, because the rules of a recipe do not know the nodes.
        if tensor > cluster.devices_per_node:
            reason = f"tensor {tensor} would straddle nodes of {cluster.devices_per_node} devices"
            refusals.add("tensor groups stay in a node", reason, len(sizes))
            continue
        for stage, recomputes in product((0, 1, 2, 3), (False, True)):
            keys = {"tensor": tensor, "pipeline": pipeline, "zero_stage": stage, "activation_checkpointing": recomputes}
            plain = base.model_copy(update=keys)
            plans.extend(plain.model_copy(update=option) for option in _options(plain, cluster))
        for plan in plans:
            # A refused plan counts once for each micro-batch, as those that run do.
            if broken := broken_rule(plan, setting):
                refusals.add(broken.name, broken.reason, len(sizes))
                continue
            yield from _sized(plan, sizes, global_batch, devices)


def _options(plain: PlanConfig, cluster: Cluster) -> Iterator[dict[str, object]]:
    """Yield the keys of each option to try with a plan: none, offload to memory and to NVMe, and ZeRO++.

    A processor's memory is there already. ZeRO++ is for links between nodes. None takes a split model.
    """
    yield _NO_OPTION
    if cluster.device.kind == "cpu" or plain.model_parallel > 1 or not plain.zero_stage:
        return
    moves = ["cpu", *(["nvme"] if plain.nvme_path and plain.zero_stage == 3 else [])]
    for offload, parameters in product(moves, ("none", *moves) if plain.zero_stage == 3 else ("none",)):
        yield _NO_OPTION | {"offload": offload, "offload_param": parameters}
    if plain.zero_stage == 3 and cluster.nodes > 1:
        for is_quantized in (False, True):
            plus = ZeroPlusPlusConfig(
                hpz_partition_size=cluster.devices_per_node,
                quantized_weights=is_quantized,
                quantized_gradients=is_quantized,
            )
            yield _NO_OPTION | {"zero_plus_plus": plus}


def without_options(plan: PlanConfig) -> PlanConfig:
    """Return the same plan without offload and ZeRO++."""
    return plan.model_copy(update=_NO_OPTION)


def _sized(
    plan: PlanConfig, sizes: Iterable[int], global_batch: int, devices: int
) -> Iterator[tuple[PlanConfig, ParallelPlan]]:
    for size in sizes:
        config = plan.model_copy(update={"micro_batch": size})
        yield config, parallel_plan(config, lay_out(config, global_batch, devices))


def _micro_batches(share: int, pipeline: int) -> list[int]:
    """Return sizes of micro-batches to try: divisors of a rank's share, spread evenly. A pipeline tries the small."""
    sizes = [size for size in divisors(share) if size <= _MAX_MICRO_BATCH]
    if len(sizes) <= _MAX_SIZES:
        return sizes
    if pipeline > 1:
        # More and smaller micro-batches leave the stages of a pipeline less idle.
        return sizes[:_MAX_SIZES]
    step = (len(sizes) - 1) / (_MAX_SIZES - 1)
    return sorted({sizes[round(number * step)] for number in range(_MAX_SIZES)})
