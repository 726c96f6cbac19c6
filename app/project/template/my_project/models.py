"""Models. A recipe names one in ``model.factory``."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """The mean of the tokens' embeddings, classified by two layers."""

    def __init__(self, vocab_size: int, num_labels: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.classifier = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, num_labels)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits of shape (batch, labels) from ids and mask, each int64 of shape (batch, length)."""
        mask = attention_mask.unsqueeze(-1).to(torch.float32)
        mean = (self.tokens(input_ids) * mask).sum(1) / mask.sum(1)
        logits: Tensor = self.classifier(mean)
        return logits


def net(vocab_size: int, num_labels: int, width: int = 64, dropout: float = 0.1) -> nn.Module:
    """Return a model with fresh weights. The data gives the first two arguments, the recipe's model.args the others."""
    return Net(vocab_size, num_labels, width, dropout)
