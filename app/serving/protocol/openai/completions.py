"""Requests to continue texts.

https://developers.openai.com/api/reference/resources/completions/methods/create
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from app.errors import RequestError
from app.serving.protocol.openai.fields import GenerationFields, unsupported

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""
_MAX_PROMPTS, _MAX_TOKENS = 32, 2**20

Tokens = Annotated[list[int], Field(max_length=_MAX_TOKENS, fail_fast=True)]
_ONLY_VALID = Field(max_length=_MAX_PROMPTS, fail_fast=True)


class CompletionRequest(GenerationFields):
    """The body of ``/v1/completions``."""

    prompt: str | Tokens | Annotated[list[str], _ONLY_VALID] | Annotated[list[Tokens], _ONLY_VALID] = Field(
        description="a text, its tokens, or a list of either"
    )
    logprobs: Annotated[Any, unsupported("know the probabilities of other tokens than the chosen ones", 0)] = Field(
        default=None, description="0: send the log-probability of each token of the answer"
    )
    best_of: Annotated[Any, unsupported("choose among answers", 1)] = None
    echo: Annotated[Any, unsupported("repeat the prompt", False)] = None
    suffix: Annotated[Any, unsupported("fill in before a suffix", "")] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens are answered with their log-probabilities."""
        return self.logprobs is not None

    @property
    def prompts(self) -> Sequence[str | Tokens]:
        """The prompts. Raises RequestError if there are none."""
        given = self.prompt
        prompts: Sequence[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not prompts:
            raise RequestError("prompt is an empty list: give a prompt").of("prompt.empty", "prompt")
        return prompts
