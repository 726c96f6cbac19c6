"""The architectures of transformers that can be exported, and the configurations that are refused."""

from dataclasses import dataclass
from typing import Any, Self

from app.errors import CompileError
from app.import_string import did_you_mean

ARCHITECTURES = (
    *("gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "opt", "phi3", "qwen2", "qwen3"),
    *("smollm3", "starcoder2"),
)
"""The ``model_type`` of each architecture whose exported graph gave the tokens of transformers. Each model is compared
again before it is published."""

_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Types of rotary positions whose angles do not depend on the length of the text. Others would be wrong beyond the
length of the example that the export traces."""

_WHOLE_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class CacheShape:
    """The shape of the keys and values that a model keeps for each token."""

    layers: int
    heads: int
    """Heads of the keys and values, which may be fewer than the heads of the queries."""
    width: int

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the shape for the configuration of a model of transformers."""
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, width)

    @property
    def bytes_per_token(self) -> int:
        """Memory for a token, in float32."""
        return 4 * 2 * self.layers * self.heads * self.width


def context_length_of(config: Any) -> int:
    """Return the maximum number of tokens that a model reads."""
    return int(config.max_position_embeddings)


def require_exportable(config: Any) -> None:
    """Check that a model of this configuration can be exported.

    Raises:
        CompileError: the architecture has not been compared, its attention window is shorter than its length, or the
            angles of its positions depend on the length.
    """
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise CompileError(
            f"the model is a {kind}, whose exported form has not been proved equal to transformers: "
            f"{did_you_mean(kind, ARCHITECTURES)}"
        ).of("generation.architecture")
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if unknown := [layer for layer in layers if layer not in _WHOLE_LAYERS]:
        raise CompileError(
            f"the {kind} has layers of {unknown[0]}, which cannot be exported: give a model that attends to all "
            "tokens before"
        ).of("generation.architecture")
    window, length = getattr(config, "sliding_window", None), context_length_of(config)
    if window is not None and window < length and "sliding_attention" in layers:
        raise CompileError(
            f"the {kind} attends to the last {window:,} tokens, and reads {length:,}: the exported form would attend "
            f"to all of them, and its tokens would be others; set max_position_embeddings to {window} in config.json, "
            "to serve prompts of that length"
        ).of("generation.window")
    for rotation in _rotations(config):
        if rotation not in _FIXED_ROTATIONS:
            raise CompileError(
                f"the {kind} has rotary positions of type {rotation}, whose angles depend on the length of the text, "
                f"and an exported model has fixed ones: give a model with {', '.join(_FIXED_ROTATIONS)}"
            ).of("generation.rotation")


def _rotations(config: Any) -> set[str]:
    """Return the types of rotary positions. Some models have one type for each kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    each = given.values() if all(isinstance(value, dict) for value in given.values()) else [given]
    return {parameters.get("rope_type", "default") for parameters in each}
