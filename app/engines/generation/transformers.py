"""The reference for other engines: transformers, which generates one answer at a time in this process."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.engines.generation.base import (
    FinishReason,
    GenerationSettings,
    GenerationStatistics,
    Piece,
    RefusedError,
    Sampling,
)
from app.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


class TransformersGeneration:
    """A causal language model in float32, from a folder that transformers wrote. It takes the process's threads."""

    name = "transformers"

    def __init__(self, folder: Path, settings: GenerationSettings) -> None:
        del settings  # it has no cache to share, and answers one request at a time
        self._folder, self._lock = folder, asyncio.Lock()
        self._model: Any = None
        self._statistics = GenerationStatistics()

    @property
    def version(self) -> str:
        """The version of transformers."""
        return version("transformers")

    @property
    def statistics(self) -> GenerationStatistics:
        """The current counts."""
        return replace(self._statistics, running=int(self._lock.locked()))

    async def start(self) -> None:
        """Load the model. Raises EngineError if it cannot be loaded."""
        try:
            self._model = await asyncio.to_thread(_load, self._folder)
        except (OSError, ValueError) as error:
            raise EngineError(f"transformers cannot load {str(self._folder)!r}: {error}").of(
                "engine.not_loaded"
            ) from error

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        """Generate an answer, a token in each piece."""
        await self.check()
        if sampling.grammar:
            raise RefusedError("transformers follows no grammar: leave it out, or use the engine openvino_genai")
        async with self._lock:
            step = _stepper(self._model, prompt, sampling)
            for left in reversed(range(sampling.max_tokens)):
                token, logprob = await asyncio.to_thread(step)
                self._count(steps=1)
                if token in sampling.end_ids:
                    yield Piece((), (), "stop")
                    return
                self._count(generated_tokens=1)
                finish: FinishReason | None = None if left else "length"
                yield Piece((token,), (logprob,) if sampling.has_logprobs else (), finish)

    async def check(self) -> None:
        """Raise EngineError unless the model is loaded."""
        if self._model is None:
            raise EngineError("the engine has not been started, or is closed").of("engine.not_started")

    async def close(self) -> None:
        """Free the model."""
        self._model = None

    def _count(self, **more: int) -> None:
        counted = {name: getattr(self._statistics, name) + number for name, number in more.items()}
        self._statistics = replace(self._statistics, **counted)


def _load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def _stepper(model: Any, prompt: Sequence[int], sampling: Sampling) -> Callable[[], tuple[int, float]]:
    """Return a function that computes the next token and the logarithm of its probability."""
    import torch
    from transformers import DynamicCache

    cache, answer = DynamicCache(config=model.config), list[int]()
    seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
    generator = torch.Generator().manual_seed(seed % 2**63)
    choose = _chooser(prompt, sampling)

    @torch.inference_mode()
    def step() -> tuple[int, float]:
        tokens = torch.tensor([answer[-1:] or list(prompt)])
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[0, -1]
        scores = choose(logits, answer)
        token = int(
            scores.argmax() if not sampling.temperature else scores.softmax(-1).multinomial(1, generator=generator)
        )
        answer.append(token)
        return token, float(logits.log_softmax(-1)[token])

    return step


def _chooser(prompt: Sequence[int], sampling: Sampling) -> "Callable[[Tensor, list[int]], Tensor]":
    """Return a function from a token's logits and the answer so far to the scores for sampling."""
    import torch
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    warpers = LogitsProcessorList()
    if sampling.temperature:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.temperature and sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))

    def scores(logits: "Tensor", answer: list[int]) -> "Tensor":
        so_far = torch.tensor([[*prompt, *answer]])
        counts = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=len(logits))
        penalty = sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
        chosen: Tensor = warpers(so_far, processors(so_far, logits[None]) - penalty)[0]
        return chosen

    return scores
