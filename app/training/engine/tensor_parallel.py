"""Matrices that are split across workers (Shoeybi et al. 2019, arXiv:1909.08053), through DeepSpeed's layers."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from app.models.staged import ShardStyle


def shard_linears(module: Any, names: Mapping[int, str], cuts: Mapping[str, ShardStyle], group: Any) -> None:
    """Replace each linear layer of ``cuts`` by this worker's part of it.

    Args:
        module: DeepSpeed's ``PipelineModule``, which also keeps a list of what it calls.
        names: names in the whole model, by ``id``.
        cuts: how the weight is cut, by name in the whole model.
        group: the workers that they are split across.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode

    set_autotp_mode(training=True)
    layers = {"colwise": LinearLayer, "rowwise": LinearAllreduce}
    replaced: dict[int, nn.Module] = {}
    for parent in list(module.modules()):
        for child_name, child in list(parent.named_children()):
            name = names.get(id(child), "")
            if name in cuts:
                replaced[id(child)] = layers[cuts[name]](child, group, name=name)
                setattr(parent, child_name, replaced[id(child)])
    module.forward_funcs = [replaced.get(id(function), function) for function in module.forward_funcs]
