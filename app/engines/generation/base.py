"""The interface of engines that generate tokens, and what their callers exchange with them."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from app.errors import EngineError

if TYPE_CHECKING:
    # The engine's process imports this module. Without the recipe's types, it starts sooner.
    from app.config import ComputePrecision

FinishReason = Literal["stop", "length"]
"""The end of an answer: an end token of the model, or the limit of tokens."""


@dataclass(frozen=True)
class Grammar:
    """A grammar that the text of an answer must follow."""

    kind: Literal["json_schema", "regex"]
    text: str


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of one answer. Callers have checked the values."""

    max_tokens: int
    """Maximum number of generated tokens, 1 or more."""
    temperature: float = 0.0
    """0: greedy, which takes the most probable token."""
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    """None: the engine chooses one, which the caller does not know."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, and are not part of it."""
    grammar: Grammar | None = None
    has_logprobs: bool = False
    """Whether each piece has the log-probabilities of its tokens."""

    @property
    def is_repeatable(self) -> bool:
        """Whether the same prompt gives the same tokens again."""
        return self.temperature == 0 or self.seed is not None


@dataclass(frozen=True)
class Piece:
    """The next tokens of an answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """The natural logarithm of each token's probability, before penalties and temperature. Empty unless requested."""
    finish: FinishReason | None = None
    """Set in the last piece of the answer."""


@dataclass(frozen=True)
class PromptLookup:
    """Speculation from repeated text.

    If the last few tokens occurred before, the tokens that followed them become a draft. Each step verifies the draft
    and keeps the tokens that the model would have generated, so it may yield several. The answers stay the same.
    """

    tokens: int = 4
    """Maximum draft tokens that a step verifies for each answer."""
    ngram: int = 3
    """Maximum number of last tokens that are searched for."""

    def __str__(self) -> str:
        return f"prompt lookup of {self.tokens}"


@dataclass(frozen=True)
class GenerationSettings:
    """Settings for opening a language model."""

    precision: "ComputePrecision" = "fp32"
    """The precision of the weights. Computation and cache use bfloat16 for bf16, and float32 otherwise."""
    threads: int = 1
    cache_bytes: int = 2**30
    """Memory for the key-value cache of all answers."""
    max_streams: int = 64
    """Maximum number of answers that are generated at a time. Others wait."""
    max_step_tokens: int = 256
    """Maximum tokens of one step. Long prompts are read in chunks of this size, between the tokens of other answers.

    The engine increases it if a step of all answers, including speculated tokens, needs more.
    """
    prefix_cache: bool = True
    """Whether prompts reuse the cache of a common prefix."""
    speculation: PromptLookup | None = None
    """None: each step gives an answer one token."""
    device: Literal["cpu", "gpu"] = "cpu"
    """The device that the version was compiled for. An engine that computes on another one refuses it."""
    tensor_parallel: int = 1
    """Number of GPUs that share the model's matrices."""

    @property
    def speculated_tokens(self) -> int:
        """Tokens that a step checks for each answer, beyond the next one."""
        return self.speculation.tokens if self.speculation else 0


@dataclass(frozen=True)
class GenerationStatistics:
    """Counters of an engine since it started, over all its processes."""

    running: int = 0
    """Answers that are being generated."""
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    """Answers that were preempted: the engine took away their cache, and computed it again later."""
    cache_usage: float = 0.0
    """The share of the cache that is in use, from 0 to 1."""
    restarts: int = 0
    """Processes that died and were replaced."""


class RefusedError(EngineError):
    """The engine refuses one request, for example because it cannot follow the grammar. Other requests go on."""


class LostError(EngineError):
    """The engine's process died, and the next one did not repeat the delivered tokens."""


class GenerationEngine(Protocol):
    """A language model in memory. Its methods are called on one event loop, and none of them blocks it."""

    @property
    def name(self) -> str:
        """The name in recipes and manifests."""
        ...

    @property
    def version(self) -> str:
        """The version of the library, once the engine has started."""
        ...

    @property
    def statistics(self) -> GenerationStatistics:
        """The current counts."""
        ...

    async def start(self) -> None:
        """Load the model. Raises EngineError if it cannot be loaded."""
        ...

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        """Generate an answer to a prompt. Closing the iterator cancels it, and frees its cache within two steps.

        Args:
            prompt: at least one token, all within the vocabulary. With ``max_tokens`` it fits the model's length.

        Raises:
            RefusedError: the engine refuses this request.
            LostError: its process died, and another one did not repeat the delivered tokens.
            EngineError: the engine failed or is closed.
        """
        ...

    async def check(self) -> None:
        """Raise EngineError if the engine does not answer and cannot be replaced."""
        ...

    async def close(self) -> None:
        """End all answers, and free the memory."""
        ...
