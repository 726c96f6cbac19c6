"""Small language models with random weights: their folders, their exported files, and published versions of them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from upath import UPath

from app.checksums import sha256_of_file
from app.compile.generation import exporter
from app.compile.generation.architectures import CacheShape, context_length_of
from app.compile.generation.export import copy_tokenizer, export_model, load_causal_lm
from app.config import DataConfig, ServeConfig
from app.config.data import TokenizerConfig
from app.data.tokenizer import TEMPLATE_FILE, LanguageTokenizer
from app.engines.architecture import architecture_of
from app.engines.base import ShapeProfile
from app.models.gpt import gpt
from app.models.gpt_export import to_transformers
from app.repository.manifest import (
    GENERATION_FILE,
    EngineKey,
    Generation,
    GreedyAgreement,
    Manifest,
    ModelCard,
    Perplexity,
    ServingDefaults,
)
from app.repository.repository import Repository
from app.repository.score import Score
from app.serving.config import GeneratorConfig
from app.storage import to_path
from app.tensors import OUTPUT, Tensor
from tests.publishing import CARD

VOCABULARY, LENGTH = 300, 128
END_ID = 0
"""The token ``<|endoftext|>``, which ends a document and an answer."""

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXTS = [
    "def area(width, height):\n    return width * height\n",
    "for number in range(10):\n    print(number)\n",
    "The quick brown fox jumps over the lazy dog. 这本书很好。\n",
]


def make_language_model(
    folder: Path,
    kind: Literal["gpt", "llama"] = "gpt",
    width: int = 32,
    length: int = LENGTH,
    seed: int = 0,
    has_template: bool = True,
) -> Path:
    """Write a model of two layers with random weights as a folder of transformers, and return the folder."""
    tokenizer = make_tokenizer(length)
    vocabulary = tokenizer.facts["vocab_size"]
    torch.manual_seed(seed)
    model = _gpt(vocabulary, length, width) if kind == "gpt" else _llama(vocabulary, length, width)
    model.config.bos_token_id = model.config.eos_token_id = END_ID
    model.generation_config.bos_token_id = model.generation_config.eos_token_id = END_ID
    model.save_pretrained(folder)
    tokenizer.save(to_path(folder))
    if has_template:
        (folder / TEMPLATE_FILE).write_text(TEMPLATE, encoding="utf-8")
    return folder


def make_tokenizer(length: int = LENGTH) -> LanguageTokenizer:
    """Return a byte-level tokenizer of at most ``VOCABULARY`` tokens, with ``<|endoftext|>`` as token 0."""
    config = DataConfig(source="builtin:stdlib", block_length=length, tokenizer=TokenizerConfig(vocab_size=VOCABULARY))
    return LanguageTokenizer.fit(TEXTS * 10, config)


def _gpt(vocabulary: int, length: int, width: int) -> Any:
    model = gpt(vocabulary, length, layers=2, width=width, heads=4, tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5  # otherwise it repeats one token
    return to_transformers(model.eval())


def _llama(vocabulary: int, length: int, width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def export_language_model(source: Path, folder: Path) -> Path:
    """Write what an engine opens for a folder of transformers, without a manifest. Return ``folder``."""
    export_model(load_causal_lm(source), folder)
    copy_tokenizer(source, folder)
    return folder


def copy_instead_of_export(patched: pytest.MonkeyPatch, graph: Path) -> None:
    """Have compile copy the graph of the same model, which was exported before."""

    def export(_: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (graph, graph.with_suffix(".bin")):
            shutil.copy(file, folder)

    patched.setattr(exporter, "export_model", export)


def publish_language_model(storage: UPath, name: str, source: Path, exported: Path) -> Manifest:
    """Publish an exported model as its next version, which is then in production.

    Its figures are those that ``jobs.compile`` would measure on longer texts. They are invented here.
    """
    config = load_causal_lm(source).config
    repository = Repository(storage)
    manifest = repository.publish(name, to_path(exported), card_of(config, exported, (source / TEMPLATE_FILE).exists()))
    repository.promote(name, manifest.version)
    return manifest


def card_of(config: Any, exported: Path, has_chat: bool) -> ModelCard:
    """Return the card of an exported model with this configuration of transformers."""
    length, perplexity = context_length_of(config), Perplexity(value=20.0, standard_error=1.0, tokens=1000)
    key = EngineKey(
        onnx_sha256=sha256_of_file(exported / GENERATION_FILE),
        precision="fp32",
        engine="openvino_genai",
        engine_version="of another day",
        device="cpu",
        architecture=architecture_of("cpu", "fp32"),
        profile=ShapeProfile(batch_sizes=(1, 16), lengths=(length,)),
    )
    return CARD.model_copy(
        update={
            "task": "language-modeling",
            "engine_key": key,
            "inputs": (Tensor(name="input_ids", dtype="int64", shape=(-1, -1)),),
            "outputs": (Tensor(name=OUTPUT, dtype="float32", shape=(-1, -1, config.vocab_size)),),
            "serving": ServingDefaults(max_batch_size=16, timeout_us=0, replicas=1, threads=1),
            "score": Score(metric="perplexity", value=perplexity.value, mode="min"),
            "accuracy_split": "test",
            "scores": None,
            "generation": Generation(
                context_length=length,
                vocab_size=config.vocab_size,
                end_ids=(END_ID,),
                has_chat=has_chat,
                cache_bytes_per_token=CacheShape.of(config).bytes_per_token,
                perplexity=perplexity,
                baseline_perplexity=perplexity,
                greedy=GreedyAgreement(prompts=4, tokens=64, equal_prompts=4),
            ),
        }
    )


def generator_config(storage: UPath, version: int, name: str = "writer", **bounds: Any) -> GeneratorConfig:
    """Return the configuration of a published version, with these bounds in its policy."""
    manifest = Repository(storage).manifest(name, version)
    config = GeneratorConfig.of(str(storage), manifest, ServeConfig(generation={"cache_mb": 64}))  # type: ignore[arg-type]
    return config.model_copy(update={"policy": replace(config.policy, **bounds)})
