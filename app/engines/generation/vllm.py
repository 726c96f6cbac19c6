"""The process of an engine: vLLM's scheduler and model, stepped in a loop, in an environment of their own.

The engine's core runs in this process. With tensor parallelism, each shard has a process in this one's group.
"""

from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import EngineArgs, SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from app.engines.generation.base import FinishReason, GenerationSettings, Grammar, Sampling
from app.engines.generation.channel import Begun, Progress, Ready, Refused, Step
from app.engines.generation.service import limit_memory, require_prompt, run, serving

_BLOCK_TOKENS = 32
_MIN_TEMPERATURE = 0.01
"""vLLM computes with this temperature for all lower ones, except 0."""
_TRIAL_BYTES = 2**30
"""Address space that a process may take to try grammars, beyond that of the libraries."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class _Counters(StatLoggerBase):  # type: ignore[misc] # without vLLM its base is Any
    """What vLLM's scheduler counts."""

    def __init__(self, *_: object) -> None:
        self.waiting, self.cache_usage, self.preemptions = 0, 0.0, 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: object) -> None:
        """Take over the counts of a step."""
        if scheduler_stats:
            self.waiting, self.cache_usage = scheduler_stats.num_waiting_reqs, scheduler_stats.kv_cache_usage
        if iteration_stats:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class Pipeline:
    """A loaded model with the answers that it generates.

    If the cache becomes full, vLLM preempts some answers, and later computes their cache again.
    """

    version = vllm.__version__

    def __init__(self, folder: Path, settings: GenerationSettings) -> None:
        """Load a model. Raises any error if vLLM cannot."""
        if current_platform.is_cpu():
            torch.set_num_threads(settings.threads)
        self._counters = _Counters()
        self._engine = LLMEngine.from_engine_args(
            _arguments(folder, settings), stat_loggers=[lambda *_: self._counters]
        )
        config = self._engine.model_config
        self._vocab_size, self._room = config.get_vocab_size(), config.max_model_len
        self._waiting: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}  # in the order of their arrival
        self._answers: dict[int, Sampling] = {}
        self._refused: list[Refused] = []
        self._has_cancelled = False

    @property
    def is_busy(self) -> bool:
        """Whether a step has work, including the report of a cancelled answer's cache."""
        return bool(self._waiting or self._answers or self._refused or self._has_cancelled)

    def start(self, request: int, prompt: tuple[int, ...], sampling: Sampling) -> None:
        """Add an answer. Raises ValueError if it cannot be generated."""
        require_prompt(prompt, sampling.max_tokens, self._vocab_size, self._room)
        self._waiting[request] = prompt, _parameters(sampling)
        self._answers[request] = sampling

    def cancel(self, request: int) -> None:
        """Give up an answer, and free its cache."""
        has_begun = self._waiting.pop(request, None) is None
        if self._answers.pop(request, None) and has_begun:
            self._engine.abort_request([str(request)])
            self._has_cancelled = True

    def begin_waiting(self) -> Iterator[Begun | Refused]:
        """Hand the answers to vLLM, unless some of them wait there already. Call this before each step."""
        yield from self._refused
        self._refused.clear()
        if self._counters.waiting:
            return
        for request, (prompt, parameters) in self._waiting.items():
            try:
                self._engine.add_request(str(request), {"prompt_token_ids": [*prompt]}, parameters)
            except Exception as error:  # any class, by the value that it refuses
                del self._answers[request]
                yield Refused(request, _reason(error))
                continue
            yield Begun(request)
        self._waiting.clear()

    def step(self) -> Step:
        """Generate the next tokens. Raises an error if the engine is broken for good."""
        outputs = self._engine.step() if self._engine.has_unfinished_requests() else []
        progress = [news for output in outputs if (news := self._news(output))]
        self._has_cancelled = False
        if not self._engine.has_unfinished_requests():
            self._counters.waiting, self._counters.cache_usage = 0, 0.0
        return Step(progress, self._counters.cache_usage, self._counters.preemptions)

    def _news(self, output: Any) -> Progress | None:
        request, (completion,) = int(output.request_id), output.outputs
        if (sampling := self._answers.get(request)) is None:
            return None
        finish = completion.finish_reason and _FINISHES.get(completion.finish_reason)
        if completion.finish_reason:
            del self._answers[request]
        if completion.finish_reason and not finish:
            self._refused.append(Refused(request, f"vLLM ended it with {completion.finish_reason!r}"))
            return None
        tokens = tuple(completion.token_ids)
        logprobs = tuple(
            position[token].logprob for token, position in zip(tokens, completion.logprobs or (), strict=False)
        )
        if finish == "stop" and tokens and tokens[-1] in sampling.end_ids:
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        return Progress(request, tokens, logprobs, finish)


