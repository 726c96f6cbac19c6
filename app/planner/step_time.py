"""Seconds of an optimizer step: computation by class of operation, collectives, the pipeline's bubble."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from app.planner.cluster import Cluster
from app.planner.host_time import optimizer_s, parameters_s
from app.planner.plan import ParallelPlan
from app.planner.profile import ModelProfile, Work
from app.planner.rates import Rates
from app.planner.stack import Collective, Group, Stack
from app.planner.stages import Stage, held_parameters
from app.planner.traffic import traffic

_PASSES = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
}
"""Times that a ring carries the tensor, less one part (Thakur 2005, "Optimization of collective communication")."""


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step, and where they go. The parts add up to ``step_s``."""

    compute_s: float
    """Forward, backward and recomputation of the busiest stage."""
    tensor_s: float
    """Sums of split matrices, which nothing hides."""
    pipeline_s: float
    """Sends between stages."""
    data_s: float
    """Reduction of gradients and gathering of parameters, as far as computation does not hide it."""
    bubble_s: float
    """Stages that wait for others."""
    optimizer_s: float
    """The update, with what offload moves for it."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.communication_s + self.bubble_s + self.optimizer_s

    @property
    def communication_s(self) -> float:
        """Communication that nothing hides."""
        return self.tensor_s + self.pipeline_s + self.data_s

    @property
    def communication(self) -> float:
        """The share of the step that communication takes."""
        return self.communication_s / self.step_s

    @property
    def bubble(self) -> float:
        """The share of the step in which a stage waits."""
        return self.bubble_s / self.step_s


@dataclass(frozen=True)
class _StageTime:
    """Seconds of one micro-batch through a stage."""

    forward_s: float
    backward_s: float
    tensor_s: float
    send_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.tensor_s + self.send_s


def step_time(
    profile: ModelProfile, plan: ParallelPlan, cluster: Cluster, stack: Stack, stages: tuple[Stage, ...], rates: Rates
) -> StepEstimate:
    """Return the time of a step.

    Under 1F1B the step takes a pass through all stages, and the busiest stage's time for each further micro-batch;
    interleaving divides what is waited by the parts of a stage (Narayanan 2021, arXiv:2104.04473, section 2.2).
    """
    times: dict[object, tuple[_StageTime, float]] = {}
    keys = [_stage_key(stage, number, plan) for number, stage in enumerate(stages)]
    # Stages that are alike are timed once: a long pipeline has many.
    for number, (stage, key) in enumerate(zip(stages, keys, strict=True)):
        if key not in times:
            sent = traffic(profile, plan, stack, stage, number)
            time = _stage_time(profile, plan, cluster, stack, stage, sent, rates)
            copied_s = parameters_s(profile, plan, cluster, stage)
            times[key] = time, _data_s(plan, cluster, stack, sent, time, rates, copied_s)

    busiest = max(range(len(stages)), key=lambda number: times[keys[number]][0].total_s)
    worst, micro_batches = times[keys[busiest]][0], plan.accumulation
    # The busiest stage sets the pace. The others add their time once, while the pipeline fills and drains.
    through = sum(times[key][0].total_s for key in keys) - worst.total_s
    data_s = max(reduced_s for _, reduced_s in times.values())
    return StepEstimate(
        compute_s=(worst.forward_s + worst.backward_s) * micro_batches,
        tensor_s=worst.tensor_s * micro_batches,
        pipeline_s=worst.send_s * micro_batches,
        data_s=data_s,
        bubble_s=through / plan.interleave,
        optimizer_s=optimizer_s(plan, cluster, held_parameters(stages[busiest], plan.tensor), rates),
    )


def _stage_key(stage: Stage, number: int, plan: ParallelPlan) -> object:
    """Return a key that stages of the same layers share. The first and the last send less."""
    # Profiles of layers that are alike are one object, so their ids are enough.
    return tuple(map(id, stage)), number == 0, number == plan.pipeline - 1


def _stage_time(
    profile: ModelProfile,
    plan: ParallelPlan,
    cluster: Cluster,
    stack: Stack,
    stage: Stage,
    collectives: Iterable[Collective],
    rates: Rates,
) -> _StageTime:
    """Return the time of a micro-batch: the backward pass takes twice the work, and what is computed again."""
    work = sum((_rank_work(layer.whole_work, layer.split_work, plan) for layer in stage), Work())
    elements = held_parameters(stage, plan.tensor)
    weights = elements * profile.element_bytes
    # A gradient is read, and the sum that it is added to is read and written.
    added = elements * (profile.element_bytes + 2 * stack.accumulated_bytes(profile.precision))
    added += elements * (_QUANTIZED_WEIGHTS * plan.quantized_weights + _QUANTIZED_GRADIENTS * plan.quantized_gradients)

    forward = compute_s(work * plan.micro_batch, weights, profile, plan, cluster, rates)
    again = _recomputed(_recomputable(stage, plan), plan)
    backward = compute_s((work * 2 + again) * plan.micro_batch, 3 * weights + added, profile, plan, cluster, rates)
    launch_s = cluster.device.launch_s * rates.launches * stack.kernel_factor
    host_forward_s, host_backward_s = work.kernels * launch_s, (2 * work.kernels + again.kernels) * launch_s

    spent = dict.fromkeys(("tensor", "pipeline"), 0.0)
    for collective in collectives:
        if collective.group in spent:
            spent[collective.group] += collective_s(collective, plan, cluster, rates) / plan.accumulation
    exposed = 1 - rates.overlap if stack.hides_model_parallel else 1.0
    tensor_s, send_s = spent["tensor"] * exposed, spent["pipeline"] * exposed

    host_s = host_forward_s + host_backward_s + stack.framework_s(plan, stage)
    device_s = forward + backward + tensor_s
    # Python launches kernels ahead of a GPU: the slower of both sets the pace. A processor does one after the other.
    alternates = cluster.device.kind == "cpu" or stack.waits_for_kernels
    slack_s = host_s if alternates else max(0.0, host_s - device_s)
    # The backward pass launches about twice as much as the forward pass.
    return _StageTime(forward + slack_s / 3, backward + 2 * slack_s / 3, tensor_s, send_s)


_QUANTIZED_WEIGHTS, _QUANTIZED_GRADIENTS = 2 * (1 + 2), 2 + 3 * 0.5 + 2
"""Bytes of memory that quantization reads and writes for each parameter and micro-batch, in 16 bits. Both gathers of
weights are unpacked. Gradients are packed, added up within a node, packed again and unpacked."""


def _recomputable(stage: Stage, plan: ParallelPlan) -> Work:
    """Return the work of the layers that recomputation covers: those whose output another layer takes."""
    layers = (layer for layer in stage if layer.boundary_bytes)
    return sum((_rank_work(layer.whole_work, layer.split_work, plan) for layer in layers), Work())


def _rank_work(whole: Work, split: Work, plan: ParallelPlan) -> Work:
    """Return one rank's part of a layer. Launches are not fewer for smaller matrices."""
    mine = split * (1 / plan.tensor)
    whole = whole * (1 / plan.tensor) if plan.sequence_parallel else whole
    return whole + mine + Work(kernels=split.kernels - mine.kernels)


