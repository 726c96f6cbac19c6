"""Models that can be cut, and what is refused of those that cannot."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from app.errors import RecipeError
from app.models.staged import Layer, ShardStyle, Staged, Tied, cuts_of, layers_of, run_layers


class Tiny(nn.Module):
    """The example of app.models.staged."""

    def __init__(self, vocab_size: int = 11, width: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.spare = nn.Identity()

    def layers(self) -> list[Layer]:
        return [
            Tied(self.tokens, lambda tokens, input_ids: tokens(input_ids)),
            nn.Sequential(self.up, nn.GELU(), self.down),
            Tied(self.tokens, lambda tokens, hidden: functional.linear(hidden, tokens.weight)),
        ]

    def tp_plan(self) -> dict[str, ShardStyle]:
        return {"up": "colwise", "do.*": "rowwise"}

    def forward(self, input_ids: Tensor) -> Tensor:
        return run_layers(self.layers(), input_ids)


def test_a_model_is_its_layers() -> None:
    model = Tiny()
    assert isinstance(model, Staged)
    ids = torch.randint(0, 11, (2, 3))
    assert torch.equal(run_layers(layers_of(model), ids), model(ids))
    assert model(ids).shape == (2, 3, 11)
    assert cuts_of(model) == {"up": "colwise", "down": "rowwise"}


def with_layers(change: Callable[[Tiny], list[Layer]]) -> nn.Module:
    model = Tiny()
    layers = change(model)
    model.layers = lambda: layers  # type: ignore[method-assign]
    return model


def with_plan(plan: dict[str, ShardStyle]) -> nn.Module:
    model = Tiny()
    model.tp_plan = lambda: plan  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2), "Linear cannot be cut: it has no layers()"),
        (with_layers(lambda model: model.layers()[::2]), "no layer holds up.weight, up.bias, down.weight, down.bias"),
        (with_layers(lambda model: [*model.layers(), nn.Linear(2, 2)]), "layer 3 holds 'weight', which the model does"),
        (with_layers(lambda model: [*model.layers(), model.tokens]), "layer 3 holds 'tokens.weight', and so does"),
        (with_layers(lambda model: [*model.layers(), model.up]), "layer 3 holds 'up.weight', and so does"),
        (with_layers(lambda model: [Tied(model.up, lambda up, x: up(x))]), "shares 'up.bias': only"),
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
    ],
)
def test_plans_that_do_not_fit_are_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        cuts_of(model)
    assert words in str(refused.value)
