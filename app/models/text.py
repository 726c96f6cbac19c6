"""Models of text."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class EncoderClassifier(nn.Module):
    """A text classifier: a convolution, a Transformer encoder, and a linear layer on the tokens' mean and maximum.

    The encoder is that of Vaswani et al. 2017 (arXiv:1706.03762), with layer norm before each part
    (Xiong et al. 2020, arXiv:2002.04745) and learned positions. The convolution combines neighboring
    tokens, which attention does not learn from small data (Kim 2014, arXiv:1408.5882).
    """

    def __init__(
        self,
        vocab_size: int,
        num_labels: int,
        max_length: int,
        unknown_id: int,
        layers: int = 4,
        width: int = 256,
        heads: int = 4,
        kernel: int = 3,
        dropout: float = 0.1,
        embedding_dropout: float = 0.1,
        token_dropout: float = 0.0,
    ) -> None:
        """Create the model with fresh weights.

        Args:
            vocab_size, num_labels, max_length, unknown_id: properties of the data.
            layers, width, heads: the encoder's size; ``width`` is divisible by ``heads``.
            kernel: tokens that the convolution combines; odd.
            dropout: rate in the encoder and before the classifier.
            embedding_dropout: share of the embeddings' elements that are dropped.
            token_dropout: share of the tokens that training replaces by the unknown one.
        """
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not divisible by heads {heads}: choose a multiple")
        if kernel % 2 == 0:
            raise ValueError(f"kernel {kernel} is even: choose an odd number of tokens")

        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_length, width)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.unknown_id, self.token_dropout = unknown_id, token_dropout
        self.embedding_dropout = nn.Dropout(embedding_dropout)
        self.convolution = nn.Conv1d(width, width, kernel, padding=kernel // 2)

        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        # Keep dropout on the output of each part only. On attention weights and inside the feed-forward
        # part, which need the most random numbers, it would cost a third of a step on a CPU.
        layer.self_attn.dropout = 0.0
        layer.dropout.p = 0.0
        # torch has no nested tensors with ``norm_first``, and would warn.
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits (batch, labels) for ids and mask, each int64 of shape (batch, length)."""
        hidden, absent = self.encode(input_ids, attention_mask)
        logits: Tensor = self.classifier(self.dropout(_pool(hidden, absent.unsqueeze(-1))))
        return logits

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return a vector of each token, (batch, length, width), and where no token is, bool of (batch, length)."""
        absent = attention_mask == 0
        if self.training and self.token_dropout:
            dropped = torch.rand(input_ids.shape, device=input_ids.device) < self.token_dropout
            input_ids = input_ids.masked_fill(dropped & ~absent, self.unknown_id)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.embedding_dropout(self.tokens(input_ids) + self.positions(positions))
        neighbors = self.convolution(hidden.masked_fill(absent.unsqueeze(-1), 0.0).transpose(1, 2))
        hidden = hidden + functional.gelu(neighbors.transpose(1, 2))
        return self.encoder(hidden, src_key_padding_mask=absent), absent


def _pool(hidden: Tensor, absent: Tensor) -> Tensor:
    """Return the mean and maximum over the present tokens, concatenated: (batch, 2 x width)."""
    mean = hidden.masked_fill(absent, 0.0).sum(1) / (~absent).sum(1)
    maximum = hidden.masked_fill(absent, torch.finfo(hidden.dtype).min).amax(1)
    return torch.cat([mean, maximum], dim=-1)


class TokenClassifier(EncoderClassifier):
    """``EncoderClassifier`` with the linear layer on each token."""

    def __init__(self, vocab_size: int, num_labels: int, max_length: int, unknown_id: int, **args: Any) -> None:
        """Create the model with fresh weights. The arguments are those of ``EncoderClassifier``."""
        super().__init__(vocab_size, num_labels, max_length, unknown_id, **args)
        self.classifier = nn.Linear(self.tokens.embedding_dim, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits (batch, length, labels) for ids and mask, each int64 of shape (batch, length)."""
        logits: Tensor = self.classifier(self.dropout(self.encode(input_ids, attention_mask)[0]))
        return logits


encoder_classifier, token_classifier = EncoderClassifier, TokenClassifier
