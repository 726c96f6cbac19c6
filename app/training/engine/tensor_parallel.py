"""Matrices that are split across workers (Shoeybi et al. 2019, arXiv:1909.08053), through DeepSpeed's layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from app.models.staged import ShardStyle
from app.training.engine.deepspeed_internals import disable_input_reduction, replace_layer_function


class LinearSplitter:
    """Replaces each linear layer with this worker's part of it, as soon as the layer has its values."""

    def __init__(self, module: Any, names: Mapping[int, str], cuts: Mapping[str, ShardStyle], group: Any) -> None:
        """Find the layers to split.

        Args:
            module: DeepSpeed's ``PipelineModule``, which also lists its layers in ``forward_funcs``.
            names: names in the whole model, by ``id``.
            cuts: how the weight is cut, by name in the whole model.
            group: process group of the workers that the layers are split across.
        """
        from deepspeed.module_inject.layers import set_autotp_mode

        # By default DeepSpeed's layers add the bias in place, which breaks gradients.
        set_autotp_mode(training=True)
        self._module, self._group = module, group
        self._placed: set[int] = set()
        self._waiting: dict[nn.Module, tuple[ShardStyle, str, list[tuple[nn.Module, str]]]] = {}
        self._inputs: dict[nn.Module, _SharedInput] = {}
        for parent in module.modules():
            for child_name, child in parent.named_children():
                if (name := names.get(id(child), "")) in cuts:
                    # A layer may have several places in the model. Its part replaces it in all of them.
                    _, _, places = self._waiting.setdefault(child, (cuts[name], name, []))
                    places.append((parent, child_name))
                    if cuts[name] == "colwise":
                        self._inputs.setdefault(parent, _SharedInput(group)).readers += 1

    def __call__(self, parameter: nn.Parameter) -> None:
        """Record that ``parameter`` has its value, and split the layers that are now complete."""
        self._placed.add(id(parameter))
        # A copy, because splitting removes entries.
        for linear in list(self._waiting):
            if all(id(parameter) in self._placed for parameter in linear.parameters()):
                self._split(linear, *self._waiting.pop(linear))

    def _split(self, linear: nn.Module, cut: ShardStyle, name: str, places: list[tuple[nn.Module, str]]) -> None:
        from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

        layers = {"colwise": LinearLayer, "rowwise": LinearAllreduce}
        part: Any = layers[cut](linear, self._group, name=name)
        if cut == "colwise":
            part.register_forward_pre_hook(self._inputs[places[0][0]].read)
            disable_input_reduction(part)
        for parent, child_name in places:
            setattr(parent, child_name, part)
        replace_layer_function(self._module, linear, part)


class _SharedInput:
    """The input of the split layers of one module, such as the queries, keys and values of attention.

    Each worker has a part of the input's gradient, and the parts are summed. Layers that read the same tensor read one
    alias of it. Autograd adds their gradients there, and the sum is reduced once instead of once for each layer.
    """

    def __init__(self, group: Any) -> None:
        self.readers = 0
        self._group = group
        self._input: Tensor | None = None
        self._alias: Tensor | None = None
        self._unread = 0

    def read(self, layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:  # noqa: ARG002
        """Return the layer's input with a gradient that is summed over the workers: a forward pre-hook."""
        (given,) = inputs
        if not torch.is_grad_enabled():
            return given
        alias = self._alias
        if alias is None or self._input is not given:
            alias = _SumGradient.apply(given, self._group)  # type: ignore[no-untyped-call]
            self._input, self._alias, self._unread = given, alias, self.readers
        self._unread -= 1
        if not self._unread:
            # Otherwise they would stay in memory until the next step.
            self._input = self._alias = None
        return alias


class _SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over the workers of a group."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Collectives take contiguous tensors only.
        summed = gradient.contiguous()
        torch.distributed.all_reduce(summed, group=ctx.group)
        return summed, None
