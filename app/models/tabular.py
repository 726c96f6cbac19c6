"""Models for rows of a table."""

import torch
from torch import Tensor, nn


class TabularMlp(nn.Module):
    """A perceptron over the numbers and the embedded categories of a row."""

    def __init__(
        self,
        num_labels: int,
        num_numbers: int,
        num_categories: int,
        num_category_columns: int,
        width: int,
        layers: int,
        embedding: int,
        dropout: float,
    ) -> None:
        """Create the model.

        Args:
            num_labels, num_numbers, num_categories, num_category_columns: properties of the data.
            width: units of each hidden layer.
            layers: hidden layers.
            embedding: numbers that stand for a category.
            dropout: share of the hidden units that are dropped in training.
        """
        super().__init__()
        self.embedding = nn.Embedding(num_categories, embedding) if num_category_columns else None
        size = num_numbers + num_category_columns * embedding
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(size, width), nn.GELU(), nn.Dropout(dropout)]
            size = width
        self.hidden = nn.Sequential(*parts)
        self.output = nn.Linear(size, num_labels)

    def forward(self, numbers: Tensor | None = None, categories: Tensor | None = None) -> Tensor:
        """Return outputs (rows, labels) for numbers and categories, each of shape (rows, columns)."""
        parts = [] if numbers is None else [numbers]
        if self.embedding is not None and categories is not None:
            parts.append(self.embedding(categories).flatten(1))
        outputs: Tensor = self.output(self.hidden(torch.cat(parts, dim=1)))
        return outputs


def mlp(
    num_labels: int,
    num_numbers: int,
    num_categories: int,
    num_category_columns: int,
    width: int = 64,
    layers: int = 2,
    embedding: int = 8,
    dropout: float = 0.0,
) -> nn.Module:
    """Return a perceptron for rows of a table, for any of the tasks with labels or numbers."""
    return TabularMlp(num_labels, num_numbers, num_categories, num_category_columns, width, layers, embedding, dropout)
