"""The lengths of prompts and answers that a served language model takes."""

from dataclasses import dataclass

from app.errors import RequestError


@dataclass(frozen=True)
class GenerationLimits:
    """The lengths of prompts and answers that a served model takes."""

    context_length: int
    """Maximum tokens of a prompt and its answer together."""
    cache_tokens: int
    """Tokens whose keys and values fit in the cache."""
    max_tokens: int | None
    """The limit of an answer whose request sets none. None: up to the model's length."""

    @property
    def max_total(self) -> int:
        """Maximum tokens of a prompt and one answer."""
        return min(self.context_length, self.cache_tokens)

    def default_max_tokens(self, prompt_tokens: int) -> int:
        """Return the limit of an answer whose request sets none: at least 1, so that it can be checked."""
        left = max(1, self.max_total - prompt_tokens)
        return left if self.max_tokens is None else min(left, self.max_tokens)

    def require(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raise RequestError if a prompt and an answer are too long together."""
        if prompt_tokens + max_tokens <= self.max_total:
            return
        what = "the model reads" if self.context_length <= self.cache_tokens else "the cache of the endpoint holds"
        remedy = (
            f"shorten the prompt to {self.max_total - 1} tokens at most"
            if prompt_tokens >= self.max_total
            else f"set max_tokens to {self.max_total - prompt_tokens} at most, or shorten the prompt"
        )
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together "
            f"{prompt_tokens + max_tokens}: {what} {self.max_total} tokens; {remedy}"
        ).of("prompt.too_long", "prompt" if prompt_tokens >= self.max_total else "max_tokens")
