"""Greedy tokens of the engine, compared with transformers, and with the same prompts in other batches."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from app.engines.generation.base import GenerationSettings, Sampling
from benchmarks.generation.material import MAX_STREAMS, NEW_TOKENS, Material, prompts
from benchmarks.generation.streams import answer, answers, opened
from benchmarks.markdown import Goal, verdict

_PROMPTS = 200
_NEAR_TIE = 1e-4
_GREEDY = Sampling(max_tokens=NEW_TOKENS, has_logprobs=True)


@dataclass(frozen=True)
class Agreement:
    """The agreement of greedy tokens, as numbers of prompts."""

    equal: int
    near_ties: int
    """Prompts whose first different token was a near tie in the reference's logits."""
    company_tokens: int
    """Of ``MAX_STREAMS`` prompts, the number with the same tokens alone and beside the others."""
    company_logprobs: int
    """Of these, the number whose log-probabilities are also equal, bit for bit."""

    title: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    """The goals tell everything."""

    @property
    def goals(self) -> Iterator[Goal]:
        """The goals of this part."""
        agreed = self.equal + self.near_ties
        yield Goal(
            f"greedy tokens equal to transformers', {_PROMPTS} prompts of {NEW_TOKENS} tokens",
            "all but near ties",
            f"{self.equal} equal, {self.near_ties} near ties",
            verdict(agreed == _PROMPTS),
        )
        yield Goal(
            f"tokens alone and among {MAX_STREAMS}",
            "all equal",
            f"{self.company_tokens} of {MAX_STREAMS}",
            verdict(self.company_tokens == MAX_STREAMS),
        )
        yield Goal(
            "log-probabilities alike, bit for bit, at 1 thread",
            "all equal",
            f"{self.company_logprobs} of {MAX_STREAMS}",
            verdict(self.company_logprobs == MAX_STREAMS),
        )


def compare_greedy(material: Material) -> Agreement:
    """Compare the answers of fp32."""
    given = prompts(_PROMPTS, seed=1).tolist()
    ours, equal_tokens, equal_logprobs = asyncio.run(_ours(material, given))
    equal, near_ties = _beside_transformers(material, given, ours)
    return Agreement(equal, near_ties, equal_tokens, equal_logprobs)


async def _ours(material: Material, given: list[list[int]]) -> tuple[list[list[int]], int, int]:
    async with opened(
        material.compiled("fp32"), GenerationSettings(prefix_cache=False, max_streams=MAX_STREAMS)
    ) as engine:
        together = await answers(engine, given, _GREEDY)
        alone = [await answer(engine, prompt, _GREEDY) for prompt in given[:MAX_STREAMS]]
        company = await answers(engine, given[:MAX_STREAMS], _GREEDY)
    pairs = list(zip(alone, company, strict=True))
    tokens = sum(one.tokens == other.tokens for one, other in pairs)
    return [found.tokens for found in together], tokens, sum(one.logprobs == other.logprobs for one, other in pairs)


def _beside_transformers(material: Material, given: list[list[int]], ours: list[list[int]]) -> tuple[int, int]:
    """Return the number of equal answers, and of those that first differ at a near tie."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(material.transformers, dtype=torch.float32).eval()
    equal = near_ties = 0
    with torch.no_grad():
        for prompt, tokens in zip(given, ours, strict=True):
            # The logits of all tokens at once: each token is compared with the best one after the same tokens.
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
            best = logits.argmax(-1)
            different = (best != torch.tensor(tokens)).nonzero()
            if not len(different):
                equal += 1
                continue
            top = logits[int(different[0])].topk(2).values
            near_ties += bool(top[0] - top[1] < _NEAR_TIE)
    return equal, near_ties
