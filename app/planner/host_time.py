"""Seconds of a step beside its passes and collectives: the framework's Python, offload's copies, the update."""

from app.planner.cluster import Cluster
from app.planner.plan import ParallelPlan
from app.planner.profile import ModelProfile
from app.planner.rates import Rates
from app.planner.stages import Stage
from app.planner.traffic import Stack, held_parameters

_HOOK_S = {0: 30e-6, 1: 20e-6, 2: 40e-6, 3: 40e-6}
"""Seconds of DeepSpeed's Python for a parameter and micro-batch, by ZeRO stage.

Measured on an EPYC processor by ``python -m benchmarks.planning.hooks``, as the next two.
"""
_GATHER_S = 1.1e-3
"""The same for a parameter that ZeRO 3 gathers, forward and backward."""
_PIPELINE_S = 1.3e-3
"""The same for a stage's instructions of a micro-batch."""
_KEPT = 10**5
"""Elements of parameters that ZeRO 3 never splits (``stage3_param_persistence_threshold``)."""
_TENSORS = 8
"""Parameters of a layer, where they are not known."""


def framework_s(plan: ParallelPlan, stack: Stack, stage: Stage) -> float:
    """Return the seconds that the framework's own Python takes for a micro-batch."""
    if stack.family != "rayloom":
        return 0.0
    sizes = [size for layer in stage for size in layer.tensor_sizes or (layer.parameters // _TENSORS,) * _TENSORS]
    gathered = sum(size > _KEPT for size in sizes) if plan.zero_stage == 3 else 0
    instructions_s = _PIPELINE_S if plan.pipeline > 1 else 0.0
    return len(sizes) * _HOOK_S[plan.zero_stage] + gathered * _GATHER_S + instructions_s


def parameters_s(profile: ModelProfile, plan: ParallelPlan, cluster: Cluster, stage: Stage) -> float:
    """Return the seconds in which a rank copies its part of offloaded parameters to the device, twice a micro-batch.

    Rajbhandari 2021, arXiv:2104.07857, section 5: each rank copies its own part, and the parts are gathered then.
    """
    if plan.offload_param == "none":
        return 0.0
    part = held_parameters(stage, plan.tensor) * profile.element_bytes / plan.data
    return 2 * plan.accumulation * part / cluster.host_link.bandwidth


def optimizer_s(plan: ParallelPlan, cluster: Cluster, stack: Stack, elements: float, rates: Rates) -> float:
    """Return the seconds of the update: memory bounds it, about 34 bytes of reads and writes for each parameter.

    With offload the gradients of each micro-batch go to the node's memory and the parameters back, in 16 bits. The
    processor updates 34 bytes a parameter, too, at its memory's bandwidth (Ren 2021, arXiv:2101.06840). NVMe reads and
    writes all states of 12 bytes meanwhile (Rajbhandari 2021, arXiv:2104.07857). Not validated.
    """
    part = elements / (plan.data if plan.zero_stage or stack.family == "fsdp" else 1)
    if plan.offload == "none":
        return 34 * part / (cluster.device.memory_bandwidth * rates.memory)
    # 2 bytes each: the gradients of every micro-batch, and the parameters once.
    moved_s = 2 * (plan.accumulation + 1) * part / cluster.host_link.bandwidth
    host_bandwidth = (
        200e9 / cluster.devices_per_node if cluster.device.kind == "gpu" else cluster.device.memory_bandwidth
    )
    update_s = 34 * part / host_bandwidth
    # 12 bytes are read, and 12 written.
    disk_s = 24 * part * cluster.devices_per_node / cluster.disk_bandwidth if plan.offload == "nvme" else 0.0
    return moved_s + max(update_s, disk_s)
