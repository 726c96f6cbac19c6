"""The process of an engine: OpenVINO GenAI's continuous batching, stepped in a loop.

``ContinuousBatchingPipeline.step`` holds the GIL, so it would block every other thread of a replica.
"""

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from app.engines.generation.base import FinishReason, GenerationSettings, Grammar, PromptLookup, Sampling
from app.engines.generation.channel import Begun, Progress, Ready, Refused, Step
from app.engines.generation.service import limit_memory, require_prompt, run, serving

_BLOCK_TOKENS = 32
"""Tokens of a block of the cache on CPUs."""
_TRIAL_CACHE_BYTES, _TRIAL_TOKENS = 2**24, 2
_TRIAL_BYTES = 512 * 2**20
"""Address space that a process may take to try grammars, beyond that of the loaded model."""
_FINISHES: dict[genai.GenerationFinishReason, FinishReason] = {
    genai.GenerationFinishReason.STOP: "stop",
    genai.GenerationFinishReason.LENGTH: "length",
}


@dataclass(frozen=True)
class _Waiting:
    prompt: tuple[int, ...]
    sampling: Sampling
    config: genai.GenerationConfig
    blocks: int
    """The cache that the prompt and the longest answer take."""


@dataclass
class _Answer:
    handle: Any
    """OpenVINO GenAI does not export the class."""
    sampling: Sampling
    blocks: int
    is_decoding: bool = False
    """Whether the last step gave it a token."""
    has_begun: bool = False
    """Whether a step has given it one, so that its prompt was read."""


