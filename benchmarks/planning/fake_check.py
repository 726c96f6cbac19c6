"""The planner's traffic and states beside those of a fake world of ranks."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from app.config import PlanConfig
from app.models.factory import build_model
from app.planner.measure import measure
from app.planner.memory import memory
from app.planner.plan import ParallelPlan, parallel_plan
from app.planner.profile import ModelProfile
from app.planner.stack import RAYLOOM
from app.planner.stages import Stage, stages_of
from app.planner.traffic import traffic
from benchmarks.markdown import table, verdict
from benchmarks.planning.fake_world import Counted, FakeRank, count_all

_MAX_STATES_ERROR = 0.01
_REMARKS = """\
Each row is one rank, run in one process with PyTorch's `fake` backend. It uses Rayloom's own engine and a GPT with
230,528 parameters. Bytes are equal apart from the padding that DeepSpeed adds for data-parallel ranks. Norms, losses
and shapes are left out; they are at most 1 KB per step. ZeRO 3 ran on rank 0 only. Its buffer of gathered parameters
was switched off, because a small model fits in it completely. In fp32, ZeRO 2 keeps the whole gradient of each
parameter that a rank holds a part of, so at least that of the largest parameter. ZeRO 3 pads each parameter to a
multiple of the number of ranks."""
Key = tuple[str, str]
"""Kind and group of collectives."""
_PARAMETER_GROUPS = 2
"""Groups of a small model's optimizer: matrices and vectors (``app/training/engine/optimizer.py``)."""

_ACCUMULATION = 4
_PLANS: tuple[tuple[PlanConfig, tuple[int, ...]], ...] = (
    *((PlanConfig(zero_stage=stage), (8, 64, 1024)) for stage in (0, 1, 2, 3)),
    (PlanConfig(tensor=2), (8, 1024)),
    (PlanConfig(tensor=8), (64,)),
    (PlanConfig(tensor=4, activation_checkpointing=True), (64,)),
    (PlanConfig(pipeline=4), (8, 1024)),
    (PlanConfig(pipeline=2, activation_checkpointing=True), (64,)),
    (PlanConfig(tensor=8, pipeline=4), (64, 1024)),
)
"""Plans of every kind, and the worlds that each is counted in."""
_QUICK = (
    FakeRank(PlanConfig(zero_stage=2), 8, _ACCUMULATION),
    FakeRank(PlanConfig(zero_stage=3), 8, _ACCUMULATION),
    FakeRank(PlanConfig(tensor=2, activation_checkpointing=True), 8, _ACCUMULATION),
    FakeRank(PlanConfig(tensor=4, pipeline=4), 64, _ACCUMULATION, rank=32),
)


def all_ranks() -> Iterator[FakeRank]:
    """Yield the ranks to count: of a pipeline the first, one in the middle and the last; else the first."""
    for plan, worlds in _PLANS:
        for workers in worlds:
            for stage in sorted({0, plan.pipeline // 2, plan.pipeline - 1}):
                rank = stage * (workers // plan.pipeline)
                yield from (FakeRank(plan, workers, _ACCUMULATION, rank, precision=name) for name in ("bf16", "fp32"))


@dataclass(frozen=True)
class Check:
    """One rank, counted and predicted."""

    counted: Counted

    @property
    def counted_bytes(self) -> dict[Key, float]:
        """Bytes of collectives, by kind and group."""
        return {(found.kind, found.group): found.nbytes for found in self.counted.traffic}

    @property
    def predicted_bytes(self) -> dict[Key, float]:
        """The planner's."""
        profile, plan, stages, position = self._planned
        found: dict[Key, float] = {}
        for collective in traffic(profile, plan, RAYLOOM, stages[position], position):
            key = collective.kind, collective.group
            found[key] = found.get(key, 0.0) + collective.bytes
        return {key: nbytes for key, nbytes in found.items() if nbytes}

    @property
    def has_equal_bytes(self) -> bool:
        """Whether the bytes are equal, apart from the padding that DeepSpeed adds for data-parallel ranks."""
        counted, predicted = self.counted_bytes, self.predicted_bytes
        return counted.keys() == predicted.keys() and all(
            0 <= counted[key] - predicted[key] <= (self._most_padding(key) if key[1] == "data" else 0)
            for key in counted
        )

    def _most_padding(self, key: Key) -> float:
        """Return the bytes of padding that a step can have.

        A group of parameters is padded to a multiple of twice the ranks (``nccl_start_alignment_factor``), and under
        ZeRO 3 each parameter to a multiple of the ranks.
        """
        profile, plan, stages, position = self._planned
        if plan.zero_stage == 0:
            return 0
        repeats = plan.accumulation * (2 if key[0] == "all_gather" else 1) if plan.zero_stage == 3 else 1
        tensors = sum(len(layer.tensor_sizes) for layer in stages[position])
        units = tensors if plan.zero_stage == 3 else 2 * _PARAMETER_GROUPS
        return units * plan.data * profile.element_bytes * repeats

    @property
    def states_error(self) -> float:
        """(predicted - counted) / counted, of the bytes of parameters, gradients and optimizer."""
        profile, plan, stages, position = self._planned
        return memory(profile, plan, RAYLOOM, stages, position).states / self.counted.states.total - 1

    @cached_property
    def _planned(self) -> tuple[ModelProfile, ParallelPlan, tuple[Stage, ...], int]:
        case = self.counted.case
        tokens = torch.zeros(1, case.length, dtype=torch.int64)
        profile = measure(build_model(case.model, case.facts), {"input_ids": tokens}, case.precision)
        plan = parallel_plan(case.plan, case.layout)
        stages = stages_of(profile, plan.pipeline)
        return profile, plan, stages, case.rank // (plan.tensor * plan.data)


def fake_world_section() -> str:
    """Count every rank, and return the section of the results page."""
    checks = [Check(counted) for counted in count_all(all_ranks())]
    equal = sum(check.has_equal_bytes for check in checks)
    close = sum(abs(check.states_error) <= _MAX_STATES_ERROR for check in checks)
    goals = [
        ("bytes of collectives against the fake world", "equal", f"{equal} of {len(checks)} ranks", equal),
        ("states a rank against the fake world", "≤ 1 %", f"{close} of {len(checks)} ranks", close),
    ]
    reached = table(("what", "goal", "reached", ""), [(*row, verdict(n == len(checks))) for *row, n in goals])
    return f"{reached}\n\n{_REMARKS}\n\n{fake_world_table(checks)}"


def fake_world_table(checks: Iterable[Check]) -> str:
    """Return the checks as a table in Markdown."""
    rows = [(str(check.counted.case), _bytes(check), f"{check.states_error:+.2%}") for check in checks]
    return table(("rank", "bytes of collectives in a step", "states, predicted / counted - 1"), rows)


def _bytes(check: Check) -> str:
    if check.has_equal_bytes:
        return f"equal: {sum(check.counted_bytes.values()):,.0f}"
    counted, predicted = check.counted_bytes, check.predicted_bytes
    return "; ".join(
        f"{' '.join(key)} **{predicted.get(key, 0):,.0f} for {counted.get(key, 0):,.0f}**"
        for key in sorted(counted.keys() | predicted.keys())
        if counted.get(key) != predicted.get(key)
    )


def main() -> None:
    """Count the ranks and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning.fake_check", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one rank of each kind of plan")
    arguments = parser.parse_args()
    checks = [Check(counted) for counted in count_all(_QUICK if arguments.quick else all_ranks())]
    print(fake_world_table(checks))
    if not all(check.has_equal_bytes for check in checks):
        sys.exit(1)


if __name__ == "__main__":
    main()
