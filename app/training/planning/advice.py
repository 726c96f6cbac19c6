"""What would help a training beyond the plans that can run as the recipe stands."""

from dataclasses import replace

from pydantic import BaseModel

from app.planner.cluster import Cluster
from app.planner.enumeration import without_options
from app.planner.profile import ModelProfile
from app.planner.rates import Rates, rates_of
from app.planner.search import Candidate, Findings, Problem, search
from app.planner.stages import held_parameters, stages_of

_SOME_PATH = "/local_nvme"


class Help(BaseModel):
    """A way to train faster, or to train at all. Its prediction is not validated."""

    option: str
    needs: str
    """What to set, or why Rayloom cannot."""
    step_s: float
    memory_bytes: int


def what_would_help(problem: Problem, findings: Findings) -> list[Help]:
    """Return options that are faster than the best plan, or fit where no plan does."""
    limit = findings.best.step_s if findings.candidates else float("inf")
    found = [_nvme(problem) if not findings.candidates else None, _sharding_in_nodes(problem)]
    return [option for option in found if option and option.step_s < limit]


def _nvme(problem: Problem) -> Help | None:
    """Return offload to NVMe, which needs a folder, so that the recipe has to name one."""
    if problem.cluster.device.kind == "cpu" or problem.base.nvme_path:
        return None
    base = problem.base.model_copy(update={"nvme_path": _SOME_PATH})
    plans = search(replace(problem, base=base)).candidates
    best = next((candidate for candidate in plans if candidate.config.offload == "nvme"), None)
    needs = "train.plan.nvme_path, a folder on a fast local disk"
    return _help("optimizer offload to NVMe", needs, best.step_s, best) if best else None


def _sharding_in_nodes(problem: Problem) -> Help | None:
    """Return ZeRO 3 within each node, whose gradients are then added up between nodes.

    MiCS (Zhang 2022, arXiv:2205.00119, sections 3.2 and 3.4). A node trains its share of the batch as if it were alone.
    Then each rank sends its part of the gradients to the same rank of the other nodes.
    """
    cluster, batch = problem.cluster, problem.global_batch
    if cluster.nodes == 1 or batch % cluster.nodes or cluster.devices % cluster.nodes:
        return None

    devices = cluster.devices // cluster.nodes
    setting = replace(problem.setting, workers=(devices, devices))
    one_node = replace(
        problem, cluster=cluster.resized(devices, devices), setting=setting, global_batch=batch // cluster.nodes
    )
    sharded = (
        candidate
        for candidate in search(one_node).candidates
        if candidate.config.zero_stage == 3 and candidate.config == without_options(candidate.config)
    )

    best = next(sharded, None)
    if best is None:
        return None
    step_s = best.step_s + _between_nodes_s(problem.profile, best, cluster, problem.rates or rates_of(cluster.device))
    return _help("ZeRO 3 within nodes (MiCS)", "not in Rayloom", step_s, best)


def _help(option: str, needs: str, step_s: float, plan: Candidate) -> Help:
    return Help(option=option, needs=needs, step_s=step_s, memory_bytes=int(plan.memory.total))


def _between_nodes_s(profile: ModelProfile, candidate: Candidate, cluster: Cluster, rates: Rates) -> float:
    """Return the seconds of the all-reduce of a rank's part of the gradients between nodes, which nothing hides."""
    (stage,) = stages_of(profile, 1)
    part = held_parameters(stage, 1) * profile.element_bytes / candidate.plan.data
    return 2 * (cluster.nodes - 1) / cluster.nodes * part / (cluster.network.bandwidth * rates.network)
