"""The names of parameters, which stay when a plan cuts the model."""

from torch import nn


def names_of(model: nn.Module) -> dict[int, str]:
    """The names of a whole model's parameters and modules, by ``id``; of several names the first."""
    named = [*model.named_modules(remove_duplicate=True), *model.named_parameters(remove_duplicate=True)]
    return {id(item): name for name, item in named}
