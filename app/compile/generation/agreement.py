"""The comparison of a compiled language model with transformers in float32: its tokens and its logits."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special

from app.engines.generation.base import GenerationEngine, Sampling
from app.errors import CompileError
from app.repository.manifest import GreedyAgreement

NEAR_TIE = 1.0e-4
"""Difference between two logits below which either token is right."""
MAX_SCALED_DIFFERENCE = 1.0e-3
"""Maximum difference of logits that float32 rounding can explain, as a share of their magnitude."""


@dataclass(frozen=True)
class Agreement:
    """The agreement of an engine's greedy tokens with the reference."""

    greedy: GreedyAgreement
    first_difference: str | None
    """The first token that differs, in words."""

    @property
    def failure(self) -> str | None:
        """The fault in tokens that must be equal; None if they are."""
        return self.first_difference and f"its greedy tokens differ ({self.first_difference})"


@dataclass(frozen=True)
class Parity:
    """The difference of logits from the reference."""

    max_difference: float
    scaled_difference: float
    """The largest difference, as a share of the magnitude of the logits."""
    cosine: float
    """Mean over tokens of the cosine similarity of their logits."""

    @classmethod
    def of(cls, pairs: Iterable[tuple[NDArray[np.float32], NDArray[np.float32]]]) -> Self:
        """Compare the logits of texts with the reference: each of shape (tokens, vocabulary)."""
        differences, magnitudes, cosines = [0.0], [0.0], list[float]()
        for ours, theirs in pairs:
            differences.append(float(np.abs(ours - theirs).max()))
            magnitudes.append(float(np.abs(theirs).max()))
            norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
            cosines.append(float(np.mean((ours * theirs).sum(axis=1) / np.maximum(norms, 1e-30))))
        largest = float(np.max(differences))  # unlike ``max``, it propagates NaN
        return cls(largest, largest / max(float(np.max(magnitudes)), 1e-30), float(np.mean(cosines)))

    @property
    def failure(self) -> str | None:
        """The fault in logits that must be equal; None if they are.

        Different logits may give the same greedy tokens, but other probabilities.
        """
        if self.scaled_difference <= MAX_SCALED_DIFFERENCE:
            return None
        return (
            f"its logits differ by up to {self.scaled_difference:.1e} of their magnitude, where rounding in float32 "
            f"leads to {MAX_SCALED_DIFFERENCE:.0e} at most"
        )


class ReferenceModel:
    """A causal language model of transformers in float32."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return logits of shape (length, vocabulary)."""
        with torch.inference_mode():
            logits: NDArray[np.float32] = (
                self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
            )
        if not np.isfinite(logits).all():
            raise CompileError("the model gives logits that are not finite: train it again, or restore its weights").of(
                "generation.not_finite"
            )
        return logits

    def compare(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Agreement:
        """Compare answers with the most probable tokens.

        The reference reads the answer's own tokens before each compared one, so a near tie does not affect later ones.
        """
        equal, first = 0, None
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            logits = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
            lost = logits.max(axis=1) - logits[np.arange(len(answer)), answer]
            wrong = np.flatnonzero(~(lost < NEAR_TIE))
            equal += not len(wrong)
            if len(wrong) and first is None:
                place = int(wrong[0])
                first = (
                    f"prompt {number + 1} of {len(prompts)}, token {place + 1}: {answer[place]}, where transformers "
                    f"gives {int(logits[place].argmax())}, whose logit is {lost[place]:.1e} higher"
                )
        tokens = sum(map(len, answers))
        return Agreement(GreedyAgreement(prompts=len(prompts), tokens=tokens, equal_prompts=equal), first)

    def log_probabilities(self, text: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probability of each token after the first, of shape (1, tokens)."""
        logits = self.logits(text)[:-1]
        chosen: NDArray[np.float32] = logits[np.arange(len(logits)), text[1:]] - special.logsumexp(logits, axis=1)
        return chosen[None]


async def greedy(engine: GenerationEngine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Return ``num_tokens`` greedy tokens after each prompt, all generated in one batch."""

    async def answer(prompt: Sequence[int]) -> list[int]:
        tokens: list[int] = []
        async for piece in engine.generate(prompt, Sampling(max_tokens=num_tokens)):
            tokens += piece.tokens
        return tokens

    return await asyncio.gather(*map(answer, prompts))


def first_difference(expected: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> str | None:
    """Return the first token that differs, in words; None if all answers are equal."""
    for number, (theirs, ours) in enumerate(zip(expected, answers, strict=True)):
        for place, (right, given) in enumerate(zip(theirs, ours, strict=True)):
            if given != right:
                return f"prompt {number + 1} of {len(expected)}, token {place + 1}: {given} instead of {right}"
    return None
