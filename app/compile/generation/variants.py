"""The variants of compiled language models, and the keys of a recipe that do not apply to them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from app.compile.variants import Skipped
from app.config import GENERATION_ENGINES, CompileConfig, ComputePrecision, EngineName, Recipe
from app.engines.architecture import Device
from app.engines.generation.base import PromptLookup
from app.errors import CompileError

_PRECISIONS: dict[tuple[EngineName, Device], tuple[ComputePrecision, ...]] = {
    ("openvino_genai", "cpu"): ("fp32", "int8", "int4"),
    ("vllm", "cpu"): ("fp32",),
    ("vllm", "gpu"): ("fp32", "bf16"),
}
"""The precisions that each engine computes in."""
_OTHERS_KEYS = (
    *("compile.calibration", "compile.int8", "compile.sparsity", "compile.workspace_mb", "compile.targets"),
    *("compile.shard_mb", "compile.batch_sizes", "compile.gates.max_difference", "compile.gates.max_accuracy_drop"),
    "compile.gates.min_cosine",
)
"""Keys for models that answer batches."""


class GenerationVariant(BaseModel):
    """A way to run a language model: the precision of its weights, with or without speculation."""

    model_config = ConfigDict(frozen=True)

    precision: ComputePrecision
    speculation: PromptLookup | None = None

    @property
    def variant(self) -> "GenerationVariant":
        """The variant itself, without its measurements."""
        return GenerationVariant(precision=self.precision, speculation=self.speculation)

    @property
    def title(self) -> str:
        """The variant in words."""
        return self.precision + (f" with {self.speculation}" if self.speculation else "")


def speculations_of(config: CompileConfig) -> list[PromptLookup]:
    """Return the kinds of speculation to measure in each precision."""
    return [PromptLookup()] if config.speculation == "prompt_lookup" else []


@dataclass(frozen=True)
class RequestedPrecisions:
    """The precisions to make for an engine, and the default precisions that language models do not have."""

    engine: EngineName
    device: Device
    precisions: Sequence[ComputePrecision]
    skipped: Sequence[Skipped]


def requested_precisions(recipe: Recipe) -> RequestedPrecisions:
    """Return the precisions of a recipe.

    Raises:
        CompileError: it names an engine, a precision or a key that language models do not have, or a gate that no
            language model can pass.
    """
    config, engine = recipe.compile, _engine_of(recipe)
    device: Device = "gpu" if config.gpus else "cpu"
    if (engine, device) not in _PRECISIONS:
        raise CompileError(
            f"compile.gpus is {config.gpus}, and {engine} computes on the CPU: leave it out, or set compile.engines "
            "to [vllm]"
        ).of("generation.key", "compile.gpus")
    supported = _PRECISIONS[engine, device]
    kinds = f"language models are compiled for {engine} on the {device.upper()} in {', '.join(supported)}"
    others = [name for name in config.precisions if name not in supported]
    if others and recipe.is_set("compile.precisions"):
        raise CompileError(f"compile.precisions names {others[0]}, and {kinds}: leave it out").of(
            "generation.precision", "compile.precisions"
        )
    if engine == "vllm" and config.speculation != "none":
        raise CompileError(
            f"compile.speculation is {config.speculation}, and {engine} is measured without it: leave it out, or use "
            "openvino_genai"
        ).of("generation.key", "compile.speculation")
    for key in _OTHERS_KEYS:
        if recipe.is_set(key):
            raise CompileError(
                f"{key} is for models that answer batches: leave it out of a language model's recipe"
            ).of("generation.key", key)
    if config.gates.above_baseline:
        raise CompileError(
            "compile.gates.above_baseline is true, and the perplexity of a language model has no baseline yet: leave "
            "it out, or limit the perplexity with compile.gates.min_score"
        ).of("gate.above_baseline", "compile.gates.above_baseline")
    return RequestedPrecisions(
        engine,
        device,
        [name for name in supported if name in config.precisions],
        [Skipped(engine=engine, precision=name, reason=kinds) for name in others],
    )


def _engine_of(recipe: Recipe) -> EngineName:
    engines = recipe.compile.engines
    names = [GENERATION_ENGINES[0]] if engines == "auto" else engines
    if unfit := [name for name in names if name not in GENERATION_ENGINES]:
        raise CompileError(
            f"compile.engines names {unfit[0]}, which does not generate tokens: name "
            f"{' or '.join(GENERATION_ENGINES)}, or leave it out"
        ).of("generation.engine", "compile.engines")
    if len(names) > 1:
        raise CompileError(
            f"compile.engines names {' and '.join(names)}, and a language model is compiled for one engine: name one"
        ).of("generation.engine", "compile.engines")
    return names[0]


def require_rows(recipe: Recipe) -> None:
    """Raise CompileError if the recipe of a model that answers batches has keys for language models."""
    config = recipe.compile
    engines = [] if config.engines == "auto" else config.engines
    if generating := [name for name in engines if name in GENERATION_ENGINES]:
        raise CompileError(
            f"compile.engines names {generating[0]}, which generates tokens, and task {recipe.task} answers rows: "
            "leave it out"
        ).of("generation.engine", "compile.engines")
    if "int4" in config.precisions:
        raise CompileError(
            f"compile.precisions names int4, which only language models have, and task {recipe.task} answers rows: "
            "name int8"
        ).of("generation.precision", "compile.precisions")
    if recipe.is_set("compile.gates.max_perplexity_rise"):
        raise CompileError(
            f"compile.gates.max_perplexity_rise is for language models, and task {recipe.task} answers rows: set "
            "compile.gates.max_accuracy_drop"
        ).of("generation.key", "compile.gates.max_perplexity_rise")
    if recipe.is_set("compile.speculation"):
        raise CompileError(
            f"compile.speculation is for language models, and task {recipe.task} answers rows: leave it out"
        ).of("generation.key", "compile.speculation")