class Pipeline:
    """A loaded model with the answers that it generates.

    An answer begins once the cache has room for its prompt and all its tokens. If the cache becomes full, OpenVINO
    GenAI 2026.4 preempts some answers, computes their cache again, and then gives some of them wrong tokens.

    It also gives wrong tokens, or fails, if a step has no room for the speculated tokens of all answers. So the size of
    a step allows for them, and no more than ``max_streams`` answers begin: the library's own limit has no effect.

    If an answer is cancelled before its prompt was read, the library keeps the unread part in its prefix cache, and
    later answers to prompts that begin alike get wrong tokens. So the prompt is read first.
    """

    version = version("openvino-genai")

    def __init__(self, folder: Path, settings: GenerationSettings) -> None:
        """Load a model. Raises RuntimeError if OpenVINO cannot."""
        self.vocab_size, token_bytes = _dimensions(folder)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 0
        scheduler.num_kv_blocks = max(1, settings.cache_bytes // (_BLOCK_TOKENS * token_bytes))
        self._max_streams, self._lookup = settings.max_streams, settings.speculation
        self._speculated_tokens = settings.speculated_tokens
        scheduler.max_num_batched_tokens = max(
            settings.max_step_tokens, settings.max_streams * (1 + settings.speculated_tokens)
        )
        scheduler.max_num_seqs = settings.max_streams
        scheduler.enable_prefix_caching = self._keeps_prefixes = settings.prefix_cache
        scheduler.dynamic_split_fuse = True
        properties = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": settings.threads,
            # With pinning, every process would start at the first core, so all replicas would share that core.
            "ENABLE_CPU_PINNING": False,
            "prompt_lookup": self._lookup is not None,
        }
        if settings.threads == 1:
            # With a stream of one thread, OpenVINO 2026.4 hides errors and returns an earlier step's outputs. Without a
            # stream, it computes on the calling thread alone.
            properties["NUM_STREAMS"] = 0
        self._num_blocks = scheduler.num_kv_blocks
        self._pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._waiting: dict[int, _Waiting] = {}  # in the order of their arrival
        self._answers: dict[int, _Answer] = {}
        self._unread: list[_Answer] = []  # cancelled before their prompts were read
        self._leaving_blocks = 0
        self._preemptions = 0

    @property
    def is_busy(self) -> bool:
        """Whether a step has work, including the removal of a cancelled answer."""
        return bool(self._waiting or self._answers or self._unread) or self._pipeline.has_non_finished_requests()

    def start(self, request: int, prompt: tuple[int, ...], sampling: Sampling) -> None:
        """Add an answer. Raises an error if it cannot be generated. Its class depends on the refused value."""
        room = self._num_blocks * _BLOCK_TOKENS - self._speculated_tokens
        require_prompt(prompt, sampling.max_tokens, self.vocab_size, room)
        length = len(prompt) + sampling.max_tokens + self._speculated_tokens
        self._waiting[request] = _Waiting(
            prompt, sampling, _config(sampling, self._lookup), -(-length // _BLOCK_TOKENS)
        )

    def cancel(self, request: int) -> None:
        """Give up an answer. The next step frees its cache, or the step after its prompt has been read."""
        self._waiting.pop(request, None)
        if answer := self._answers.pop(request, None):
            self._unread.append(answer)
            self._cancel_read()

    def _cancel_read(self) -> None:
        """Cancel those given-up answers whose prompts have been read."""
        for answer in [answer for answer in self._unread if self._may_cancel(answer)]:
            self._unread.remove(answer)
            answer.handle.cancel()
            self._leaving_blocks += answer.blocks

    def _may_cancel(self, answer: _Answer) -> bool:
        """Return whether nothing unread of an answer's prompt would stay in the prefix cache."""
        return not self._keeps_prefixes or answer.has_begun or bool(answer.handle.can_read())

    def step(self) -> Step:
        """Generate the next tokens. Raises RuntimeError if the pipeline is broken for good."""
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._leaving_blocks = 0
        self._cancel_read()
        progress = [news for request, answer in list(self._answers.items()) if (news := self._news(request, answer))]
        left = len(self._answers) + len(self._unread)
        if left and not progress and not self._pipeline.has_non_finished_requests():
            # Their clients would wait forever.
            raise RuntimeError(f"the pipeline dropped {left} answers")
        return Step(progress, self._pipeline.get_metrics().cache_usage / 100, self._preemptions)

    def begin_waiting(self) -> Iterator[Begun | Refused]:
        """Begin those answers that the cache has room for, in order of arrival. Call this before each step."""
        begun = [*self._answers.values(), *self._unread]
        free = self._num_blocks - self._leaving_blocks - sum(answer.blocks for answer in begun)
        for request, waiting in list(self._waiting.items()):
            if waiting.blocks > free or len(self._answers) + len(self._unread) >= self._max_streams:
                break
            del self._waiting[request]
            tokens = openvino.Tensor(np.array([waiting.prompt], np.int64))
            try:
                handle = self._pipeline.add_request(request, tokens, waiting.config)
            except Exception as error:  # any class, by the value that it refuses
                yield Refused(request, _reason(error))
                continue
            free -= waiting.blocks
            self._answers[request] = _Answer(handle, waiting.sampling, waiting.blocks)
            yield Begun(request)

    def _news(self, request: int, answer: _Answer) -> Progress | None:
        if not answer.handle.can_read():
            self._preemptions += answer.is_decoding
            answer.is_decoding = False
            return None
        (output,) = answer.handle.read().values()
        tokens, logprobs = output.generated_ids, output.generated_log_probs
        answer.has_begun = answer.is_decoding = True
        finish = _FINISHES.get(output.finish_reason)
        if finish == "stop" and tokens and tokens[-1] in answer.sampling.end_ids:
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        if finish:
            del self._answers[request]
        return Progress(request, tuple(tokens), tuple(logprobs) if answer.sampling.has_logprobs else (), finish)


def _dimensions(folder: Path) -> tuple[int, int]:
    """Return the vocabulary size of a model, and the bytes of a token's keys and values in float32."""
    model = openvino.Core().read_model(folder / "openvino_model.xml")
    states = [variable.get_info().data_shape for variable in model.get_variables()]
    values = sum(heads.get_length() * width.get_length() for _, heads, _, width in states)
    return model.output("logits").get_partial_shape()[-1].get_length(), 4 * values


def _config(sampling: Sampling, lookup: PromptLookup | None) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = lookup.tokens, lookup.ngram
    config.max_new_tokens = sampling.max_tokens
    config.logprobs = int(sampling.has_logprobs)
    config.ignore_eos = not sampling.end_ids
    if sampling.end_ids:
        # Without an eos_token_id, the pipeline would use the one in the model's folder.
        config.stop_token_ids, config.eos_token_id = set(sampling.end_ids), min(sampling.end_ids)
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    config.repetition_penalty = sampling.repetition_penalty
    config.do_sample = sampling.temperature > 0
    if config.do_sample:
        config.temperature, config.top_p = sampling.temperature, sampling.top_p
        config.rng_seed = (sampling.seed or 0) % 2**64
        if sampling.top_k is not None:
            config.top_k = sampling.top_k
    if sampling.grammar:
        config.structured_output_config = _grammar_config(sampling.grammar)
    config.validate()
    return config


def _grammar_config(grammar: Grammar) -> genai.StructuredOutputConfig:
    return genai.StructuredOutputConfig(**{grammar.kind: grammar.text})


def try_grammars(folder: Path, settings: GenerationSettings, commands: Connection, results: Connection) -> None:
    """Answer each grammar with None, or with the reason for its refusal. Raises EOFError when the parent exits."""
    pipeline = _trial_pipeline(folder, settings)
    results.send(Ready(Pipeline.version))
    while True:
        try:
            pipeline.start(0, (0,), Sampling(max_tokens=_TRIAL_TOKENS, grammar=commands.recv()))
            while pipeline.is_busy:
                for message in pipeline.begin_waiting():
                    if isinstance(message, Refused):
                        raise ValueError(message.reason)
                pipeline.step()
            results.send(None)
        except (RuntimeError, ValueError) as error:
            results.send(_reason(error))
            # A grammar that cannot be compiled breaks the pipeline.
            pipeline = _trial_pipeline(folder, settings)


def _trial_pipeline(folder: Path, settings: GenerationSettings) -> Pipeline:
    """Load a pipeline for trials, and limit their memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    pipeline = Pipeline(folder, replace(settings, cache_bytes=_TRIAL_CACHE_BYTES, prefix_cache=False))
    limit_memory(_TRIAL_BYTES)
    return pipeline


def _reason(error: Exception) -> str:
    """Return the first line of an error, without its location in the library's source."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return re.sub(r"^.*\.cc:\d+: ", "", lines[0])


if __name__ == "__main__":
    run({"serve": serving(Pipeline, _reason), "try": try_grammars})
