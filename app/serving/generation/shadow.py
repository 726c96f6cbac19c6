"""A language model that gets copies of requests. Its answers are compared with those that the clients got."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Self

from app.errors import DeadlineError, OverloadError
from app.serving.batching.statistics import FailureReason
from app.serving.generation.request import Answers, Delta, GenerationRequest, Usage
from app.serving.generation.served import ServedGenerator
from app.serving.generation.tokenizer import SETTINGS_FILE, TEMPLATE_FILE, TOKENIZER_FILE

LOG = logging.getLogger(__name__)

_MAX_COPIES = 32
"""Copies that a shadow runs at a time. Nothing else limits them, because their requests are already answered."""

_PROMPT_FILES = (TOKENIZER_FILE, SETTINGS_FILE, TEMPLATE_FILE)

Source = Callable[[ServedGenerator], Awaitable[tuple[int, ...]]]
"""Returns the prompt in the tokens of a version, from the text or the messages that the client sent."""


@dataclass
class _Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    is_complete: bool = False

    def add(self, delta: Delta) -> None:
        self.tokens += [token.id for token in delta.tokens]
        self.text += delta.text
        self.is_complete = delta.finish is not None


class _Recording:
    """The answers to a request by index."""

    def __init__(self, request: GenerationRequest) -> None:
        self.answers = [_Answer() for _ in range(request.num_answers)]

    def add(self, delta: Delta) -> None:
        self.answers[delta.index].add(delta)

    @property
    def is_complete(self) -> bool:
        return all(answer.is_complete for answer in self.answers)


class _FollowedAnswers:
    """The answers that the client gets, recorded as they pass."""

    def __init__(self, answers: Answers, recording: _Recording, on_complete: Callable[[], None]) -> None:
        self._answers, self._recording, self._on_complete = answers, recording, on_complete
        self._deltas = aiter(answers)

    @property
    def version(self) -> str:
        """The version that answers."""
        return self._answers.version

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        return self._answers.usage

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Return the next part of an answer. Raises the errors of the answers."""
        delta = await anext(self._deltas)
        self._recording.add(delta)
        if self._recording.is_complete:
            self._on_complete()
        return delta

    async def aclose(self) -> None:
        """Cancel the unfinished answers."""
        await self._answers.aclose()


class GenerationShadow:
    """A version that gets copies of answered requests, if these are repeatable.

    Greedy answers are compared token by token, and all tokens after the first difference count as different. If the
    tokenizers differ, characters are compared. Seeded answers differ by chance, so only their lengths are compared.
    """

    def __init__(self, served: ServedGenerator) -> None:
        self.served = served
        self.answers = {True: 0, False: 0}
        """Greedy answers, by whether the shadow's answer is equal."""
        self.tokens = {True: 0, False: 0}
        """The tokens of the clients' greedy answers, by whether they come before the first difference."""
        self.lengths = {"client": 0, "shadow": 0}
        """The tokens of all compared answers, by who got them."""
        self._copies: set[asyncio.Task[None]] = set()  # the event loop itself holds tasks only weakly
        self._logged: set[type[BaseException]] = set()

    def follow(
        self, request: GenerationRequest, answers: Answers, answering: ServedGenerator, source: Source | None
    ) -> Answers:
        """Return the answers. When they are complete, a copy of the request runs in the background.

        Args:
            answering: the version that answers the client.
            source: the prompt as the client sent it; None if it was sent as tokens.
        """
        has_same_tokens = _reads_alike(answering, self.served, (TOKENIZER_FILE,))
        if not request.sampling.is_repeatable or not (has_same_tokens or source):
            return answers
        # Equal tokens have equal meaning, unless the versions encode the client's input differently.
        prompt = None if _reads_alike(answering, self.served, _PROMPT_FILES) else source
        recording = _Recording(request)

        def copy() -> None:
            if len(self._copies) >= _MAX_COPIES:
                self.served.statistics.failures[FailureReason.REJECTED] += 1
                return
            # In a context of its own: the trace of the client's request has ended.
            comparison = self._compare(request, recording, prompt, by_character=not has_same_tokens)
            task = asyncio.create_task(comparison, context=Context())
            self._copies.add(task)
            task.add_done_callback(self._done)

        return _FollowedAnswers(answers, recording, copy)

    async def _compare(
        self, request: GenerationRequest, theirs: _Recording, prompt: Source | None, by_character: bool
    ) -> None:
        if prompt:
            request = replace(request, prompt=await prompt(self.served))
        # The end tokens of the other version mean nothing to this one, which adds its own.
        request = replace(request, sampling=replace(request.sampling, end_ids=frozenset()))
        ours = _Recording(request)
        answers = await self.served.generate(request)
        try:
            async for delta in answers:
                ours.add(delta)
        finally:
            await answers.aclose()
        is_greedy = request.sampling.temperature == 0
        for answer, shadowed in zip(theirs.answers, ours.answers, strict=True):
            self._count(answer, shadowed, is_greedy, by_character)

    def _count(self, theirs: _Answer, ours: _Answer, is_greedy: bool, by_character: bool) -> None:
        self.lengths["client"] += len(theirs.tokens)
        self.lengths["shadow"] += len(ours.tokens)
        if not is_greedy:
            return
        expected: Sequence[object] = theirs.text if by_character else theirs.tokens
        given: Sequence[object] = ours.text if by_character else ours.tokens
        agreeing = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, given, strict=False)))
        self.answers[agreeing == len(expected) == len(given)] += 1
        self.tokens[True] += agreeing
        self.tokens[False] += len(expected) - agreeing

    def _done(self, copy: asyncio.Task[None]) -> None:
        self._copies.discard(copy)
        error = None if copy.cancelled() else copy.exception()
        # A shadow that is too slow drops copies. Its statistics count them.
        if error is None or isinstance(error, OverloadError | DeadlineError) or type(error) in self._logged:
            return
        self._logged.add(type(error))  # once for each type, since every copy may fail
        manifest = self.served.manifest
        LOG.warning("the shadow of model %r, version %s, failed", manifest.name, manifest.version, exc_info=error)


def _reads_alike(one: ServedGenerator, other: ServedGenerator, files: Sequence[str]) -> bool:
    """Return whether the files with these names are equal in two versions."""
    return all(one.manifest.files.get(file) == other.manifest.files.get(file) for file in files)
