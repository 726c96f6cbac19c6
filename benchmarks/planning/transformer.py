"""The profile of a Transformer from its shape alone: for published runs, and as a cross-check of measured profiles."""

from dataclasses import dataclass

from app.config.plan import Precision
from app.config.plan_rules import ModelTraits
from app.planner.profile import PRECISION_BYTES, LayerProfile, ModelProfile, SavedActivations, Work

_SCORE_PASSES = 6
"""Times that unfused attention writes or reads a score: after the product, around softmax and dropout, in the last
product."""


@dataclass(frozen=True)
class TransformerShape:
    """A decoder of language."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    feed_forward: int
    key_value_heads: int
    precision: Precision = "bf16"
    gated: bool = False
    """The feed-forward part has a third matrix, as in Llama (Shazeer 2020, arXiv:2002.05202)."""
    fused_attention: bool = True
    """Scores are not kept (Dao 2022, arXiv:2205.14135)."""
    dropout: bool = False
    learned_positions: bool = True
    tied: bool = True
    split_vocabulary: bool = True
    """Tensor parallelism splits the embedding too, as Megatron-LM does."""

    @property
    def key_value_width(self) -> int:
        """Width of keys, and of values."""
        return self.hidden // self.heads * self.key_value_heads

    @property
    def block_parameters(self) -> int:
        """Elements of a block's matrices."""
        matrices = (3 if self.gated else 2) * self.hidden * self.feed_forward
        return 2 * self.hidden * (self.hidden + self.key_value_width) + matrices


def transformer_profile(name: str, shape: TransformerShape) -> ModelProfile:
    """Return the profile of a decoder, by the formulas of its parts."""
    embedding, head = _embedding(shape), _head(shape)
    blocks = tuple([_block(shape)] * shape.layers)
    sequence, vocabulary = shape.sequence, shape.vocabulary
    return ModelProfile(
        name=name,
        precision=shape.precision,
        layers=(embedding, *blocks, head),
        traits=ModelTraits(name, shape.layers, shape.heads, checkpoints_activations=True),
        hidden=shape.hidden,
        heads=shape.heads,
        feed_forward=shape.feed_forward,
        sequence=sequence,
        vocabulary=vocabulary,
        # A token and its target, 64 bits each.
        sample_bytes=16.0 * sequence,
        output_bytes=sequence * vocabulary * PRECISION_BYTES[shape.precision],
    )


def _block(shape: TransformerShape) -> LayerProfile:
    """Return one block: attention and the feed-forward part."""
    whole, split = _block_work(shape)
    # Two norms, each with a weight and a bias.
    norms = 4 * shape.hidden
    return LayerProfile(
        name="block",
        parameters=shape.block_parameters + norms,
        split_parameters=shape.block_parameters,
        whole_work=whole,
        split_work=split,
        saved=_block_activations(shape),
        boundary_bytes=shape.sequence * shape.hidden * PRECISION_BYTES[shape.precision],
        # By columns: queries, keys, values and the first feed-forward matrices. By rows: the last matrix of each part.
        column_inputs=2,
        row_cuts=2,
    )


def _block_work(shape: TransformerShape) -> tuple[Work, Work]:
    """Return what a tensor group repeats in a block, and what it shares out.

    A product with a matrix of P elements takes 2 P operations a token, attention 4 s h a token over s tokens (Narayanan
    2021, arXiv:2104.04473, appendix).
    """
    number, tokens, hidden = PRECISION_BYTES[shape.precision], shape.sequence, shape.hidden
    inner = (3 if shape.gated else 2) * shape.feed_forward
    heads_width = hidden + 2 * shape.key_value_width
    dropout_bytes = 2 if shape.dropout else 0
    scores = 0 if shape.fused_attention else shape.heads * tokens
    split = Work(
        matmul_flops=2 * tokens * shape.block_parameters,
        matmul_bytes=number * tokens * (4 * hidden + heads_width + inner),
        attention_flops=4 * tokens**2 * hidden,
        attention_bytes=tokens * scores * (_SCORE_PASSES * number + dropout_bytes / 2),
        moved_bytes=number * tokens * (2 * inner / 2 + heads_width),
        kernels=20 if shape.fused_attention else 32,
    )
    # Two norms read and write the stream, two additions read two tensors and write one.
    whole = Work(moved_bytes=tokens * hidden * (10 * number + dropout_bytes), kernels=12)
    return whole, split


def _block_activations(shape: TransformerShape) -> SavedActivations:
    """Return what a block keeps of one sample.

    Korthikanti 2022, arXiv:2205.05198, equations 1 and 2: s h (10 + 24/t + 5 a s / (h t)) bytes in 16 bits, written out
    by tensor, so that grouped queries, other inner widths and models without dropout are right too. Fused attention
    keeps no scores.
    """
    number, tokens, hidden = PRECISION_BYTES[shape.precision], shape.sequence, shape.hidden
    masks = 2 if shape.dropout else 0
    inner = shape.feed_forward * (4 if shape.gated else 2)
    scores = 0.0 if shape.fused_attention else shape.heads * tokens * (2 * number + (1 if shape.dropout else 0))
    statistics = 4.0 * shape.heads if shape.fused_attention else 0.0
    # The output widths of a block's products, in order: queries, keys, values, attention, feed-forward.
    ends = [hidden, shape.key_value_width, shape.key_value_width, hidden]
    ends += [shape.feed_forward] * (2 if shape.gated else 1) + [hidden]
    return SavedActivations(
        whole=tokens * hidden * (4 * number + masks),
        split=tokens * (number * (2 * hidden + 2 * shape.key_value_width + inner) + statistics),
        attention=tokens * scores,
        # torchtitan keeps the first, third, … product.
        selected=tokens * number * (sum(ends[::2]) + hidden),
    )


def _embedding(shape: TransformerShape) -> LayerProfile:
    """Return the embedding of tokens and, where they are learned, of positions."""
    number, tokens = PRECISION_BYTES[shape.precision], shape.sequence
    table = shape.vocabulary * shape.hidden
    positions = shape.sequence * shape.hidden if shape.learned_positions else 0
    return LayerProfile(
        name="embedding",
        parameters=table + positions,
        split_parameters=table if shape.split_vocabulary else 0,
        whole_work=Work(moved_bytes=4 * number * tokens * shape.hidden, kernels=6),
        split_work=Work(),
        saved=SavedActivations(whole=tokens * (8.0 + (shape.hidden if shape.dropout else 0))),
        boundary_bytes=tokens * shape.hidden * number,
        tied="embedding" if shape.tied else None,
    )


def _head(shape: TransformerShape) -> LayerProfile:
    """Return the last norm, the output layer and the loss, whose logits are read in 32 bits."""
    number, tokens, width = PRECISION_BYTES[shape.precision], shape.sequence, shape.vocabulary
    table = width * shape.hidden
    product = Work(
        matmul_flops=2 * tokens * table,
        matmul_bytes=number * tokens * (shape.hidden + width),
        moved_bytes=tokens * width * (number + 12),
        kernels=8,
    )
    logits = tokens * width * (number + 4.0)
    is_split = shape.split_vocabulary
    return LayerProfile(
        name="head",
        parameters=table,
        split_parameters=table if is_split else 0,
        whole_work=Work(moved_bytes=4 * number * tokens * shape.hidden, kernels=4) + (Work() if is_split else product),
        split_work=product if is_split else Work(),
        saved=SavedActivations(
            whole=2 * number * tokens * shape.hidden + (0.0 if is_split else logits), split=logits if is_split else 0.0
        ),
        boundary_bytes=0.0,
        tied="embedding" if shape.tied else None,
    )
