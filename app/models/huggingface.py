"""Models of Hugging Face ``transformers``, built from a configuration with fresh weights.

``model.args`` takes ``model_type`` and any key of its configuration, by their names in transformers:

    factory: app.models.huggingface:causal_lm
    args: {model_type: llama, hidden_size: 64, intermediate_size: 256, num_hidden_layers: 2, num_attention_heads: 4}

Attention is torch's scaled dot product, where the model has it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from app.errors import RecipeError
from app.import_string import did_you_mean


def causal_lm(model_type: str, vocab_size: int, max_length: int, **config: Any) -> nn.Module:
    """Return a language model: ``input_ids`` to logits (batch, length, vocabulary).

    Raises:
        RecipeError: transformers has no such language model, or its configuration no such key.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Blocks are not padded, and the embedding of a padding token would never be trained.
    given = {"vocab_size": vocab_size, "use_cache": False, "pad_token_id": None} | config
    configuration = _configuration(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, max_length, given)
    model: nn.Module = AutoModelForCausalLM.from_config(configuration)
    return model


def sequence_classifier(model_type: str, vocab_size: int, max_length: int, num_labels: int, **config: Any) -> nn.Module:
    """Return a text classifier: ``input_ids`` and ``attention_mask`` to logits (batch, labels).

    Raises:
        RecipeError: transformers has no such classifier, or its configuration no such key.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    # [PAD] is token 0. A decoder needs it to find the last token of a text.
    given = {"vocab_size": vocab_size, "num_labels": num_labels, "use_cache": False, "pad_token_id": 0} | config
    configuration = _configuration(model_type, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, max_length, given)
    model: nn.Module = AutoModelForSequenceClassification.from_config(configuration)
    return model


def _configuration(model_type: str, known: Collection[str], max_length: int, given: Mapping[str, Any]) -> Any:
    """Return the configuration with the ``given`` keys and, if it limits positions, ``max_length`` of them."""
    from transformers import AutoConfig

    if model_type not in known:
        raise RecipeError(f"model.args.model_type is {model_type!r}; {did_you_mean(model_type, known)}").of(
            "model.type_unknown", "model.args.model_type"
        )
    default = AutoConfig.for_model(model_type)
    keys = {*default.to_dict(), *default.attribute_map, "num_labels"}
    for key in given:
        if key not in keys:  # transformers would accept and ignore it
            raise RecipeError(f"unknown key model.args.{key} of a {model_type}; {did_you_mean(key, sorted(keys))}").of(
                "recipe.extra_forbidden", "model.args"
            )
    positions = {"max_position_embeddings": max_length} if hasattr(default, "max_position_embeddings") else {}
    return AutoConfig.for_model(model_type, **positions | dict(given))