def _recomputed(work: Work, plan: ParallelPlan) -> Work:
    """Return the work that the backward pass repeats (Korthikanti 2022, arXiv:2205.05198, section 5)."""
    match plan.recompute:
        case "full":
            return work
        case "selective":
            return Work(attention_flops=work.attention_flops, attention_bytes=work.attention_bytes, kernels=4)
        case "selective_op":
            half = Work(work.matmul_flops / 2, work.matmul_bytes / 2, moved_bytes=work.moved_bytes)
            return half + Work(kernels=work.kernels / 2)
        case _:
            return Work()


def compute_s(
    work: Work, weight_bytes: float, profile: ModelProfile, plan: ParallelPlan, cluster: Cluster, rates: Rates
) -> float:
    """Return the seconds that the device computes: each class at its own rate, one after the other.

    A product that is compute-bound still fills and drains its pipeline: its bytes count beside its operations, which
    makes narrow matrices slower (the roofline model, Williams 2009, with its two terms added).
    """
    device = cluster.device
    peak, bandwidth = device.flops(profile.precision), device.memory_bandwidth * rates.memory
    fit = alignment(profile, plan.tensor) * occupancy(profile, plan, device.units)
    matmul = work.matmul_flops / (peak * rates.matmul * fit)
    moved = (work.matmul_bytes + work.moved_bytes + work.attention_bytes + weight_bytes) / bandwidth
    share = (rates.scores if work.attention_bytes else rates.attention) * head_alignment(profile)
    return matmul + moved + work.attention_flops / (peak * share)


_ALIGNMENTS = ((64, 1.0), (32, 0.97), (16, 0.92), (8, 0.8), (4, 0.5), (1, 0.35))
"""Share of a tensor core's rate by what divides a matrix's sides: NVIDIA, Matrix Multiplication Background User's
Guide, section "Requirements to Use Tensor Cores": multiples of 64 elements (128 bytes) on A100, at least of 8."""


