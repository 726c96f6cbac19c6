"""Builds a recipe's model from the import string of its factory."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from app.config import ModelConfig
from app.errors import RecipeError
from app.import_string import did_you_mean, import_attribute
from app.models.blueprint import Blueprint, random_states, restore_random_states

SMALL_BYTES = 2**26
"""Models of at most this size are built immediately, and copied to count their operations.

Larger ones do not take memory twice. They are recorded on fake tensors and copied to the meta device. That takes longer
than building and running a small model, because torch imports more modules for it.
"""


def build_model(config: ModelConfig, facts: Mapping[str, int]) -> nn.Module:
    """Return the model of a recipe, with fresh weights.

    Args:
        facts: properties of the data. The factory receives those that its signature names, and all as ``facts``.

    Raises:
        RecipeError: the factory cannot be imported, does not take the arguments, refuses their
            values, or returns something other than a module.
    """
    if config.factory is None:
        from app.models.pretrained import build_configured

        return build_configured(config, facts)
    factory = import_attribute(config.factory)
    if not callable(factory):
        raise RecipeError(f"model.factory {config.factory!r} names a {type(factory).__name__}: expected a function").of(
            "factory.no_function", "model.factory"
        )
    try:
        model = factory(**_arguments(factory, config.args, facts))
    except RecipeError:
        raise
    except Exception as error:  # a user's function may fail in any way
        raise RecipeError(f"model.factory {config.factory!r} refuses model.args {config.args}: {error}").of(
            "model.args_refused", "model.args"
        ) from error
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"model.factory {config.factory!r} returned a {type(model).__name__}: expected a torch.nn.Module"
        ).of("factory.no_module", "model.factory")
    return model


def blueprint_of(config: ModelConfig, facts: Mapping[str, int], adapted: bool = False) -> Blueprint:
    """Return the blueprint of a recipe's model. Arguments and errors are those of ``build_model``.

    ``adapted`` adds the recipe's adapter, for training. A trained model is published without it.

    A small model is built immediately. Recording would take longer, because torch's fake tensors import the compiler.
    """
    build = partial(_build_adapted if adapted and config.adapter else build_model, config, facts)
    model = _build_if_small(build)
    return Blueprint.of(build) if model is None else Blueprint(model)


def _build_adapted(config: ModelConfig, facts: Mapping[str, int]) -> nn.Module:
    from app.models.adapter import adapt  # PEFT takes seconds to import

    assert config.adapter is not None
    return adapt(build_model(config, facts), config.adapter.lora, trains_head="num_labels" in facts)


class _TooLarge(BaseException):
    """The model is too large to be built immediately. Not an Exception, so a factory's own handlers do not catch it."""


class _SizeLimit(TorchFunctionMode):
    """Raise ``_TooLarge`` once new tensors take more than ``SMALL_BYTES``. Copies count, but views do not."""

    def __init__(self) -> None:
        super().__init__()
        self._made = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if (address := _address(made)) is not None and address not in map(_address, (*args, *kwargs.values())):
            self._made += made.nbytes
        if self._made > SMALL_BYTES:
            raise _TooLarge
        return made


def _address(value: Any) -> int | None:
    """Return where a tensor's storage begins. Return None for other values and for sparse tensors."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_dense else None


def _build_if_small(build: Callable[[], nn.Module]) -> nn.Module | None:
    """Return the model. If it is too large, restore the random states and return None."""
    before = random_states()
    try:
        with _SizeLimit():
            return build()
    except _TooLarge:
        # The model is built again, and must get the same numbers.
        restore_random_states(*before)
        return None


def _arguments(factory: Callable[..., Any], given: Mapping[str, Any], facts: Mapping[str, int]) -> dict[str, Any]:
    """Return all ``given`` arguments, and those ``facts`` that the factory's signature names."""
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    names = [name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    for name in given:
        if name not in names and not takes_any:
            raise RecipeError(f"unknown key model.args.{name}; {did_you_mean(name, names)}").of(
                "recipe.extra_forbidden", "model.args"
            )
    # The recipe's arguments win over properties of the data.
    known: dict[str, Any] = {**facts, "facts": facts}
    arguments = {name: value for name, value in known.items() if name in names} | dict(given)
    for name in names:
        if name not in arguments and parameters[name].default is inspect.Parameter.empty:
            raise RecipeError(f"model.args.{name} is missing: {factory.__name__} needs it").of(
                "recipe.missing", f"model.args.{name}"
            )
    return arguments


def logits_of(output: object) -> Tensor:
    """Return the logits of a model's output, which is a tensor or an output of Hugging Face ``transformers``."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise RecipeError(
            f"the model answered a {type(output).__name__}: expected logits, or an output with logits"
        ).of("model.no_logits")
    return logits
