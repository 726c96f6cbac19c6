"""Engines of language models by name. The library of an engine is imported when the engine is opened."""

from collections.abc import Callable
from pathlib import Path

from app.engines.generation.base import GenerationEngine, GenerationSettings
from app.engines.generation.process import SupervisedGeneration
from app.engines.generation.program import Program, openvino, vllm
from app.errors import EngineError
from app.import_string import did_you_mean

_PROGRAMS: dict[str, Callable[[], Program]] = {"openvino_genai": openvino, "vllm": vllm}
"""Engines that run in a process of their own."""


def open_generation(name: str, folder: Path, settings: GenerationSettings | None = None) -> GenerationEngine:
    """Return an engine for a model's folder. It loads the model when it starts.

    Raises:
        EngineError: no engine that generates has this name, or its environment is missing.
    """
    given = settings or GenerationSettings()
    if program := _PROGRAMS.get(name):
        return SupervisedGeneration(program(), folder, given)
    if name != "transformers":
        names = [*_PROGRAMS, "transformers"]
        raise EngineError(f"no engine that generates is called {name!r}; {did_you_mean(name, names)}").of(
            "engine.unknown"
        )
    from app.engines.generation.transformers import TransformersGeneration

    return TransformersGeneration(folder, given)