def alignment(profile: ModelProfile, tensor: int) -> float:
    """Return the share of the rate that the sides of a split matrix allow."""
    if not profile.hidden:
        return 1.0
    side = math.gcd(profile.hidden // tensor, profile.feed_forward // tensor, profile.hidden)
    return _share_of(side)


_TILE = 128 * 256
"""Elements of an output that one multiprocessor computes at once (CUTLASS's usual tile on Ampere and Hopper)."""


def occupancy(profile: ModelProfile, plan: ParallelPlan, units: int) -> float:
    """Return the share of the multiprocessors that a micro-batch's products keep busy.

    Tiles go to them in waves, and on average half of the last wave idles: NVIDIA, Matrix Multiplication Background
    User's Guide, section "Wave Quantization". Two thirds of the products, forward and of input gradients, have tokens
    as rows. The gradients of weights have the matrix's own sides.
    """
    if not profile.hidden or units == 1:
        return 1.0
    tokens, tensor = plan.micro_batch * profile.sequence, plan.tensor
    width = (profile.hidden + profile.feed_forward / tensor) / 2
    waves = tokens * width / _TILE / units
    weight_waves = max(1.0, profile.hidden * profile.feed_forward / tensor / _TILE / units)
    return 1 / (2 / 3 * (1 + 0.5 / waves) + 1 / 3 * (1 + 0.5 / weight_waves))


def head_alignment(profile: ModelProfile) -> float:
    """Return the share of the rate that the width of a head allows."""
    return _share_of(profile.hidden // profile.heads) if profile.heads else 1.0


def _share_of(side: int) -> float:
    return next(share for divisor, share in _ALIGNMENTS if side % divisor == 0)


def collective_s(collective: Collective, plan: ParallelPlan, cluster: Cluster, rates: Rates) -> float:
    """Return the seconds of collectives: steps x latency + bytes / bandwidth (Hockney 1994; Thakur 2005).

    A ring crosses the network once for each node. The ranks of a group in one node share out what crosses, each
    through its own adapter. All-reduces of little data go through a tree instead of the ring.
    """
    here, nodes = placement(collective.group, plan, cluster)
    node_rate = cluster.node_link.bandwidth * rates.node_link
    network_rate = cluster.network.bandwidth * rates.network
    if collective.kind == "send":
        link, rate = (cluster.network, network_rate) if nodes > 1 else (cluster.node_link, node_rate)
        return collective.count * link.latency_s + collective.bytes / rate
    ranks = collective.ranks
    rate = min((node_rate, *([here * network_rate] if nodes > 1 else [])))
    passes = _PASSES[collective.kind]
    # A ring has one step less than ranks. As many as there are nodes, less one, cross the network.
    ring_s = (nodes - 1) * cluster.network.latency_s + (ranks - nodes) * cluster.node_link.latency_s
    tree_s = math.log2(max(nodes, 1)) * cluster.network.latency_s + (here - 1) * cluster.node_link.latency_s
    latency_s = passes * (min(ring_s, tree_s) if collective.kind == "all_reduce" else ring_s * _RING_STEP)
    return collective.count * latency_s + passes * (ranks - 1) / ranks * collective.bytes / rate


_RING_STEP = 0.3
"""A step of a ring takes less than a message: the next chunk is under way already."""


def placement(group: Group, plan: ParallelPlan, cluster: Cluster) -> tuple[int, int]:
    """Return how many ranks of a group lie in one node, and over how many nodes it goes.

    Ranks count tensor first, then data, then the pipeline (``app.config.Layout``; Megatron-LM does as well).
    """
    per_node = cluster.devices_per_node
    stride, ranks = {
        "tensor": (1, plan.tensor),
        "data": (plan.tensor, plan.data),
        "copy": (1, plan.hpz),
        "pipeline": (plan.tensor * plan.data, plan.pipeline),
        "tied": (plan.tensor * plan.data * (plan.pipeline - 1), 2),
    }[group]
    here = max(1, min(ranks, per_node // max(stride, 1)))
    return here, math.ceil(ranks / here)


def _data_s(
    plan: ParallelPlan,
    cluster: Cluster,
    stack: Stack,
    collectives: Iterable[Collective],
    time: _StageTime,
    rates: Rates,
    copied_s: float,
) -> float:
    """Return what reductions, gathers and copies of offloaded parameters, ``copied_s``, add to a step.

    What overlaps runs beside the passes of its micro-batches. The longer of both remains, and of the shorter what
    does not hide: copies and collectives use the same memory and cores.
    """
    spent_s = copied_s + sum(
        collective_s(collective, plan, cluster, rates)
        for collective in collectives
        if collective.group in ("data", "copy", "tied")
    )
    if not plan.overlap:
        return spent_s
    beside_s = (time.forward_s + time.backward_s) * plan.accumulation
    if plan.zero_stage < 2 or plan.pipeline > 1:
        # Only the last micro-batch's backward pass; Megatron-LM gathers beside the next forward pass, too.
        beside_s = time.backward_s + (time.forward_s if stack.hides_model_parallel else 0.0)
    hidden_s = min(spent_s, beside_s) * rates.overlap
    return spent_s - hidden_s
