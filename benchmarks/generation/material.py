"""The model that every contender runs: a Llama with random weights, in the form that each of them reads."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY, LENGTH = 8_192, 2_048
PROMPT_TOKENS = NEW_TOKENS = 64
MAX_STREAMS = 32
_END = "<|endoftext|>"
_ATTENTION = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
_FEED_FORWARD = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


@dataclass(frozen=True)
class Material:
    """A folder with the model in every form."""

    folder: Path

    @property
    def transformers(self) -> Path:
        """The model in the layout of transformers."""
        return self.folder / "transformers"

    def compiled(self, precision: str) -> Path:
        """The files that Rayloom's engine opens."""
        return self.folder / f"compiled-{precision}"

    def gguf(self, precision: str) -> Path:
        """The file that llama.cpp opens: f32 or q8_0."""
        return self.folder / f"{precision}.gguf"

    @property
    def storage(self) -> Path:
        """Storage with a version of each precision, named like it."""
        return self.folder / "storage"


def prompts(count: int, tokens: int = PROMPT_TOKENS, seed: int = 0) -> NDArray[np.int64]:
    """Return random prompts, of shape (count, tokens)."""
    return np.random.default_rng(seed).integers(10, VOCABULARY - 200, (count, tokens))


def write_model(folder: Path) -> int:
    """Write the model and its tokenizer for transformers. Return the number of its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1_408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            initializer_range=0.05,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    with torch.no_grad():
        # The end token is never the most probable, so that all contenders generate the same number of tokens.
        model.lm_head.weight[0] = 0
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_tokenizer(folder: Path) -> None:
    """Write a BPE tokenizer in which each token has a distinct text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {_END: 0} | {letter: 1 + place for place, letter in enumerate(letters)}
    merges: list[tuple[str, str]] = []
    for first, second in ((one, other) for one in letters for other in letters):
        if len(vocabulary) == VOCABULARY:
            break
        merges.append((first, second))
        vocabulary[first + second] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "bos_token": _END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_gguf(source: Path, file: Path) -> None:
    """Write the model for llama.cpp, in float32 or with matrices in q8_0, by the name of the file."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    is_q8 = file.stem == "q8_0"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if is_q8 else gguf.LlamaFileType.ALL_F32)
    vocabulary = tokenizer["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(vocabulary) - 1)])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    for name, tensor in _gguf_tensors(load_file(source / "model.safetensors"), config):
        array = np.ascontiguousarray(tensor, np.float32)
        if is_q8 and array.ndim > 1:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(
    tensors: dict[str, NDArray[np.float32]], config: dict[str, Any]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the tensors by llama.cpp's names. It rotates adjacent numbers of a head, where Llama rotates its halves."""
    yield "token_embd.weight", tensors["model.embed_tokens.weight"]
    yield "output_norm.weight", tensors["model.norm.weight"]
    yield "output.weight", tensors["lm_head.weight"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        source, target = f"model.layers.{layer}.", f"blk.{layer}."
        for part, name in _ATTENTION.items():
            matrix = tensors[f"{source}self_attn.{part}_proj.weight"]
            if part in heads:
                rows, columns = matrix.shape
                halves = matrix.reshape(heads[part], 2, rows // heads[part] // 2, columns)
                matrix = halves.swapaxes(1, 2).reshape(rows, columns)
            yield f"{target}{name}.weight", matrix
        for part, name in _FEED_FORWARD.items():
            yield f"{target}{name}.weight", tensors[f"{source}mlp.{part}_proj.weight"]
        yield f"{target}attn_norm.weight", tensors[f"{source}input_layernorm.weight"]
        yield f"{target}ffn_norm.weight", tensors[f"{source}post_attention_layernorm.weight"]


def make_material(folder: Path) -> Material:
    """Write every form that does not exist yet. Its imports are local, because vLLM's environment lacks them."""
    import nncf
    import openvino

    from app.compile.generation.export import copy_tokenizer, export_model, load_causal_lm
    from app.repository.manifest import GENERATION_FILE

    material = Material(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not material.transformers.exists():
        write_model(material.transformers)
    if not (fp32 := material.compiled("fp32")).exists():
        export_model(load_causal_lm(material.transformers), fp32)
        copy_tokenizer(material.transformers, fp32)
    if not (int8 := material.compiled("int8")).exists():
        shutil.copytree(fp32, int8, ignore=shutil.ignore_patterns(f"{Path(GENERATION_FILE).stem}.*"))
        graph = openvino.Core().read_model(fp32 / GENERATION_FILE)
        graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_ASYM)
        openvino.save_model(graph, int8 / GENERATION_FILE, compress_to_fp16=False)
    for precision in ("f32", "q8_0"):
        if not (file := material.gguf(precision)).exists():
            write_gguf(material.transformers, file)
    return material
