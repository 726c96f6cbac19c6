"""A GPT: the decoder of a language model, which can be split into stages and shards."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.models.staged import Layer, ShardStyle, Tied, embed, run_layers, unembed

_STD = 0.02
Positions = Literal["rotary", "learned"]


class GPT(nn.Module):
    """A Transformer decoder that predicts the next token.

    Like GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"), it has layer norm before
    each part, and scales the initial weights of the residual branches by 1 / sqrt(2 x layers). The matrices have no
    biases, as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311).
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        layers: int = 4,
        width: int = 256,
        heads: int = 4,
        positions: Positions = "rotary",
        tied: bool = True,
        dropout: float = 0.0,
        feed_forward: int = 4,
    ) -> None:
        """Create the model with fresh weights.

        Args:
            vocab_size, max_length: properties of the data.
            layers, width, heads: the decoder's size; ``width`` is divisible by ``heads``.
            positions: ``rotary``, as angles between queries and keys, or ``learned``, added to the embeddings.
            tied: whether the embedding is also the output layer (Press and Wolf 2016, arXiv:1608.05859).
            dropout: rate for the embeddings and for the output of each part.
            feed_forward: width of the feed-forward part, as a multiple of ``width``.
        """
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not divisible by heads {heads}: choose a multiple")
        if positions not in ("rotary", "learned"):
            raise ValueError(f"positions {positions!r} are not known: expected rotary or learned")
        self.heads = heads
        rotary = Rotary(width // heads, max_length) if positions == "rotary" else None
        self.tokens = nn.Embedding(vocab_size, width)
        self.start = _Start(width, max_length, dropout, learned=rotary is None)
        self.blocks = nn.ModuleList(_Block(width, heads, rotary, dropout, feed_forward) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, vocab_size, bias=False)
        self.apply(_initialize)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(weight, std=_STD / math.sqrt(2 * layers))

    def layers(self) -> list[Layer]:
        """Return the embedding, start, blocks, norm and output layer."""
        between = [self.start, *self.blocks, self.norm]
        if self.head is None:
            return [Tied(self.tokens, embed), *between, Tied(self.tokens, unembed)]
        return [self.tokens, *between, self.head]

    def tp_plan(self) -> dict[str, ShardStyle]:
        """Split attention by heads, and the feed-forward part by its inner width (arXiv:1909.08053)."""
        return {r".*\.(q|k|v|up)": "colwise", r".*\.(out|down)": "rowwise"}

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits of the next token (batch, length, vocabulary) for ids, int64 of shape (batch, length).

        Raises:
            ValueError: there are more than ``max_length`` tokens.
        """
        return run_layers(self.layers(), input_ids)


gpt = GPT


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)


class _Start(nn.Module):
    """Check the length, and add learned positions if the model has them."""

    def __init__(self, width: int, max_length: int, dropout: float, learned: bool) -> None:
        super().__init__()
        self.max_length = max_length
        self.positions = nn.Embedding(max_length, width) if learned else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, embedded: Tensor) -> Tensor:
        length = embedded.shape[1]
        if length > self.max_length:
            raise ValueError(f"got {length} tokens: expected {self.max_length} at most, the model's max_length")
        if self.positions is not None:
            embedded = embedded + self.positions(torch.arange(length, device=embedded.device))
        dropped: Tensor = self.dropout(embedded)
        return dropped


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, rotary: "Rotary | None", dropout: float, feed_forward: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, width // heads, rotary)
        self.feed_forward = _FeedForward(width, feed_forward * width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        attended: Tensor = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        result: Tensor = attended + self.dropout(self.feed_forward(self.feed_forward_norm(attended)))
        return result


class _Attention(nn.Module):
    """Causal attention over the heads that its matrices hold: all heads, or those of a shard."""

    def __init__(self, width: int, head_width: int, rotary: "Rotary | None") -> None:
        super().__init__()
        self.head_width = head_width
        self.rotary = rotary
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        # A shard has fewer heads, so only their width is fixed.
        q, k, v = (
            matrix(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for matrix in (self.q, self.k, self.v)
        )
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return projected


class _FeedForward(nn.Module):
    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner_width, bias=False)
        self.down = nn.Linear(inner_width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        narrowed: Tensor = self.down(functional.gelu(self.up(hidden)))
        return narrowed


class Rotary(nn.Module):
    """Rotate each pair of a head's values by an angle that grows with the position.

    So the product of a query and a key depends on their distance alone (Su et al. 2021, arXiv:2104.09864). The angle of
    pair i of d / 2 is position x 10000^(-2i / d).
    """

    turns: Tensor

    def __init__(self, head_width: int, max_length: int) -> None:
        super().__init__()
        if head_width % 2:
            raise ValueError(f"heads are {head_width} wide, and rotary positions turn pairs: choose an even width")
        self._make = partial(_turns, head_width, max_length)
        # The angles follow from the sizes, so checkpoints do not have them.
        self.register_buffer("turns", self._make(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the model, but stay in float32: angles in bfloat16 would be wrong by whole turns."""
        angles = self.turns
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # A model that was built on the meta device has no angles to move.
        self.turns = self._make(device=self.turns.device) if angles.is_meta else angles.to(self.turns.device)
        return self

    def forward(self, heads: Tensor) -> Tensor:
        """Return queries or keys (batch, heads, length, head width), rotated in float32."""
        cosine, sine = self.turns[:, : heads.shape[-2]]
        first, second = heads.float().chunk(2, dim=-1)
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        return turned.to(heads.dtype)


def _turns(head_width: int, max_length: int, device: Any = None) -> Tensor:
    """Return cosine and sine of each position's angles, float32 of shape (2, max_length, head_width / 2)."""
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=device)
    positions = torch.arange(max_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 10_000.0 ** (-pairs / head_width))
    return torch.stack([angles.cos(), angles.sin()])
