"""Batch norm on several workers (Ioffe and Szegedy 2015, arXiv:1502.03167): statistics over all micro-batches."""

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional

from app.errors import TrainingError
from app.torch_internals import BatchNorm, keep_uncompiled


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether any layer of ``model`` normalises by batch statistics."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


def has_mixed_batch_norm(model: nn.Module) -> bool:
    """Return whether any batch norm has both weights and running statistics.

    The statistics stay in float32. On CPUs torch then rejects weights of a lower precision.
    """
    norms = (module for module in model.modules() if isinstance(module, BatchNorm))
    return any(norm.affine and norm.track_running_stats for norm in norms)


def synchronize_batch_norm(model: nn.Module) -> nn.Module:
    """Return ``model`` with batch norm over the micro-batches of all workers. Its parameters are the same tensors."""
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    for module in converted.modules():
        # Only the class changes, so parameters and buffers stay the same tensors.
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = SyncBatchNorm
    return converted


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's layer on GPUs. On CPUs, which torch's layer rejects, the same with differentiable all-reduces."""

    @keep_uncompiled
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise each channel of ``input``, of shape (batch, channels, …)."""
        if input.device.type != "cpu":
            return super().forward(input)
        if not self.training:
            return self._normalise_with_running_statistics(input)

        values = input.float()
        reduced_dims = [dim for dim in range(values.ndim) if dim != 1]
        shape = [1, -1] + [1] * (values.ndim - 2)
        # The count is summed, too, because micro-batches of the workers may differ in size.
        count = torch.full((1,), float(values.numel() // values.shape[1]))
        sums = _sum_over_workers(torch.cat([values.sum(reduced_dims), count]))
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        if total < 2:
            raise TrainingError(
                f"a batch norm got one value of each of its {values.shape[1]} channels, from all workers together, and "
                "one value has no variance: give micro-batches of two samples or more with train.global_batch_size or "
                "train.plan.micro_batch"
            ).of("batch_norm.one_value")

        # A second all-reduce, of squared deviations: the mean of squares less the squared mean would cancel in float32.
        deviations = values - mean.view(shape)
        variance = _sum_over_workers(deviations.square().sum(reduced_dims)) / total
        # torch normalises by the biased variance, and tracks the unbiased one.
        self._track(mean, variance * total / (total - 1))
        normal = deviations * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.float().view(shape) + self.bias.float().view(shape)
        return normal.to(input.dtype)

    def _normalise_with_running_statistics(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise in float32. On CPUs torch refuses float32 statistics, as DeepSpeed keeps them, with bf16 weights.

        Without running statistics, use those of the batch.
        """
        weight, bias = (self.weight.float(), self.bias.float()) if self.affine else (None, None)
        uses_batch = self.running_mean is None
        normal = functional.batch_norm(
            input.float(), self.running_mean, self.running_var, weight, bias, uses_batch, eps=self.eps
        )
        return normal.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics as torch does: with ``momentum``, or as the mean of all batches."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


def _sum_over_workers(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over all workers; its gradient is summed likewise."""
    total: Tensor = all_reduce(values)  # type: ignore[no-untyped-call]
    return total
