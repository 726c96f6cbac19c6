"""A contender in a process of its own: python -m benchmarks.generation.worker CONTENDER FOLDER

It prints a line when it is ready. Each line of standard input is a number of streams, which run concurrently. A
line with their measurements comes back. CPU time is measured for this process and its children, without the client.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from app.ports import LOOPBACK, unused
from benchmarks.generation.material import MAX_STREAMS, NEW_TOKENS, Material, prompts

_THREADS = 1
_STEP_TOKENS = 256
_START_S = 180.0


@dataclass(frozen=True)
class Result:
    """One measurement."""

    streams: int
    tokens: int
    wall_s: float
    cpu_s: float
    first_s: float | None
    """Median time to the first token; None if it is not measured."""
    resident_bytes: int
    answers: list[list[int]] | list[str]
    """The generated tokens, or their text."""


class Contender(ABC):
    """Runs the model."""

    @abstractmethod
    def run(self, streams: int) -> tuple[list[list[int]] | list[str], list[float | None]]:
        """Generate an answer to each of that many prompts. Return the answers, and the times to their first tokens."""


class Bare(Contender):
    """OpenVINO GenAI's pipeline, stepped in this process."""

    def __init__(self, precision: str, material: Material) -> None:
        import openvino
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 1, _STEP_TOKENS, MAX_STREAMS
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": _THREADS}
        self._pipeline = genai.ContinuousBatchingPipeline(material.compiled(precision), scheduler, "CPU", properties)
        self._config = genai.GenerationConfig()
        self._config.max_new_tokens, self._config.do_sample, self._config.ignore_eos = NEW_TOKENS, False, True
        self._tensor = openvino.Tensor
        self._requests = 0

    def run(self, streams: int) -> tuple[list[list[int]] | list[str], list[float | None]]:
        began_s, handles = time.perf_counter(), []
        for prompt in prompts(streams):
            self._requests += 1
            handles.append(self._pipeline.add_request(self._requests, self._tensor(prompt[None]), self._config))
        answers: list[list[int]] = [[] for _ in handles]
        first: list[float | None] = [None] * streams
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for place, handle in enumerate(handles):
                while handle.can_read():
                    first[place] = first[place] or time.perf_counter() - began_s
                    answers[place] += [token for part in handle.read().values() for token in part.generated_ids]
        return answers, first


