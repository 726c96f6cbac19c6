"""Decoders of Hugging Face ``transformers``, as layers and matrices that can be split over workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from app.models.staged import Layer, ShardStyle, Tied, embed, unembed

_MODEL_TYPES = ("llama", "mistral", "qwen2")
"""Types whose decoder is an embedding, equal blocks with rotary positions, a norm and an output layer.

Others differ in ways that matter for a split: Gemma scales its embedding, and Qwen3 has norms within its heads.
"""


@dataclass(frozen=True)
class DecoderStages:
    """A causal language model as ``app.models.staged.Staged``. Its own forward pass does not change."""

    model: Any
    """For example ``LlamaForCausalLM``."""

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Return the stages of a known decoder; None for any other model."""
        config: Any = getattr(model, "config", None)
        if getattr(config, "model_type", None) not in _MODEL_TYPES or not hasattr(model, "lm_head"):
            return None
        window = getattr(config, "sliding_window", None)
        # ``_Block`` makes a full causal mask. A model with a shorter window needs another one.
        sees_all = window is None or window >= config.max_position_embeddings
        return cls(model) if sees_all else None

    @property
    def heads(self) -> int:
        """The number of heads of keys and values. Splitting them also splits the queries that read them."""
        heads: int = self.model.config.num_key_value_heads
        return heads

    def layers(self) -> list[Layer]:
        """Return the embedding, blocks, norm and output layer."""
        decoder = self.model.model
        blocks = [_Block(block, decoder.rotary_emb, self.model.config) for block in decoder.layers]
        if self.model.lm_head.weight is decoder.embed_tokens.weight:
            return [Tied(decoder.embed_tokens, embed), *blocks, decoder.norm, Tied(decoder.embed_tokens, unembed)]
        return [decoder.embed_tokens, *blocks, decoder.norm, self.model.lm_head]

    def tp_plan(self) -> Mapping[str, ShardStyle]:
        """Split attention by heads, and the feed-forward part by its inner width, as transformers' own plan does."""
        return {r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)": "colwise", r".*\.(o_proj|down_proj)": "rowwise"}


class _Block(nn.Module):
    """A block that computes the positions and the causal mask itself. The whole decoder would compute them once."""

    def __init__(self, block: nn.Module, rotary: nn.Module, config: Any) -> None:
        super().__init__()
        self.block, self.rotary, self.config = block, rotary, config

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        from transformers.masking_utils import create_causal_mask

        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        result: Tensor = self.block(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(hidden, positions),
        )
        return result
