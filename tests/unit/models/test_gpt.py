"""The GPT: what it sees, how it is cut, and what it refuses."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.models.gpt import GPT, Rotary, gpt
from app.models.splitting import cuts_of, layers_of
from app.models.staged import Tied, run_layers

KINDS: list[dict[str, Any]] = [{}, {"tied": False}, {"positions": "learned"}]


def small(**arguments: Any) -> GPT:
    torch.manual_seed(0)
    return gpt(vocab_size=50, max_length=32, **({"layers": 2, "width": 32, "heads": 4} | arguments)).eval()


def tokens(length: int = 16) -> Tensor:
    return torch.randint(0, 50, (3, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("arguments", KINDS)
def test_the_past_does_not_see_the_future(arguments: dict[str, Any]) -> None:
    model, ids = small(**arguments), tokens()
    changed = ids.clone()
    changed[:, 9] = (ids[:, 9] + 1) % 50
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("arguments", KINDS)
def test_its_layers_are_the_model_bit_for_bit(arguments: dict[str, Any]) -> None:
    model, ids = small(**arguments), tokens()
    assert torch.equal(run_layers(layers_of(model), ids), model(ids))
    assert model(ids).shape == (3, 16, 50)


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = small(), small(tied=False)
    count = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    assert count[1] - count[0] == 50 * 32
    first, *_, last = layers_of(tied)
    assert isinstance(first, Tied)
    assert isinstance(last, Tied)
    assert first.module is last.module
    tied(tokens()).logsumexp(-1).sum().backward()
    assert tied.tokens.weight.grad is not None


def test_attention_by_rotary_positions_depends_on_the_distance_alone() -> None:
    rotary = Rotary(head_width=8, max_length=64)
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 64, 8)
    products = rotary(query)[0, 0] @ rotary(key)[0, 0].T
    for distance in (0, 1, 7, 30):
        along = products.diagonal(-distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-4)
    assert not torch.allclose(products[0, 0], products[30, 0], atol=1e-2)


def test_rotary_angles_stay_exact_in_bfloat16_and_from_nowhere() -> None:
    exact = Rotary(head_width=8, max_length=4096).turns
    assert torch.equal(Rotary(8, 4096).bfloat16().turns, exact)
    assert torch.equal(Rotary(8, 4096).to(torch.bfloat16).turns, exact)
    with torch.device("meta"):
        nowhere = Rotary(8, 4096)
    assert torch.equal(nowhere.to_empty(device="cpu").turns, exact)
    assert Rotary(8, 4096).bfloat16()(torch.ones(1, 1, 5, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert not small().state_dict().keys() & {"blocks.0.attention.rotary.turns"}


@pytest.mark.parametrize("arguments", KINDS)
def test_shards_add_up_to_the_model(arguments: dict[str, Any]) -> None:
    """Each block's parts, cut in two by the plan, answer halves of what the whole answers."""
    model = small(**arguments)
    hidden = torch.randn(2, 5, 32)
    for part in ("attention", "feed_forward"):
        whole: nn.Module = getattr(model.blocks[0], part)
        shards = [_shard(model, f"blocks.0.{part}", rank) for rank in range(2)]
        assert torch.allclose(sum(shard(hidden) for shard in shards), whole(hidden), atol=1e-6)


def _shard(model: nn.Module, name: str, rank: int) -> nn.Module:
    part = copy.deepcopy(model.get_submodule(name))
    for linear, cut in cuts_of(model).items():
        if linear.startswith(f"{name}."):
            matrix = part.get_submodule(linear.removeprefix(f"{name}."))
            matrix.weight = nn.Parameter(matrix.weight.chunk(2, dim=0 if cut == "colwise" else 1)[rank])
    return part


def test_every_matrix_of_the_blocks_is_cut() -> None:
    assert set(cuts_of(small(layers=1))) == {
        f"blocks.0.{name}"
        for name in [*(f"attention.{part}" for part in ("q", "k", "v", "out")), "feed_forward.up", "feed_forward.down"]
    }


def test_it_starts_as_gpt2_does() -> None:
    model = small(layers=8, width=128)
    stds = {name: float(weight.detach().std()) for name, weight in model.named_parameters() if weight.ndim == 2}
    for name, std in stds.items():
        expected = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
        assert std == pytest.approx(expected, rel=0.05), name
    loss = nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flip(0, 1).flatten())
    assert float(loss.detach()) == pytest.approx(math.log(50), abs=0.2)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"heads": 5}, "not divisible"), ({"positions": "none"}, "'none'"), ({"width": 12}, "choose an even width")],
)
def test_wrong_sizes_are_refused(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        small(**arguments)


@pytest.mark.parametrize("arguments", KINDS)
def test_more_tokens_than_it_was_made_for_are_refused(arguments: dict[str, Any]) -> None:
    assert small(**arguments)(tokens(32)).shape == (3, 32, 50)
    with pytest.raises(ValueError, match="got 33 tokens: expected 32 at most"):
        small(**arguments)(tokens(33))