class Transformers(Contender):
    """``generate`` of transformers, one prompt after the other."""

    def __init__(self, material: Material) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(_THREADS)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(material.transformers, dtype=torch.float32).eval()

    def run(self, streams: int) -> tuple[list[list[int]] | list[str], list[float | None]]:
        answers = []
        for prompt in self._torch.from_numpy(prompts(streams)):
            with self._torch.no_grad():
                tokens = self._model.generate(
                    prompt[None],
                    attention_mask=self._torch.ones_like(prompt[None]),
                    max_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            answers.append(tokens[0, len(prompt) :].tolist())
        return answers, [None] * streams


class OverHttp(Contender):
    """A server in this process, with a client in another one."""

    path: str

    def __init__(self, port: int) -> None:
        self._client = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.generation.client", LOOPBACK, str(port), self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def client_pid(self) -> int:
        """The process of the client."""
        return self._client.pid

    def run(self, streams: int) -> tuple[list[list[int]] | list[str], list[float | None]]:
        answered = self.ask([self.body(prompt.tolist()) for prompt in prompts(streams)])
        if errors := [answer["error"] for answer in answered if answer["error"]]:
            raise RuntimeError(f"{len(errors)} of {streams} failed: {errors[0]}")
        answers: Any = [answer["tokens"] or answer["text"] for answer in answered]
        return answers, [answer["first_s"] for answer in answered]

    def ask(self, bodies: Sequence[object]) -> list[dict[str, Any]]:
        """Send requests concurrently, and return the client's measurements."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps(bodies) + "\n")
        self._client.stdin.flush()
        answered: list[dict[str, Any]] = json.loads(self._client.stdout.readline())
        return answered

    @abstractmethod
    def body(self, prompt: list[int]) -> object:
        """Return the request for a greedy answer."""


class LlamaCpp(OverHttp):
    """llama.cpp's server, with a slot for each stream."""

    path = "/completion"

    def __init__(self, precision: str, material: Material) -> None:
        import xllamacpp

        (port,) = unused(1)
        given = xllamacpp.CommonParams()
        given.model.path, given.port = str(material.gguf(precision)), port
        given.n_ctx, given.n_parallel, given.kv_unified = MAX_STREAMS * 2 * 128, MAX_STREAMS, False
        given.n_batch = given.n_ubatch = _STEP_TOKENS
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = _THREADS
        given.cont_batching, given.cache_prompt, given.warmup, given.verbosity = True, False, True, 0
        if precision == "f32":
            given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self._server = xllamacpp.Server(given)
        super().__init__(int(self._server.listening_address.rpartition(":")[2]))

    def body(self, prompt: list[int]) -> object:
        return {
            "prompt": prompt,
            "n_predict": NEW_TOKENS,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
        }


class Rayloom(OverHttp):
    """Rayloom's endpoint behind uvicorn, as in a replica, with the engine in its process."""

    path = "/v1/completions"

    def __init__(self, precision: Literal["fp32", "int8"], material: Material) -> None:
        from benchmarks.generation.endpoint import serve_in_thread

        self._name = precision
        # Deleted with this object when the process exits.
        self._folder = tempfile.TemporaryDirectory(prefix="generation-endpoint-")
        super().__init__(serve_in_thread(Path(self._folder.name), material, precision))

    def body(self, prompt: list[int]) -> object:
        return {"model": self._name, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}


class Vllm(OverHttp):
    """vLLM's server for CPUs. It runs in its own environment, and its engine in a separate process."""

    path = "/v1/completions"

    def __init__(self, material: Material) -> None:
        (port,) = unused(1)
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        options = {
            "host": LOOPBACK,
            "port": port,
            "dtype": "float32",
            "max-model-len": 512,
            "max-num-seqs": MAX_STREAMS,
            "served-model-name": "model",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={material.transformers}"]
        subprocess.Popen(
            [*command, *flags, "--enforce-eager", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"],
            env={**os.environ, **settings},
            stdout=sys.stderr,
        )
        _await(f"http://{LOOPBACK}:{port}/health")
        super().__init__(port)

    def body(self, prompt: list[int]) -> object:
        return {
            "model": "model",
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }


def _await(url: str) -> None:
    """Wait until a server answers."""
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 # on this machine
                return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


VLLM = "vllm"
CONTENDERS: Mapping[str, Callable[[Material], Contender]] = {
    "bare fp32": partial(Bare, "fp32"),
    "bare int8": partial(Bare, "int8"),
    "rayloom fp32": partial(Rayloom, "fp32"),
    "rayloom int8": partial(Rayloom, "int8"),
    "transformers": Transformers,
    "llama.cpp f32": partial(LlamaCpp, "f32"),
    "llama.cpp q8_0": partial(LlamaCpp, "q8_0"),
    VLLM: Vllm,
}


def _cpu_s(skipped: int | None) -> float:
    """Return CPU seconds of this process and its children, all still alive. ``skipped`` is the client's process."""
    own = psutil.Process()
    processes = [own, *(child for child in own.children(recursive=True) if child.pid != skipped)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def measure(contender: Contender, streams: int) -> Result:
    """Run that many streams concurrently."""
    skipped = getattr(contender, "client_pid", None)
    cpu_s, began_s = _cpu_s(skipped), time.perf_counter()
    answers, first = contender.run(streams)
    wall_s, used_s = time.perf_counter() - began_s, _cpu_s(skipped) - cpu_s
    seen = sorted(second for second in first if second is not None)
    return Result(
        streams=streams,
        tokens=streams * NEW_TOKENS,
        wall_s=wall_s,
        cpu_s=used_s,
        first_s=seen[len(seen) // 2] if seen else None,
        resident_bytes=psutil.Process().memory_info().rss,
        answers=answers,
    )


def main() -> None:
    """Run the measurements that standard input requests."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    contender = CONTENDERS[sys.argv[1]](Material(Path(sys.argv[2])))
    contender.run(1)
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            print(json.dumps(asdict(measure(contender, int(line)))), flush=True)
    finally:
        for child in psutil.Process().children(recursive=True):
            child.terminate()


if __name__ == "__main__":
    main()
