"""Log-probabilities of a text's tokens, from engines whose program has the role ``score``."""

from collections.abc import Sequence
from pathlib import Path

from app.engines.generation.base import GenerationSettings
from app.engines.generation.child import Child
from app.engines.generation.program import Program

_LOAD_TIMEOUT_S = 600.0


async def score(
    program: Program, folder: Path, settings: GenerationSettings, texts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the log-probability of each token after the first, in a process that ends afterwards.

    Args:
        program: the program of the engine.
        folder: the model.
        settings: how to load it.
        texts: token ids. Each text must be shorter than the model's context length.

    Raises:
        EngineError: the process cannot load the model, or died.
    """
    child = await Child.load(program, "score", folder, settings, _LOAD_TIMEOUT_S)
    try:
        child.send(texts)
        scored: list[list[float]] = await child.receive()
    finally:
        await child.end()
    return scored