def _arguments(folder: Path, settings: GenerationSettings) -> EngineArgs:
    if settings.precision not in _DTYPES:
        raise ValueError(f"precision {settings.precision} is not one of {', '.join(_DTYPES)}")
    if (computes_on := "cpu" if current_platform.is_cpu() else "gpu") != settings.device:
        raise ValueError(
            f"this vLLM computes on the {computes_on.upper()}, and the version is for the {settings.device.upper()}: "
            "name the Python of another one"
        )
    if settings.speculation:
        raise ValueError(f"{settings.speculation} is of openvino_genai alone: compile the model without it")
    return EngineArgs(
        model=str(folder),
        dtype=_DTYPES[settings.precision],
        max_model_len=-1,  # the model's own, or what fits in the cache
        kv_cache_memory_bytes=settings.cache_bytes,
        block_size=_BLOCK_TOKENS,
        max_num_seqs=settings.max_streams,
        max_num_batched_tokens=max(settings.max_step_tokens, settings.max_streams),
        enable_prefix_caching=settings.prefix_cache,
        tensor_parallel_size=settings.tensor_parallel,
        # Compilation takes longer on CPUs than it saves.
        enforce_eager=current_platform.is_cpu(),
        # Otherwise the model's folder would change the sampling.
        generation_config="vllm",
        use_tqdm_on_load=False,
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
    )


def _parameters(sampling: Sampling) -> SamplingParams:
    if 0 < sampling.temperature < _MIN_TEMPERATURE:
        raise ValueError(
            f"temperature is {sampling.temperature:g}: vLLM takes 0, which is greedy, or {_MIN_TEMPERATURE:g} and more"
        )
    grammar = sampling.grammar
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=sorted(sampling.end_ids),
        ignore_eos=True,  # the end tokens are given
        logprobs=0 if sampling.has_logprobs else None,
        structured_outputs=_structure(grammar) if grammar else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _structure(grammar: Grammar) -> StructuredOutputsParams:
    return StructuredOutputsParams(**{"json" if grammar.kind == "json_schema" else grammar.kind: grammar.text})


def try_grammars(folder: Path, settings: GenerationSettings, commands: Connection, results: Connection) -> None:
    """Answer each grammar with None, or with the reason for its refusal. Raises EOFError when the parent exits."""
    config = _arguments(folder, settings).create_engine_config()
    tokenizer = cached_tokenizer_from_config(config.model_config)
    compiler = XgrammarBackend(config, tokenizer, config.model_config.get_vocab_size())
    limit_memory(_TRIAL_BYTES)
    results.send(Ready(Pipeline.version))
    kinds = {"json_schema": StructuredOutputOptions.JSON, "regex": StructuredOutputOptions.REGEX}
    while True:
        grammar = commands.recv()
        try:
            parameters = SamplingParams(structured_outputs=_structure(grammar))
            parameters.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
            compiler.compile_grammar(kinds[grammar.kind], grammar.text)
            results.send(None)
        except Exception as error:  # xgrammar raises several classes
            results.send(_reason(error))


def score(folder: Path, settings: GenerationSettings, commands: Connection, results: Connection) -> None:
    """Answer each list of texts with the log-probabilities of their tokens after the first. Raises EOFError at last."""
    engine = LLMEngine.from_engine_args(_arguments(folder, replace(settings, prefix_cache=False)))
    results.send(Ready(Pipeline.version))
    parameters = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    while True:
        scored: dict[int, list[float]] = {}
        for number, text in enumerate(commands.recv()):
            engine.add_request(str(number), {"prompt_token_ids": [*text]}, parameters)
        while engine.has_unfinished_requests():
            for output in engine.step():
                pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
                scored[int(output.request_id)] = [place[token].logprob for token, place in pairs]
        results.send([scored[number] for number in sorted(scored)])


def _reason(error: Exception) -> str:
    """Return the first line of an error, or the first cause that a validation names."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    causes = [line.partition("Value error, ")[2] for line in lines if "Value error, " in line]
    return [*causes, *lines][0]


if __name__ == "__main__":
    run({"serve": serving(Pipeline, _reason), "try": try_grammars, "score": score})
