"""The engine for data parallelism with ZeRO 0 to 3: each rank has the whole model, or DeepSpeed's share of it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from app.config import Layout, TrainConfig
from app.tasks.objective import Objective, Totals
from app.telemetry.step_time import Phase
from app.training.activity import Activity
from app.training.data.feed import MicroBatch
from app.training.engine.deepspeed_engine import Factors, Keys, StepResult, initialize, names_of
from app.training.engine.deepspeed_internals import disable_reduction, keep_norm_when_clipping, master_pairs


@dataclass(frozen=True)
class DataParallelEngine:
    """Runs forward, backward and step of a ``DeepSpeedEngine`` on each micro-batch."""

    deepspeed: Any
    names: Mapping[int, str]
    layout: Layout
    objective: Objective
    powersgd: "PowerSgd | None" = None

    @classmethod
    def create(
        cls, model: nn.Module, config: TrainConfig, layout: Layout, keys: Keys, steps: int, objective: Objective
    ) -> Self:
        """Create the engine around ``model``, with DeepSpeed's ``keys`` for it."""
        powersgd = PowerSgd(config.plan.powersgd.rank) if config.plan.powersgd else None
        wrapped = powersgd.wrap(model) if powersgd else model
        engine = initialize(wrapped, config, keys, steps)
        if config.plan.zero_stage == 0:
            disable_reduction(engine)  # torch reduces, or ``train_step`` does
        keep_norm_when_clipping(engine)
        if config.torch_compile:
            engine.compile()
        engine.train()
        return cls(engine, names_of(model), layout, objective, powersgd)

    def forget_gradients(self) -> None:
        """Drop what earlier gradients left behind, as in a new process."""
        if self.powersgd:
            self.powersgd.forget()

    def train_step(self, batches: Iterator[MicroBatch], activity: Activity) -> StepResult:
        """Do one optimizer step on this rank's micro-batches."""
        # Before the step, which changes the rate and the loss scale.
        factors, losses = Factors.of(self.deepspeed), []
        _start_gradients_in_float32(self.deepspeed)
        for number, batch in enumerate(batches, start=1):
            with self._reduction(is_last=number == self.layout.gradient_accumulation):
                with activity.phase(Phase.FORWARD):
                    output = self.deepspeed(**batch.inputs)
                    weight = loss_weight(batch, self.layout, self.objective)
                    loss = self.objective.mean(output, batch.targets, batch.taught) * weight
                with activity.phase(Phase.BACKWARD):
                    self.deepspeed.backward(loss)
                    self._reduce()
            with activity.phase(Phase.OPTIMIZER):
                # DeepSpeed wants this call for each micro-batch. It steps after the last one.
                self.deepspeed.step()
            # Detached, or the graphs of all micro-batches would stay in memory.
            losses.append(loss.detach())
        return StepResult.of(self.deepspeed, factors, torch.stack(losses).mean())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Totals:
        """Return ``Objective.total`` of this rank's batches."""
        self.deepspeed.eval()
        answered = ((self.deepspeed(**batch.inputs), batch.targets) for batch in batches)
        totals = self.objective.total(answered, self.deepspeed.device)
        self.deepspeed.train()  # not in each step, because it visits all modules
        return totals

    def _reduction(self, is_last: bool) -> AbstractContextManager[None]:
        """Have torch reduce gradients after the last micro-batch only. DeepSpeed does so by itself."""
        return self.deepspeed.module.no_sync() if self._is_reduced_by_torch and not is_last else nullcontext()

    def _reduce(self) -> None:
        """Reduce gradients without ZeRO, after the last micro-batch, in buffers of ``reduce_bucket_size``.

        By default DeepSpeed reduces 5e8 elements at once, which copies all gradients of a smaller model.
        """
        if self.deepspeed.zero_optimization_stage() == 0 and not self._is_reduced_by_torch:
            _fill_gradients(self.deepspeed.module)
            self.deepspeed.allreduce_gradients(bucket_size=self.deepspeed.zero_reduce_bucket_size())

    @property
    def _is_reduced_by_torch(self) -> bool:
        return isinstance(self.deepspeed.module, DistributedDataParallel)


def loss_weight(batch: MicroBatch, layout: Layout, objective: Objective) -> Tensor | float:
    """Return the loss weight for a mean over samples or targets instead of micro-batches; 1 if they are equal."""
    if batch.weight is not None:
        return batch.weight
    share = len(batch.targets) * layout.gradient_accumulation / layout.share
    return share * objective.counted_share(batch.targets)


def _start_gradients_in_float32(engine: Any) -> None:
    """Have torch accumulate the gradients of a step in float32, where DeepSpeed keeps master weights without ZeRO.

    DeepSpeed would accumulate them in the parameters' own bf16 or fp16, and keep them next to a float32 copy during the
    optimizer step. It would also give a parameter that no sample reaches a gradient of that dtype, which torch then
    rejects. All gradients therefore start as zeros.
    """
    for low, _ in master_pairs(engine.optimizer):
        low.grad_dtype = torch.float32
        low.grad = torch.zeros_like(low, dtype=torch.float32)


def _fill_gradients(model: nn.Module) -> None:
    """Give zero gradients to parameters that no sample of a step reaches, as ZeRO does.

    Without a gradient, torch's optimizers would skip the momentum and the weight decay of that step. DeepSpeed adds
    the zeros on several ranks only.
    """
    for parameter in model.parameters():
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


class PowerSgd:
    """torch's reduction of gradients through PowerSGD (Vogels et al. 2019, arXiv:1905.13727)."""

    def __init__(self, rank: int) -> None:
        # torch demands that PowerSGD starts after two plain iterations.
        self._begin = partial(powerSGD_hook.PowerSGDState, None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        self._state = self._begin()

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """Return ``model`` with its gradients reduced so.

        It is moved to its device first. NCCL reduces only tensors on GPUs, and DeepSpeed moves the model later.
        """
        from deepspeed.accelerator import get_accelerator

        # Each rank tracks the statistics of its own samples, as without PowerSGD. torch would give it the first rank's.
        wrapped = DistributedDataParallel(model.to(get_accelerator().current_device_name()), broadcast_buffers=False)
        wrapped.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)
        return wrapped

    def forget(self) -> None:
        """Begin again. The errors that it feeds back may be of a gradient that was not finite."""
        begun = self._begin()
        for name in powerSGD_hook.PowerSGDState.__slots__:
            setattr(self._state, name, getattr(begun, name))
