"""The contrastive loss: an anchor's own positive among the positives of the whole batch, of all ranks.

InfoNCE (van den Oord et al. 2018, arXiv:1807.03748) with negatives in the batch (Henderson et al. 2017,
arXiv:1705.00652).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from app.data.prepared import IGNORED
from app.models.factory import logits_of


@dataclass(frozen=True)
class Contrastive:
    """Cross-entropy of the cosines between an anchor and all positives, divided by the temperature.

    In training, the positives are those of a micro-batch on all ranks. So the loss of a step does not depend on the
    number of ranks, as long as ``train.plan.micro_batch`` times the ranks is the same. In a validation they are those
    of the whole split, however it is shared out: its sums hold the vectors.
    """

    temperature: float
    num_rows: int
    """Texts of the validation split."""
    dimensions: int

    @property
    def num_sums(self) -> int:
        return 1 + self.num_rows * self.dimensions

    def mean(self, output: object, targets: Tensor, taught: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return the mean loss of this rank's anchors, float32 of shape (). Collective.

        Args:
            output: vectors of the anchors, then of their positives, of shape (2 x pairs, dimensions).
            targets: numbers of the anchor and the positive of each pair, int64 of shape (pairs, 2).
        """
        counted = targets[:, 0] != IGNORED
        vectors = functional.normalize(logits_of(output).float(), dim=-1)
        anchors, positives = (side[counted] for side in vectors.chunk(2))
        sizes = _sizes_of_ranks(len(anchors), anchors.device)
        numbers = _gather(targets[counted], sizes)
        logits = anchors @ _gather(positives, sizes).T / self.temperature
        first = sum(sizes[: distributed.get_rank()]) if len(sizes) > 1 else 0
        own = first + torch.arange(len(anchors), device=anchors.device)
        # Another pair with the same anchor or positive is no negative.
        same = (targets[counted][:, None] == numbers[None]).any(-1)
        same[torch.arange(len(own)), own] = False
        losses = functional.cross_entropy(logits.masked_fill(same, -torch.inf), own, reduction="sum")
        return losses / max(1, len(anchors))

    def sums(self, output: object, targets: Tensor) -> Tensor:
        """Return ``stack_vectors`` of these rows of the validation split."""
        counted = targets[:, 0] != IGNORED
        return stack_vectors(logits_of(output)[counted], targets[counted, 0], self.num_rows)

    def value(self, sums: Tensor) -> float:
        """Return the mean loss of all anchors of the split."""
        logits = cosines(sums) / self.temperature
        return float(functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device)))


def stack_vectors(vectors: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Return the number of vectors, then all rows with these vectors at their places and zeros elsewhere, float64.

    Such stacks of disjoint rows add up to that of all rows.
    """
    whole = vectors.new_zeros((num_rows, vectors.shape[1]), dtype=torch.float64)
    whole[places] = vectors.double()
    return torch.cat([whole.new_tensor([len(vectors)]), whole.flatten()])


def cosines(stacked: Tensor) -> Tensor:
    """Return the cosine of each anchor with each positive, of shape (anchors, positives), from stacked vectors."""
    vectors = functional.normalize(stacked[1:].reshape(int(stacked[0]), -1), dim=-1)
    return vectors[0::2] @ vectors[1::2].T


def _sizes_of_ranks(size: int, device: torch.device) -> list[int]:
    """Return the number of pairs of each rank. Collective."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [size]
    sizes = torch.zeros(distributed.get_world_size(), dtype=torch.int64, device=device)
    sizes[distributed.get_rank()] = size
    distributed.all_reduce(sizes)
    return [int(number) for number in sizes.tolist()]


def _gather(rows: Tensor, sizes: list[int]) -> Tensor:
    gathered: Tensor = _Gather.apply(rows, sizes)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """The rows of all ranks in their order. Gradients go back to the rank that a row came from. Collective."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        if len(sizes) == 1:
            return rows.clone()
        padded = functional.pad(rows, (0, 0, 0, max(sizes) - len(rows)))  # ranks may differ by a row
        parts = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        if len(ctx.sizes) == 1:
            return gradient, None
        # Each rank's loss depends on all rows.
        whole = gradient.contiguous()
        distributed.all_reduce(whole)
        return torch.split(whole, ctx.sizes)[distributed.get_rank()], None
