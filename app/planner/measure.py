"""The profile of a user's own model: one forward pass on fake tensors, which have shapes and no memory."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_iter

from app.config.plan import Precision
from app.errors import PlanError
from app.models.factory import logits_of
from app.models.precision import TORCH_DTYPES
from app.models.splitting import cuts_of, layers_of
from app.models.staged import Layer, ShardStyle, Tied
from app.models.traits import ModelKind, kind_of, traits_of
from app.planner.profile import LayerProfile, ModelProfile
from app.planner.recorder import SAMPLES, FakeModel, Recorder, storage_of

_ROW_CUTS = ("o_proj", "out_proj", "down_proj", "c_proj", "fc2", "dense_4h_to_h", "attention.dense", "output.dense")
"""Names of the Linears in models of Hugging Face whose inputs DeepSpeed splits (``module_inject/auto_tp.py``)."""
_MEASURED_BLOCKS = 2


def measure(model: nn.Module, inputs: Mapping[str, Tensor], precision: Precision) -> ModelProfile:
    """Return the profile of ``model`` on samples like ``inputs``. The model and torch's random state stay as they are.

    Layers that are alike are measured once. In a model that is not staged they are the modules of its longest
    ``ModuleList``, as in Hugging Face's.

    Args:
        model: whole. Its tensors may lie on the meta device.
        inputs: tensors by name, each of shape (batch, …).
        precision: what it will compute in.

    Raises:
        PlanError: its forward pass needs values that shapes do not have.
    """
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
        fakes = FakeModel.of(model, inputs, precision, _cuts(model))
        try:
            is_staged = kind_of(model) is ModelKind.STAGED and len(inputs) == 1
            layers = _staged_layers(fakes) if is_staged else _hooked_layers(fakes)
        except Exception as error:  # a user's model may do anything
            raise PlanError(
                f"model {type(model).__name__} cannot be measured without values ({error}): give train.plan its keys "
                "instead of auto"
            ).of("plan.not_measured", "train.plan") from error
        output = fakes.output

    traits = traits_of(model)
    # Inputs of two dimensions are (batch, tokens).
    sequence = max((tensor.shape[1] for tensor in inputs.values() if tensor.dim() == 2), default=1)
    return ModelProfile(
        name=type(model).__name__,
        precision=precision,
        layers=tuple(layers),
        traits=traits,
        hidden=_hidden(layers, sequence, precision) if traits.tensor_divisor else 0,
        heads=traits.tensor_divisor or 0,
        feed_forward=max((linear.out_features for linear in _linears(model)), default=0),
        sequence=sequence,
        vocabulary=output.shape[-1],
        sample_bytes=sum(tensor.nbytes / len(tensor) for tensor in inputs.values()),
        output_bytes=output.nbytes / SAMPLES,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging the traceback of each operation that fails. The error says as much."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _hidden(layers: list[LayerProfile], sequence: int, precision: Precision) -> int:
    """Return the width between layers."""
    return int(layers[0].boundary_bytes / TORCH_DTYPES[precision].itemsize / sequence)


def _linears(model: nn.Module) -> list[nn.Linear]:
    """Return the Linears, except the last: the output layer."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][:-1]


def _cuts(model: nn.Module) -> dict[str, ShardStyle]:
    """Return how tensor parallelism cuts the Linears, by name."""
    match kind_of(model):
        case ModelKind.STAGED:
            return cuts_of(model)
        case ModelKind.HUGGING_FACE:
            blocks = _longest_list(model)
            inside = {id(module) for block in blocks or () for module in block.modules()}
            return {
                name: "rowwise" if name.endswith(_ROW_CUTS) else "colwise"
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear) and id(module) in inside
            }
        case ModelKind.PLAIN:
            return {}


def _staged_layers(fakes: FakeModel) -> list[LayerProfile]:
    """Measure the layers of a staged model one after the other. A layer like one before is not run again."""
    layers = layers_of(fakes.model)
    tensor = next(iter(fakes.inputs.values()))
    recorder = Recorder(fakes)
    known: dict[object, tuple[LayerProfile, Tensor]] = {}
    found = []
    tied_modules = [layer.module for layer in layers if isinstance(layer, Tied)]
    for position, layer in enumerate(layers):
        is_last = position == len(layers) - 1
        # The last layer also computes the loss, so it is like no other.
        key = _likeness(layer, tensor, position if is_last else -1)
        if key not in known:
            recorder.begin()
            with recorder.keeping(), recorder:
                output = layer(tensor)
                if is_last:
                    _loss(output)
            # All uses of a tied module have the same name.
            tied = f"tied_{tied_modules.index(layer.module)}" if isinstance(layer, Tied) else None
            held = (layer.module if isinstance(layer, Tied) else layer).parameters()
            known[key] = recorder.layer(_name(layer), held, None if is_last else output, tied), output
        profile, tensor = known[key]
        found.append(profile)
    fakes.output = tensor
    return found


def _name(layer: Layer) -> str:
    return type(layer.module if isinstance(layer, Tied) else layer).__name__


