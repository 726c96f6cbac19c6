"""Pruning two of four weights."""

import torch

from app.compile.sparsity import prune_2_to_4


def test_two_of_four_weights_along_the_input_channels_are_zero_the_smaller_ones() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 5, 3),
        torch.nn.Linear(12, 3),
        torch.nn.MultiheadAttention(8, 2),
        torch.nn.MultiheadAttention(8, 2, kdim=4, vdim=12),
        torch.nn.Conv2d(1, 4, 3),
    )
    sparse = prune_2_to_4(model)
    attention = ("2.in_proj_weight", "2.out_proj.weight", "3.q_proj_weight", "3.k_proj_weight", "3.v_proj_weight")
    for name in ("0.weight", "1.weight", *attention):
        dense, kept = model.get_parameter(name), sparse.get_parameter(name)
        groups = [weight.movedim(1, -1).reshape(-1, 4) for weight in (dense, kept)]
        assert ((groups[1] != 0).sum(-1) == 2).all()
        least = groups[0].abs().masked_fill(groups[1] == 0, torch.inf).amin(-1)
        assert (groups[0].abs().masked_fill(groups[1] != 0, 0).amax(-1) <= least).all()
        assert torch.equal(groups[1][groups[1] != 0], groups[0][groups[1] != 0])
    assert torch.equal(model[4].weight, sparse[4].weight)
