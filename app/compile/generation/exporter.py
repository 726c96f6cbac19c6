"""Exporters write a language model's variants for one engine, and measure them with the engine's numerics."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from app.compile.generation.agreement import Parity, ReferenceModel
from app.compile.generation.architectures import CacheShape, context_length_of
from app.compile.generation.export import copy_files, copy_tokenizer, export_model, load_causal_lm
from app.compile.generation.perplexity import CompiledModel, Losses
from app.compile.generation.source import GenerationSource
from app.compile.generation.weights import compress_weights
from app.config import ComputePrecision, EngineName
from app.data.language import Passage
from app.data.prepared import IGNORED
from app.engines.architecture import Device
from app.engines.generation.base import GenerationSettings
from app.engines.generation.program import vllm
from app.engines.generation.scorer import score
from app.repository.manifest import GENERATION_FILE

_CACHED_TEXTS = 4
"""Size of the cache for scoring, in texts of the model's full length."""


class Exporter(ABC):
    """Writes the variants of a source for an engine, and measures them."""

    def __init__(self, source: GenerationSource, device: Device) -> None:
        self._source, self._device = source, device

    @abstractmethod
    def export(self, precision: ComputePrecision, folder: Path, fp32: Path) -> str:
        """Write a variant, and return a description of its weights. ``fp32`` has the variant in float32.

        Raises:
            CompileError: the model cannot be exported in this precision.
        """

    @abstractmethod
    def losses(self, precision: ComputePrecision, folder: Path, texts: Sequence[Passage]) -> Losses:
        """Return the cross-entropy of a variant on some texts. Raises CompileError or EngineError."""

    @abstractmethod
    def parity(
        self, precision: ComputePrecision, folder: Path, reference: ReferenceModel, texts: Sequence[Sequence[int]]
    ) -> Parity:
        """Compare the numbers of a variant with the reference. Raises CompileError or EngineError."""


class OpenVinoExporter(Exporter):
    """Exports stateful graphs that hold the cache. NNCF compresses their weights."""

    def export(self, precision: ComputePrecision, folder: Path, fp32: Path) -> str:
        """Write a graph, as in ``Exporter.export``."""
        if precision == "fp32":
            export_model(self._source.model, folder)
            told = "float32"
        else:
            assert precision in ("int8", "int4")
            told = compress_weights(fp32 / GENERATION_FILE, folder, precision)
        copy_tokenizer(self._source.folder, folder)
        return told

    def losses(self, _: ComputePrecision, folder: Path, texts: Sequence[Passage]) -> Losses:
        """Return the cross-entropy of a graph, as in ``Exporter.losses``."""
        return CompiledModel(folder / GENERATION_FILE, self._source.threads).losses(texts)

    def parity(
        self, _: ComputePrecision, folder: Path, reference: ReferenceModel, texts: Sequence[Sequence[int]]
    ) -> Parity:
        """Compare all logits."""
        compiled = CompiledModel(folder / GENERATION_FILE, self._source.threads)
        return Parity.of((compiled.logits(np.array([text], np.int64))[0], reference.logits(text)) for text in texts)


class VllmExporter(Exporter):
    """Exports transformers folders for vLLM, which returns log-probabilities of a text's tokens but no logits."""

    def export(self, precision: ComputePrecision, folder: Path, fp32: Path) -> str:
        """Write a folder of transformers, as in ``Exporter.export``."""
        folder.mkdir(parents=True, exist_ok=True)
        copy_files(self._source.folder, folder)
        model, kind = self._source.model, "float32"
        if precision == "bf16":
            model, kind = load_causal_lm(fp32).bfloat16(), "bfloat16"
        model.save_pretrained(folder, max_shard_size="1TB")  # in one file, which identifies the model
        return kind

    def losses(self, precision: ComputePrecision, folder: Path, texts: Sequence[Passage]) -> Losses:
        """Return the cross-entropy, without the last targets of a passage of the model's full length."""
        # The targets are the tokens after the first, and one more, which may be ignored.
        whole = [[*text.tokens, *(target for target in text.targets[-1:] if target != IGNORED)] for text in texts]
        scored = self._score(precision, folder, [[int(token) for token in tokens] for tokens in whole])
        return Losses.of((text, -row[0].astype(np.float64)) for text, row in zip(texts, scored, strict=True))

    def parity(
        self, precision: ComputePrecision, folder: Path, reference: ReferenceModel, texts: Sequence[Sequence[int]]
    ) -> Parity:
        """Compare the log-probabilities of the texts' tokens."""
        scored = zip(texts, self._score(precision, folder, texts), strict=True)
        return Parity.of((row, reference.log_probabilities(text[: row.size + 1])) for text, row in scored)

    def _score(
        self, precision: ComputePrecision, folder: Path, texts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        """Return the log-probabilities of each text's tokens after the first, of shape (1, tokens)."""
        config = self._source.model.config
        length = context_length_of(config)
        cache_bytes = _CACHED_TEXTS * length * CacheShape.of(config).bytes_per_token
        settings = GenerationSettings(precision, self._source.threads, cache_bytes, device=self._device)
        # vLLM reads fewer tokens than the model's length.
        scored = asyncio.run(score(vllm(), folder, settings, [text[: length - 1] for text in texts]))
        return [np.array([row], np.float32) for row in scored]


EXPORTERS: dict[EngineName, type[Exporter]] = {"openvino_genai": OpenVinoExporter, "vllm": VllmExporter}