def _likeness(layer: Layer, inputs: Tensor, position: int) -> object:
    """Return a key that layers with the same profile share."""
    if isinstance(layer, Tied):
        return id(layer), position
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return type(layer), shapes, tuple(inputs.shape), inputs.dtype, position


def _hooked_layers(fakes: FakeModel) -> list[LayerProfile]:
    """Measure a chain of blocks by its first ones, and any other model as one layer."""
    blocks = _longest_list(fakes.model)
    chain = None
    if blocks is not None:
        # Without some of its blocks a model may fail, as one that joins the outputs of parallel heads.
        with suppress(Exception):
            chain = _chain_layers(fakes, blocks)
    if chain:
        return chain
    recorder = Recorder(fakes)
    with recorder.keeping(), recorder:
        fakes.output = logits_of(fakes.model(**fakes.inputs))
        _loss(fakes.output)
    return [recorder.layer(type(fakes.model).__name__, fakes.model.parameters(), None, None)]


def _chain_layers(fakes: FakeModel, blocks: nn.ModuleList) -> list[LayerProfile] | None:
    """Measure the first blocks, with what runs before and after them. The others are like them.

    Return None unless each of them runs once, one after the other.
    """
    recorder = Recorder(fakes)
    found: list[LayerProfile] = []
    calls: list[_Call] = []

    def close(name: str, parameters: Iterable[nn.Parameter], output: Tensor | None) -> None:
        found.append(recorder.layer(name, parameters, output, None))
        recorder.begin()

    number = len(blocks)
    with _shortened(blocks), _hooks(blocks, close, calls), recorder.keeping(), recorder:
        kept = list(map(id, blocks))
        output = logits_of(fakes.model(**fakes.inputs))
        _loss(output)
    # A block that runs again shares its weights, and blocks with one input run beside each other.
    inputs = [call.given for call in calls if call.given is not None]
    if [call.block for call in calls] != kept or any(len(set(ids)) < len(ids) for ids in (kept, inputs)):
        return None
    fakes.output = output
    whole = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [parameter for parameter in fakes.model.parameters() if id(parameter) not in whole]
    tables = [module for module in fakes.model.modules() if isinstance(module, nn.Embedding)]
    embeddings = {id(table.weight) for table in tables}
    first, *measured = found
    # A model reads its embeddings before the blocks. Its other parameters come after them.
    start = _with_parameters(first, [parameter for parameter in outside if id(parameter) in embeddings])
    rest = [parameter for parameter in outside if id(parameter) not in embeddings]
    # The blocks that were left out are like the last one that ran.
    middle = [measured[min(position, len(measured) - 1)] for position in range(number)]
    return [start, *middle, recorder.layer("output", rest, None, None)]


def _with_parameters(layer: LayerProfile, parameters: list[nn.Parameter]) -> LayerProfile:
    """Return ``layer`` with these parameters."""
    shapes = tuple(tuple(parameter.shape) for parameter in parameters)
    return replace(layer, parameters=sum(map(prod, shapes)), split_parameters=0, tensor_shapes=shapes)


def _longest_list(model: nn.Module) -> nn.ModuleList | None:
    """Return the longest list of modules of one class and one shape."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    alike = [modules for modules in lists if len({_shape(module) for module in modules}) == 1]
    return max(alike, key=len, default=None)


def _shape(module: nn.Module) -> object:
    return type(module), tuple(tuple(parameter.shape) for parameter in module.parameters())


@contextmanager
def _shortened(blocks: nn.ModuleList) -> Iterator[None]:
    """Leave the first blocks of ``blocks`` for a while."""
    kept = dict(blocks._modules)
    for name in list(kept)[_MEASURED_BLOCKS:]:
        del blocks._modules[name]
    try:
        yield
    finally:
        blocks._modules.update(kept)


class _Call(NamedTuple):
    """A call of a block."""

    block: int
    """Its identity."""
    given: int | None
    """The identity of its first input's storage."""


@contextmanager
def _hooks(
    blocks: nn.ModuleList,
    close: Callable[[str, Iterable[nn.Parameter], Tensor | None], None],
    calls: list[_Call],
) -> Iterator[None]:
    """Close a layer where a block begins or ends, and note each call."""

    def before(block: nn.Module, args: Any) -> None:
        first = next((leaf for leaf in tree_iter(args) if isinstance(leaf, Tensor)), None)
        # Only the first block closes what is before it. What lies between two blocks counts to the later one.
        if not calls:
            close("input", [], first)
        calls.append(_Call(id(block), None if first is None else storage_of(first)))

    def after(block: nn.Module, _: Any, output: Any) -> None:
        first = next((leaf for leaf in tree_iter(output) if isinstance(leaf, Tensor)), None)
        close(type(block).__name__, block.parameters(), first)

    handles = []
    for block in {id(block): block for block in blocks}.values():
        handles += [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _loss(logits: Tensor) -> None:
    """Compute a loss as training does, in 32 bits."""
    flat = logits.reshape(prod(logits.shape[:-1]), logits.shape[-1])
    functional.cross_entropy(flat.float(), torch.zeros(len(flat), dtype=torch.long))
