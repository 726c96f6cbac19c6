"""A GPT of ``app.models.gpt`` as a model of Hugging Face ``transformers`` that gives the same logits.

Learned positions make it a GPT-2. Rotary ones make it a GPT-NeoX: it also has layer norms, and heads whose halves turn.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from app.errors import RecipeError
from app.models.gpt import GPT


def to_transformers(model: nn.Module) -> Any:
    """Return the ``PreTrainedModel`` with the weights of ``model``. Raises RecipeError if it is no ``GPT``."""
    if not isinstance(model, GPT):
        raise RecipeError(
            f"a {type(model).__name__} has no form in transformers: expected app.models.gpt:gpt, or a model of "
            "transformers, whose weights folder is in that layout already"
        ).of("model.not_exported")
    return _as_neox(model) if model.start.positions is None else _as_gpt2(model)


def _sizes(model: Any) -> dict[str, Any]:
    vocabulary, width = model.tokens.weight.shape
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.start.max_length,
        "tie_word_embeddings": model.head is None,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "layer_norm_eps": model.norm.eps,
    }


def _as_neox(model: Any) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    dropout = model.start.dropout.p
    config = GPTNeoXConfig(
        **_sizes(model),
        intermediate_size=_inner(model),
        hidden_act="gelu",
        hidden_dropout=dropout,
        attention_dropout=0.0,
        attention_bias=False,
        # Otherwise attention and the feed-forward part would read the same input.
        use_parallel_residual=False,
        # The whole head turns. By default GPT-NeoX turns a quarter.
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    )
    tensors = {"gpt_neox.embed_in.weight": model.tokens.weight, **_norm("gpt_neox.final_layer_norm", model.norm)}
    for number, block in enumerate(model.blocks):
        name, part = f"gpt_neox.layers.{number}", block.attention
        heads = [matrix.weight.unflatten(0, (model.heads, -1)) for matrix in (part.q, part.k, part.v)]
        tensors |= {
            f"{name}.attention.query_key_value.weight": torch.stack(heads, 1).flatten(0, 2),  # by heads: q, k, v
            f"{name}.attention.dense.weight": part.out.weight,
            f"{name}.mlp.dense_h_to_4h.weight": block.feed_forward.up.weight,
            f"{name}.mlp.dense_4h_to_h.weight": block.feed_forward.down.weight,
            **_norm(f"{name}.input_layernorm", block.attention_norm),
            **_norm(f"{name}.post_attention_layernorm", block.feed_forward_norm),
        }
    return _filled(GPTNeoXForCausalLM(config), tensors, model)


def _as_gpt2(model: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes, dropout = _sizes(model), model.start.dropout.p
    config = GPT2Config(
        **sizes | {"layer_norm_epsilon": sizes.pop("layer_norm_eps")},
        n_inner=_inner(model),
        activation_function="gelu",
        attn_pdrop=0.0,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
    )
    tensors = {
        "transformer.wte.weight": model.tokens.weight,
        "transformer.wpe.weight": model.start.positions.weight,
        **_norm("transformer.ln_f", model.norm),
    }
    for number, block in enumerate(model.blocks):
        name, part = f"transformer.h.{number}", block.attention
        tensors |= {  # GPT-2 keeps its matrices transposed
            f"{name}.attn.c_attn.weight": torch.cat([part.q.weight, part.k.weight, part.v.weight]).T,
            f"{name}.attn.c_proj.weight": part.out.weight.T,
            f"{name}.mlp.c_fc.weight": block.feed_forward.up.weight.T,
            f"{name}.mlp.c_proj.weight": block.feed_forward.down.weight.T,
            **_norm(f"{name}.ln_1", block.attention_norm),
            **_norm(f"{name}.ln_2", block.feed_forward_norm),
        }
    return _filled(GPT2LMHeadModel(config), tensors, model)


def _inner(model: Any) -> int:
    inner: int = model.blocks[0].feed_forward.up.out_features
    return inner


def _norm(name: str, norm: nn.LayerNorm) -> dict[str, Tensor]:
    return {f"{name}.weight": norm.weight, f"{name}.bias": norm.bias}


@torch.no_grad()
def _filled(model: Any, tensors: Mapping[str, Tensor], source: GPT) -> Any:
    """Fill a model. Biases that a ``GPT`` does not have are zero."""
    given = dict(tensors) if source.head is None else {**tensors, "lm_head.weight": source.head.weight}
    for name, parameter in model.named_parameters():
        if name in given:
            parameter.copy_(given.pop(name))
        else:
            parameter.zero_()
    assert not given, f"{type(model).__name__} has no {', '.join(given)}"
    return model
