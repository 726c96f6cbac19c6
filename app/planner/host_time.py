"""Seconds of a step beside its passes and collectives: offload's copies, and the update."""

from app.planner.cluster import Cluster
from app.planner.plan import ParallelPlan
from app.planner.profile import ModelProfile
from app.planner.rates import Rates
from app.planner.stages import Stage, held_parameters


def parameters_s(profile: ModelProfile, plan: ParallelPlan, cluster: Cluster, stage: Stage) -> float:
    """Return the seconds in which a rank copies its part of offloaded parameters to the device, twice a micro-batch.

    Rajbhandari 2021, arXiv:2104.07857, section 5: each rank copies its own part, then the parts are gathered. On NVMe,
    the part is read before each copy and written once a step. All ranks of a node share its disk. Not validated.
    """
    if plan.offload_param == "none":
        return 0.0
    part = held_parameters(stage, plan.tensor) * profile.element_bytes / plan.data
    copied_s = 2 * plan.accumulation * part / cluster.host_link.bandwidth
    if plan.offload_param == "cpu":
        return copied_s
    moved = (2 * plan.accumulation + 1) * part * cluster.devices_per_node
    return copied_s + moved / cluster.disk_bandwidth


def optimizer_s(plan: ParallelPlan, cluster: Cluster, elements: float, rates: Rates) -> float:
    """Return the seconds of the update: memory bounds it, about 34 bytes of reads and writes for each parameter.

    With offload the gradients of each micro-batch go to the node's memory and the parameters back, in 16 bits. The
    processor updates 34 bytes a parameter, too, at its memory's bandwidth (Ren 2021, arXiv:2101.06840). NVMe reads and
    writes all states of 12 bytes meanwhile (Rajbhandari 2021, arXiv:2104.07857). Not validated.
    """
    part = elements / (plan.data if plan.zero_stage else 1)
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
