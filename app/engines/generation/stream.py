"""The state of one answer in the parent of the engine's process."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from app.engines.generation.base import LostError, Piece, Sampling
from app.engines.generation.channel import Progress, Start
from app.errors import EngineError


class Stream:
    """An answer, from its prompt to its last token, over all processes that generate it."""

    def __init__(self, request: int, prompt: tuple[int, ...], sampling: Sampling) -> None:
        self.request = request
        self.kills = 0
        """Consecutive deaths, at the same token, that only this answer can have caused."""
        self.is_suspect = False
        """Whether this answer may have killed a process, and no new token has come since."""
        self.is_submitted = False
        """Whether the current process has it."""
        self.has_begun = False
        """Whether the current process generates it. Until then it waits for room in the cache."""
        self.has_answered = False
        """Whether the current process has produced a token for it, even a repeated one."""
        self.has_progressed = False
        """Whether the current process gave it a new token."""
        self.is_finished = False
        self._prompt, self._sampling = prompt, sampling
        self._delivered: list[int] = []
        self._position = 0
        """Delivered tokens that the current process has repeated, or need not repeat."""
        self._died_at: int | None = None
        self._pieces: asyncio.Queue[Piece | EngineError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield all pieces. Raises the error that ended the answer."""
        while True:
            piece = await self._pieces.get()
            if isinstance(piece, EngineError):
                raise piece
            yield piece
            if piece.finish:
                return

    def resume(self) -> Start:
        """Return the command for the current process."""
        self.is_submitted, self.has_begun = True, False
        self.has_answered = self.has_progressed = False
        if not self._goes_on_from_tokens:
            self._position = 0
            return Start(self.request, self._prompt, self._sampling)
        self._position = len(self._delivered)
        left = replace(self._sampling, max_tokens=self._sampling.max_tokens - self._position)
        return Start(self.request, (*self._prompt, *self._delivered), left)

    @property
    def _goes_on_from_tokens(self) -> bool:
        """Whether the next token depends only on the tokens before it.

        Penalties and grammars begin with the answer, and random numbers with the process.
        """
        given = self._sampling
        has_penalty = given.presence_penalty or given.frequency_penalty or given.repetition_penalty != 1
        return given.temperature == 0 and not has_penalty and given.grammar is None

    @property
    def is_repeating(self) -> bool:
        """Whether the process had delivered tokens left to generate again."""
        return self._position < len(self._delivered)

    def interrupt(self) -> None:
        """Record that the process died. An answer that waited for room in the cache cannot be the reason."""
        self.is_suspect = self.has_begun and not self.has_progressed
        self.is_submitted = False

    def blame(self) -> bool:
        """Record a death that only this answer can have caused. A harmful request dies at the same token each time.

        Return False if the previous death was at a different token.
        """
        is_plausible = self._died_at in (None, self._position)
        self.kills = self.kills + 1 if is_plausible else 1
        self._died_at = self._position
        return is_plausible

    def advance(self, progress: Progress) -> int:
        """Deliver the new tokens, and return their number. Repeated tokens must equal the delivered ones."""
        self.has_answered = True
        repeated = min(len(progress.tokens), len(self._delivered) - self._position)
        expected = self._delivered[self._position : self._position + repeated]
        ends_early = progress.finish and self._position + len(progress.tokens) < len(self._delivered)
        if list(progress.tokens[:repeated]) != expected or ends_early:
            self.fail(LostError("the engine's process died, and another one generates other tokens: ask again"))
            return 0
        self._position += repeated
        tokens = progress.tokens[repeated:]
        if tokens or progress.finish:
            self.is_suspect, self.has_progressed, self.kills = False, True, 0
            self._delivered += tokens
            self._position += len(tokens)
            self.is_finished = progress.finish is not None
            self._pieces.put_nowait(Piece(tokens, progress.logprobs[repeated:], progress.finish))
        return len(tokens)

    def fail(self, error: EngineError) -> None:
        """End the answer with an error."""
        self._pieces.put_nowait(error)
