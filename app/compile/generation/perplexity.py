"""The perplexity of a compiled language model on passages of text, its rise over another model's, and their errors."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import openvino
from numpy.typing import NDArray
from scipy import special, stats

from app.data.language import Passage
from app.data.prepared import IGNORED
from app.engines.openvino import load_apart
from app.errors import CompileError
from app.repository.manifest import Perplexity

_CONFIDENCE = 0.95
_LOGITS_BYTES = 2**26
"""Memory for the logits of one call."""


class CompiledModel:
    """A graph of ``export_model`` in memory, with the numerics of the engine that serves it."""

    def __init__(self, graph: Path, threads: int) -> None:
        properties = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,
        }
        self._model = load_apart(lambda: openvino.Core().compile_model(graph, "CPU", properties))
        self._request = self._model.create_infer_request()
        self._vocabulary = self._model.output("logits").get_partial_shape()[-1].get_length()

    def logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return logits of shape (rows, length, vocabulary) for tokens of shape (rows, length)."""
        self._request.reset_state()
        count, length = rows.shape
        # Not ``infer``, which loses errors with one thread: see app/engines/openvino.py.
        self._request.start_async(
            {
                "input_ids": rows,
                "attention_mask": np.ones_like(rows),
                "position_ids": np.tile(np.arange(length), (count, 1)),
                "beam_idx": np.arange(count, dtype=np.int32),
            }
        )
        self._request.wait()
        logits: NDArray[np.float32] = self._request.results["logits"]
        return logits

    def losses(self, passages: Sequence[Passage]) -> "Losses":
        """Return the cross-entropy of every target, summed for each document. Raises CompileError as ``Losses.of``."""
        return Losses.of(self._scored(passages))

    def _scored(self, passages: Sequence[Passage]) -> Iterator[tuple[Passage, NDArray[np.float64]]]:
        for batch in self._batches(passages):
            logits = self.logits(_padded([passage.tokens for passage in batch], 0))
            for passage, row in zip(batch, logits, strict=True):
                chosen = row[: len(passage.targets)].astype(np.float64)
                targets = np.maximum(passage.targets, 0)  # those that are ignored are not counted
                yield passage, special.logsumexp(chosen, axis=1) - chosen[np.arange(len(targets)), targets]

    def _batches(self, passages: Sequence[Passage]) -> Iterator[list[Passage]]:
        """Yield batches of passages with similar lengths. Padding follows the text, so causal attention ignores it."""
        batch: list[Passage] = []
        for passage in sorted(passages, key=lambda passage: len(passage.tokens)):
            if batch and 4 * self._vocabulary * len(passage.tokens) * (len(batch) + 1) > _LOGITS_BYTES:
                yield batch
                batch = []
            batch.append(passage)
        yield batch


def _padded(rows: Sequence[NDArray[np.int64]], filler: int) -> NDArray[np.int64]:
    padded = np.full((len(rows), max(map(len, rows))), filler, np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


@dataclass(frozen=True)
class Losses:
    """The cross-entropy of texts in nats, for each document."""

    sums: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @classmethod
    def of(cls, scored: Iterable[tuple[Passage, NDArray[np.float64]]]) -> Self:
        """Sum the losses of passages for each document. Losses of a passage's last targets may be missing.

        Raises:
            CompileError: a loss is not finite, or no token is a target.
        """
        sums, tokens = defaultdict[int, float](float), defaultdict[int, int](int)
        for passage, losses in scored:
            for place in np.flatnonzero(passage.targets[: len(losses)] != IGNORED):
                document = int(passage.documents[place])
                sums[document] += float(losses[place])
                tokens[document] += 1
        if not tokens:
            raise CompileError(
                "no token of the compared texts is a target, so there is no perplexity: give longer texts"
            ).of("generation.no_targets")
        if not all(map(math.isfinite, sums.values())):
            raise CompileError("it gives numbers that are not finite").of("generation.not_finite")
        numbers = sorted(tokens)
        return cls(np.array([sums[number] for number in numbers]), np.array([tokens[number] for number in numbers]))

    @property
    def perplexity(self) -> Perplexity:
        """exp of the mean loss per token, with its error by the delta method."""
        loss, error = _mean(self.sums, self.tokens)
        value = _exp(loss)
        return Perplexity(
            value=value, standard_error=None if math.isnan(error) else value * error, tokens=int(self.tokens.sum())
        )

    def rise_over(self, other: "Losses") -> "Rise":
        """Return the rise of the perplexity over another model's on the same documents."""
        difference, error = _mean(self.sums - other.sums, self.tokens)
        quantile = stats.t.ppf((1 + _CONFIDENCE) / 2, max(1, len(self.tokens) - 1))
        return Rise(math.expm1(difference), _exp(difference + quantile * error) - 1, len(self.tokens))


@dataclass(frozen=True)
class Rise:
    """The rise of a perplexity as a share of the other's, on the same documents."""

    value: float
    high: float
    """The upper end of its 95 % interval, for other documents of the same kind. NaN if there is only one document."""
    documents: int

    def failure(self, limit: float) -> str | None:
        """Return why it fails the gate ``compile.gates.max_perplexity_rise``; None if it passes.

        The upper end counts, since a small sample could hide a rise.
        """
        if math.isnan(self.high):
            return "its perplexity was measured on a single document, and the gate needs two or more: give more text"
        if self.high <= limit:
            return None
        return f"perplexity rises by {self}, and compile.gates.max_perplexity_rise is {limit:.2%}"

    def __str__(self) -> str:
        return f"{self.value:.2%} (95 %: up to {self.high:.2%})"


def _mean(sums: NDArray[np.float64], tokens: NDArray[np.int64]) -> tuple[float, float]:
    """Return the mean per token, and its standard error over documents of different sizes: NaN if there is only one.

    The error is that of a ratio of sums (Cochran 1977, "Sampling Techniques", section 2.11).
    """
    total, count = int(tokens.sum()), len(tokens)
    mean = float(sums.sum()) / total
    if count < 2:
        return mean, math.nan
    spread = np.sqrt(np.square(sums - mean * tokens).sum() * count / (count - 1))
    return mean, float(spread) / total


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0)) if not math.isnan(value) else math.nan
