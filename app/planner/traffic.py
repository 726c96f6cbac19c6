"""Bytes that a rank's collectives carry in one optimizer step, by kind and group."""

from collections.abc import Iterator

from app.planner.plan import ParallelPlan
from app.planner.profile import ModelProfile
from app.planner.stack import Collective, Stack
from app.planner.stages import Stage


def traffic(
    profile: ModelProfile, plan: ParallelPlan, stack: Stack, stage: Stage, position: int = 0
) -> tuple[Collective, ...]:
    """Return the collectives of a rank in a step.

    Args:
        stage: the layers that the rank holds, whole.
        position: number of the stage, from 0.
    """
    return (
        *_tensor_traffic(plan, stage),
        *_pipeline_traffic(profile, plan, stack, stage, position),
        *(stack.data_traffic(profile, plan, stage) if plan.data > 1 else ()),
        *_tied_traffic(profile, plan, stack, stage, position),
    )


def _tensor_traffic(plan: ParallelPlan, stage: Stage) -> Iterator[Collective]:
    """Yield the sums of split matrices: of outputs forward, of input gradients backward (Shoeybi 2019, section 3).

    Four all-reduces a block and micro-batch, b s h numbers each; with full recomputation the forward ones twice.
    Sequence parallelism turns each into an all-gather and a reduce-scatter, of the same bytes (Korthikanti 2022,
    section 4.2.2).
    """
    if plan.tensor == 1:
        return
    forward_passes = 2 if plan.recompute == "full" else 1
    count, size = 0.0, 0.0
    for layer in stage:
        reductions = layer.row_cuts * forward_passes + layer.column_inputs
        count += reductions
        size += reductions * layer.boundary_bytes * plan.micro_batch
    count, size = count * plan.accumulation, size * plan.accumulation
    if plan.sequence_parallel:
        yield Collective("all_gather", "tensor", plan.tensor, size, count)
        yield Collective("reduce_scatter", "tensor", plan.tensor, size, count)
    elif count:
        yield Collective("all_reduce", "tensor", plan.tensor, size, count)


def _pipeline_traffic(
    profile: ModelProfile, plan: ParallelPlan, stack: Stack, stage: Stage, position: int
) -> Iterator[Collective]:
    """Yield what a stage sends: activations to the next, their gradients to the one before (arXiv:2104.04473)."""
    if plan.pipeline == 1:
        return
    sends_forward = position < plan.pipeline - 1 or plan.interleave > 1
    sends_backward = position > 0 or plan.interleave > 1
    number = plan.accumulation * plan.interleave

    activations = stage[-1].boundary_bytes * plan.micro_batch * number if sends_forward else 0.0
    gradients = profile.layers[0].boundary_bytes * plan.micro_batch * number if sends_backward else 0.0
    parts = plan.tensor
    # Each rank of a tensor group sends its part (Narayanan 2021, section 4.1; DeepSpeed's ``pipe_partitioned``).
    sent = activations / parts + gradients / (parts if stack.splits_gradients or plan.sequence_parallel else 1)
    yield Collective("send", "pipeline", plan.pipeline, sent, number * (sends_forward + sends_backward))
    if parts > 1 and not plan.sequence_parallel:  # the receivers put the parts together
        if position > 0:
            size = profile.layers[0].boundary_bytes * plan.micro_batch * number
            yield Collective("all_gather", "tensor", parts, size, number)
        if stack.splits_gradients and position < plan.pipeline - 1:
            gathers = number * stack.gradient_gathers
            yield Collective(
                "all_gather", "tensor", parts, stage[-1].boundary_bytes * plan.micro_batch * gathers, gathers
            )


def _tied_traffic(
    profile: ModelProfile, plan: ParallelPlan, stack: Stack, stage: Stage, position: int
) -> Iterator[Collective]:
    """Yield the sum of a tied embedding's gradients over the first and the last stage (arXiv:1909.08053)."""
    tied = [layer for layer in stage if layer.tied]
    if plan.pipeline == 1 or not tied or position not in (0, plan.pipeline - 1):
        return
    elements = max(layer.parameters_of(plan.tensor) for layer in tied)
    yield Collective("all_reduce", "tied", 2, elements * stack.gradient_size(profile.precision), 1)
