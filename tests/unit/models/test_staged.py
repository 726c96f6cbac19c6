"""Models that can be cut, and what is refused of those that cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from app.errors import RecipeError
from app.models.splitting import cuts_of, layers_of
from app.models.staged import Layer, Staged, Tied, run_layers
from app.models.traits import traits_of
from tests.helpers import documented

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
    ("model", "words"),
    [
        (nn.Linear(2, 2), "Linear cannot be cut: it has no layers()"),
        (with_layers(lambda model: model.layers()[::2]), "no layer holds up.weight, up.bias, down.weight, down.bias"),
        (with_layers(lambda model: [*model.layers(), nn.Linear(2, 2)]), "layer 3 holds 'weight', which the model does"),
        (with_layers(lambda model: [*model.layers(), model.tokens]), "layer 3 holds 'tokens.weight', and so does"),
        (with_layers(lambda model: [*model.layers(), model.up]), "layer 3 holds 'up.weight', and so does"),
        (with_layers(lambda model: [Tied(model.up, lambda up, x: up(x))]), "ties 'up.bias': only"),
    ],
)
def test_layers_that_are_not_the_model_are_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        layers_of(model)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2), "it has no layers()"),
        (with_plan({"u": "colwise"}), "'u' matches no Linear; there are up, down"),
        (with_plan({"up": "colwise", "u.": "rowwise"}), "two patterns for 'up'"),
        (with_plan({"up": "column"}), "tp_plan has 'column' for 'up': expected colwise or rowwise"),
    ],
)
def test_plans_that_do_not_fit_are_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        cuts_of(model)
    assert words in str(refused.value)


def test_a_plan_that_does_not_fit_is_refused_before_training_also_of_a_model_with_heads() -> None:
    model = with_plan({"up": "column"})
    model.heads = 2
    with pytest.raises(RecipeError, match="'column'"):
        traits_of(model)
