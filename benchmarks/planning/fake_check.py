"""The planner's traffic and states beside those of a fake world of ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from app.config import PlanConfig
from app.models.factory import build_model
from app.models.staged import Layer, Tied, cuts_of, layers_of
from app.models.traits import traits_of
from app.planner.memory import memory
from app.planner.plan import ParallelPlan, parallel_plan
from app.planner.profile import PRECISION_BYTES, LayerProfile, ModelProfile, SavedActivations, Work
from app.planner.stages import stages_of
from app.planner.traffic import RAYLOOM, traffic
from benchmarks.planning.fake_world import Counted, FakeRank, count_all

_PLANS: tuple[tuple[PlanConfig, tuple[int, ...]], ...] = (
    *((PlanConfig(zero_stage=stage), (8, 64, 1024)) for stage in (0, 1, 2, 3)),
    (PlanConfig(zero_stage=1, activation_checkpointing=True), (8,)),
    (PlanConfig(tensor=2), (8, 1024)),
    (PlanConfig(tensor=8, zero_stage=0), (64,)),
    (PlanConfig(tensor=4, activation_checkpointing=True), (64,)),
    (PlanConfig(pipeline=4), (8, 1024)),
    (PlanConfig(pipeline=2, activation_checkpointing=True), (64,)),
    (PlanConfig(tensor=8, pipeline=4), (64, 1024)),
)
"""Plans of every kind, and the worlds that each is counted in."""


def cases() -> Iterable[FakeRank]:
    """Yield the ranks to count: of a pipeline the first, one in the middle and the last; else the first."""
    for plan, worlds in _PLANS:
        for workers in worlds:
            per_stage = workers // plan.pipeline
            for stage in sorted({0, plan.pipeline // 2, plan.pipeline - 1}):
                for precision in ("bf16", "fp32"):
                    yield FakeRank(plan, workers, accumulation=4, rank=stage * per_stage, precision=precision)


@dataclass(frozen=True)
class Check:
    """One rank, counted and predicted."""

    counted: Counted

    @property
    def counted_bytes(self) -> dict[tuple[str, str], int]:
        """Bytes of collectives by kind and group."""
        return {(found.kind, found.group): found.nbytes for found in self.counted.traffic}

    @property
    def predicted_bytes(self) -> dict[tuple[str, str], float]:
        """The planner's."""
        profile, plan, position = self._planned
        stage = stages_of(profile, plan.pipeline, is_balanced_by_parameters=True)[position]
        found: dict[tuple[str, str], float] = {}
        for collective in traffic(profile, plan, RAYLOOM, stage, position):
            if collective.bytes:
                key = collective.kind, collective.group
                found[key] = found.get(key, 0.0) + collective.bytes
        return found

    @property
    def predicted_states(self) -> float:
        """Bytes of parameters, gradients and optimizer."""
        profile, plan, position = self._planned
        stages = stages_of(profile, plan.pipeline, is_balanced_by_parameters=True)
        return memory(profile, plan, RAYLOOM, stages, position).states

    @property
    def states_error(self) -> float:
        """(predicted - counted) / counted."""
        return self.predicted_states / self.counted.states.total - 1

    @property
    def _planned(self) -> tuple[ModelProfile, ParallelPlan, int]:
        case = self.counted.case
        plan = parallel_plan(case.plan, case.layout)
        return declared_profile(case), plan, case.rank // (plan.tensor * plan.data)


def check_all(ranks: Iterable[FakeRank]) -> list[Check]:
    """Count every rank in a world of its own."""
    return [Check(counted) for counted in count_all(ranks)]


def declared_profile(case: FakeRank) -> ModelProfile:
    """Return the profile of the case's model as far as traffic and states need it, from what the model declares."""
    model = build_model(case.model, case.facts)
    cuts, names = cuts_of(model), {id(module): name for name, module in model.named_modules()}
    boundary = case.length * case.model.args["width"] * PRECISION_BYTES[case.precision]
    layers = [_layer(layer, cuts, names, boundary) for layer in layers_of(model)]
    return ModelProfile(str(case), case.precision, tuple(layers), traits_of(model))


def _layer(layer: Layer, cuts: Any, names: dict[int, str], boundary: float) -> LayerProfile:
    module = layer.module if isinstance(layer, Tied) else layer
    by_parent = [
        [cuts[names[id(child)]] for child in parent.children() if names.get(id(child)) in cuts]
        for parent in module.modules()
    ]
    split = [child for child in module.modules() if isinstance(child, nn.Linear) and names[id(child)] in cuts]
    return LayerProfile(
        name=type(module).__name__,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        split_parameters=sum(linear.weight.numel() for linear in split),
        whole_work=Work(),
        split_work=Work(),
        saved=SavedActivations(),
        boundary_bytes=boundary,
        column_cuts=sum(found.count("colwise") for found in by_parent),
        column_inputs=sum("colwise" in found for found in by_parent),
        row_cuts=sum(found.count("rowwise") for found in by_parent),
        tied="embedding" if isinstance(layer, Tied) else None,
        tensor_sizes=tuple(parameter.numel() for parameter in module.parameters()),
    )
