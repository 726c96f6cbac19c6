"""A request for generated text and its answer, independent of the protocol."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

from app.engines.generation.base import Sampling


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, with the parameters of its answers. The served model has checked it."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    """Texts that end an answer. They are not part of it."""
    num_answers: int = 1
    priority: int = 0
    """1 is the most urgent; 0 means the default."""
    timeout_s: float | None = None
    """Limit on the time from the request's arrival to the complete answer."""


@dataclass(frozen=True)
class GeneratedToken:
    """A token of an answer."""

    id: int
    text: bytes
    """Its bytes, which need not be valid UTF-8 by themselves."""
    logprob: float | None = None
    offset: int = 0
    """The offset of its first character in the answer's text."""


@dataclass(frozen=True)
class Delta:
    """The next part of an answer."""

    index: int
    """The index of the answer within the request."""
    text: str
    """Complete characters. A stop text or the beginning of one is never sent."""
    tokens: tuple[GeneratedToken, ...]
    finish: Literal["stop", "length"] | None = None
    """Set in the last part of this answer."""


@dataclass
class Usage:
    """Tokens of a request. Complete when its stream ends."""

    prompt_tokens: int
    completion_tokens: int = 0


class Answers(Protocol):
    """The answers to a request, as a stream. Closing it cancels them, and frees their cache."""

    @property
    def version(self) -> str:
        """The version that answers."""
        ...

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def aclose(self) -> None:
        """Cancel the unfinished answers."""
        ...
