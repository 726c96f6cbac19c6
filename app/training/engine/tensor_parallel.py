"""Matrices that are split across workers (Shoeybi et al. 2019, arXiv:1909.08053), through DeepSpeed's layers."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from app.models.staged import ShardStyle


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

        set_autotp_mode(training=True)
        self._module, self._group = module, group
        self._placed: set[int] = set()
        self._waiting: dict[nn.Module, tuple[ShardStyle, str, list[tuple[nn.Module, str]]]] = {}
        for parent in module.modules():
            for child_name, child in parent.named_children():
                if (name := names.get(id(child), "")) in cuts:
                    _, _, places = self._waiting.setdefault(child, (cuts[name], name, []))
                    places.append((parent, child_name))

    def __call__(self, parameter: nn.Parameter) -> None:
        """Record that ``parameter`` has its value, and split the layers that are now complete."""
        self._placed.add(id(parameter))
        for linear in list(self._waiting):
            if all(id(parameter) in self._placed for parameter in linear.parameters()):
                self._split(linear, *self._waiting.pop(linear))

    def _split(self, linear: nn.Module, cut: ShardStyle, name: str, places: list[tuple[nn.Module, str]]) -> None:
        from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

        layers = {"colwise": LinearLayer, "rowwise": LinearAllreduce}
        part: nn.Module = layers[cut](linear, self._group, name=name)
        for parent, child_name in places:
            setattr(parent, child_name, part)
        functions = self._module.forward_funcs
        functions[:] = [part if function is linear else function for function in functions]
