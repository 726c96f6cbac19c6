"""The layout of a parallel plan: the numbers that follow from it and from the number of workers."""

from dataclasses import dataclass

from app.config.plan import PlanConfig
from app.errors import RecipeError

MAX_MICRO_BATCH, MAX_MICRO_TOKENS = 64, 16384
"""Maximum samples or tokens in a micro-batch if the plan does not set ``micro_batch``."""


@dataclass(frozen=True)
class Layout:
    """A parallel plan on a number of workers.

    Ranks are numbered with the tensor degree innermost, then data, then the pipeline, so that workers that communicate
    most are neighbours: rank = (stage x data + data rank) x tensor + tensor rank.
    """

    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    """Samples in a micro-batch of a data-parallel rank; one fewer in some micro-batches if the share is uneven.

    Where the batch is sized in tokens, this and ``share`` are tokens, and some micro-batches have a few more.
    """
    gradient_accumulation: int
    """Micro-batches of a data-parallel rank in an optimizer step."""
    share: int
    """Samples of a data-parallel rank in an optimizer step."""

    @property
    def model_parallel(self) -> int:
        """Workers that hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def workers(self) -> int:
        """All processes of the run."""
        return self.model_parallel * self.data

    def tensor_rank(self, rank: int) -> int:
        """Return which part of each split matrix a worker holds."""
        return rank % self.tensor

    def data_rank(self, rank: int) -> int:
        """Return which share of a batch a worker computes."""
        return rank // self.tensor % self.data


def lay_out(plan: PlanConfig, global_batch_size: int, workers: int, in_tokens: bool = False) -> Layout:
    """Return the layout of ``plan`` on ``workers`` processes.

    ``global_batch_size`` is in samples, or in tokens, which any number of workers can share out.

    Raises:
        RecipeError: the global batch cannot be divided evenly, or a share is not a multiple of the micro-batch.
    """
    data = workers // plan.model_parallel
    if in_tokens:
        share = -(-global_batch_size // data)
        count = -(-share // (plan.micro_batch or MAX_MICRO_TOKENS))
        return Layout(plan.tensor, plan.pipeline, data, -(-share // count), count, share)
    if global_batch_size % data:
        raise RecipeError(
            f"global_batch_size {global_batch_size} cannot be divided evenly over {data} data-parallel ranks: "
            f"choose a multiple of {data}, such as {-(-global_batch_size // data) * data}"
        ).of("batch.uneven")
    share = global_batch_size // data
    micro_batch = plan.micro_batch or _largest_micro_batch(share, is_uneven_allowed=plan.model_parallel == 1)
    if plan.micro_batch and share % plan.micro_batch:
        divisors = [size for size in range(1, share + 1) if share % size == 0]
        nearest = min(divisors, key=lambda size: abs(size - micro_batch))
        raise RecipeError(
            f"global_batch_size {global_batch_size} over {data} data-parallel ranks is {share} samples each, not "
            f"divisible by plan.micro_batch {micro_batch} "
            "(global_batch_size = micro_batch x gradient accumulation x data-parallel ranks); "
            f"the nearest plan that can run has micro_batch: {nearest}"
        ).of("batch.uneven")
    return Layout(plan.tensor, plan.pipeline, data, micro_batch, -(-share // micro_batch), share)


def _largest_micro_batch(share: int, is_uneven_allowed: bool) -> int:
    """Return the largest micro-batch when a share is split into the fewest micro-batches of at most 64 samples.

    In a model-parallel plan all micro-batches have the same size, so their number also divides the share.
    """
    count = -(-share // MAX_MICRO_BATCH)
    while share % count and not is_uneven_allowed:
        count += 1
    return -(-share // count)
