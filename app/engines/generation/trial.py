"""Trials of grammars in a separate process, before the engine's process gets them.

A grammar that xgrammar cannot compile breaks the pipeline for all answers. Some grammars take all memory or never end.
"""

import asyncio
from pathlib import Path

from app.engines.generation.base import GenerationSettings, Grammar, RefusedError
from app.engines.generation.child import Child
from app.engines.generation.program import Program
from app.errors import EngineError

_MAX_CHARACTERS = 65_536
_TIMEOUT_S = 2.0
_LOAD_TIMEOUT_S = 120.0
_CACHED = 256


class GrammarTrial:
    """Compiles grammars, one at a time. Its process starts with the first grammar."""

    def __init__(self, program: Program, folder: Path, settings: GenerationSettings) -> None:
        self._program, self._folder, self._settings = program, folder, settings
        self._lock = asyncio.Lock()
        self._child: Child | None = None
        self._refusals: dict[Grammar, str | None] = {}
        """The results of the last trials: None for a grammar that can be followed."""

    async def check(self, grammar: Grammar) -> None:
        """Raise RefusedError if a grammar cannot be followed, or is too large to find out."""
        if len(grammar.text) > _MAX_CHARACTERS:
            raise RefusedError(
                f"the {grammar.kind} has {len(grammar.text):,} characters: expected {_MAX_CHARACTERS:,} at most"
            )
        async with self._lock:
            if grammar not in self._refusals:
                self._refusals[grammar] = await self._refusal(grammar)
                if len(self._refusals) > _CACHED:
                    del self._refusals[next(iter(self._refusals))]
            refusal = self._refusals[grammar]
        if refusal is not None:
            raise RefusedError(f"the {grammar.kind} cannot be followed: {refusal}")

    async def close(self) -> None:
        """End the process."""
        await self._end()

    async def _refusal(self, grammar: Grammar) -> str | None:
        """Return the reason why a grammar cannot be followed; None if it can.

        Raises:
            RefusedError: the process did not answer. On a less busy machine, it may answer.
        """
        if self._child and self._child.has_ended:
            await self._end()
        if self._child is None:
            self._child = await Child.load(self._program, "try", self._folder, self._settings, _LOAD_TIMEOUT_S)
        self._child.send(grammar)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                refusal: str | None = await self._child.receive()
                return refusal
        except TimeoutError:
            why = f"takes longer than {_TIMEOUT_S:g} s"
        except EngineError:
            why = "takes too much memory or stack"
        except BaseException:
            await self._end()
            raise
        await self._end()
        raise RefusedError(f"the {grammar.kind} cannot be followed: compiling it {why}; make it simpler")

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child:
            await child.end()
