"""Models that can be cut, and what is refused of those that cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from app.models.splitting import cuts_of, layers_of
from app.models.staged import Layer, Staged, Tied, run_layers
from app.models.traits import traits_of
from tests.helpers import documented
from tests.wording import refused

Tiny = documented("how-to/split_a_model.md")["Tiny"]


def test_a_model_is_its_layers() -> None:
    model = Tiny(vocab_size=11)
    assert isinstance(model, Staged)
    ids = torch.randint(0, 11, (2, 3))
    assert torch.equal(run_layers(layers_of(model), ids), model(ids))
    assert model(ids).shape == (2, 3, 11)
    assert cuts_of(model) == cuts_of(with_plan({"u.": "colwise", "do.*": "rowwise"}))
    assert cuts_of(model) == {"up": "colwise", "down": "rowwise"}


def with_layers(change: Callable[[Any], list[Layer]]) -> nn.Module:
    model = Tiny(vocab_size=11)
    layers = change(model)
    model.layers = lambda: layers
    return model


def with_plan(plan: dict[str, str]) -> nn.Module:
    model = Tiny(vocab_size=11)
    model.tp_plan = lambda: plan
    return model


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        with_layers(lambda model: model.layers()[::2]),
        with_layers(lambda model: [*model.layers(), nn.Linear(2, 2)]),
        with_layers(lambda model: [*model.layers(), model.tokens]),
        with_layers(lambda model: [*model.layers(), model.up]),
        with_layers(lambda model: [Tied(model.up, lambda up, x: up(x))]),
    ],
)
def test_layers_that_are_not_the_model_are_refused(model: nn.Module) -> None:
    with refused("model.not_cut"):
        layers_of(model)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        with_plan({"u": "colwise"}),
        with_plan({"up": "colwise", "u.": "rowwise"}),
        with_plan({"up": "column"}),
    ],
)
def test_plans_that_do_not_fit_are_refused(model: nn.Module) -> None:
    with refused("model.not_cut"):
        cuts_of(model)


def test_a_plan_that_does_not_fit_is_refused_before_training_also_of_a_model_with_heads() -> None:
    model = with_plan({"up": "column"})
    model.heads = 2
    with refused("model.not_cut"):
        traits_of(model)
