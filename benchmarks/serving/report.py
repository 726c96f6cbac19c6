"""RESULTS.md: what was reached, beside the goals."""

from pathlib import Path

from benchmarks.machine import machine, versions
from benchmarks.markdown import table
from benchmarks.serving.findings import Findings, Raced
from benchmarks.serving.goals import goals
from benchmarks.serving.race import CONNECTIONS, Result
from benchmarks.serving.steady import Steady
from benchmarks.serving.sweep import Swept
from benchmarks.spread import Spread

SATURATED = 0.9
"""Of its core: beyond, the load generator may have been what held a server back."""

_PACKAGES = ("rayloom", "ray", "onnxruntime", "openvino", "torch")

_HOW = """
## How

One server runs at a time. In each round the servers take turns, and each round starts with a different one. Each
server is started afresh, warmed up and then loaded by wrk in a closed loop. wrk has one thread and the given number
of connections. Each connection sends its next request when the last one is answered. The requests cycle through 32
different rows.

Before each load every row is sent to the server, several rows at once. The answers are compared with those of ONNX
Runtime, run directly. In float32 no value may differ by more than 0.001. For a variant in a lower precision, the
cosine similarity of each row must be at least 0.97.

Percentiles are wrk's. They are corrected for coordinated omission: a stall of a connection counts as often as
requests would have been sent during it. Errors are answers with status 400 or higher, broken connections and waits
over 10 s. "Generator busy" is the share of its one core that wrk used, in the worst round. Above 90 % (in bold), wrk
may have been the bottleneck. "CPU" is the CPU time of all processes on the machine, including wrk, per answer.
"Stolen" is the share of a core that the hypervisor gave to other machines, in the worst round. A server with several
processes loses more by it than a bare loop. A load that lost more than 5 % of a core is repeated, at most four
times. The load that lost the least counts.

Each server has one replica, and each engine one thread. Peers run the same model file on the same ONNX Runtime, with
and without batching. Each peer is set up as its own documentation shows (`peers/`), and gets requests in its native
format. Models are compiled by `jobs.compile` with `compile.objective.goal=max_throughput`, on one core. Compile
chooses among fp32, bf16 and int8. Rayloom uses the version's own batching settings, unless a line above says
otherwise. A bare loop calls the engine in a separate process, with the batch size that gives the highest throughput.

PyTorch eager runs behind Ray Serve with the fast ingress, as Rayloom does, and answers one request at a time. All
servers get texts that the tokenizer has padded to 32, 64 or 128 tokens. PyTorch removes the padding."""

_HOW_GRPC = """

gRPC is loaded by h2load instead. It has one thread and the given number of connections, each with one unary
ModelInfer call at a time. It sends the same row every time. As over HTTP, all rows are checked before each load. A
short load estimates how many calls fill the time, and that number of calls is sent. So no call is cancelled. h2load
does not read gRPC's status, but a refused call returns no message. Errors are therefore calls without the bytes of
an answer, calls on broken connections, and waits of 10 s. Percentiles are h2load's. They count a stall once for each
connection that it held up."""


def report(found: Findings, picture: Path) -> str:
    """The whole of RESULTS.md.

    Args:
        picture: of the sweep, beside the report.
    """
    swept = [_sweep(found.sweep, picture)] if found.sweep else []
    sections = [
        _title(found),
        _goals(found),
        *map(_race, found.races.values()),
        *map(_steady, found.steady),
        *swept,
        _HOW + (_HOW_GRPC if "grpc" in found.races else ""),
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _title(found: Findings) -> str:
    return f"""
# Serving: results

`make bench-serving`, {found.num_rounds} rounds, {found.seconds} s of load with
1 and 16 connections, {2 * found.seconds} with 64. {machine()}, shared between the server and the load generator.
{versions(_PACKAGES)}; {", ".join(found.versions)}.
{found.conditions} A load above 0.5 before
the run means that other work used part of the cores. Single figures are then unreliable."""


def _goals(found: Findings) -> str:
    rows = [(goal.what, goal.goal, goal.reached, goal.verdict) for goal in goals(found)]
    return f"""
{table(("what", "goal", "reached, beside", ""), rows)}

Ratios are computed within each round. The table has their median, with the minimum and maximum. The best peer is the
one with the most good answers per second at that number of connections. Without batching it is the one with the
lowest p50."""


def _race(raced: Raced) -> str:
    race = raced.race
    header = (
        "server",
        "connections",
        "good answers/s",
        "p50, ms",
        "p99, ms",
        "CPU, µs",
        "errors",
        "generator busy",
        "stolen",
    )
    rows = [
        (
            name,
            str(connections),
            _whole(result.rate(connections)),
            str(result.p50_ms(connections)),
            str(result.p99_ms(connections)),
            _whole(result.cpu_us(connections)),
            str(result.errors(connections)),
            _busy(result.generator_busy(connections)),
            f"{result.stolen(connections):.0%}",
        )
        for name, result in race.results.items()
        for connections in CONNECTIONS
    ]
    loops = [(name, "", _whole(rate), "", "", "", "", "", "") for name, rate in race.loops.items()]
    settings = "".join(f"\n- **{name}**: {_setting(result)}" for name, result in race.results.items())
    absent = "".join(f"\n- **{name}** was left out: {why}" for name, why in race.absent.items())
    return f"## {raced.title}\n\n{table(header, [*rows, *loops])}\n{settings}{absent}"


def _steady(steady: Steady) -> str:
    header = ("server", "p50, ms", "p99, ms", "errors")
    rows = [
        (name, str(steady.p50_ms(name)), str(steady.p99_ms(name)), str(steady.errors(name))) for name in steady.times
    ]
    absent = "".join(f"\n- **{name}** was left out: {why}" for name, why in steady.absent.items())
    return f"""
## {steady.title}, at a fixed rate

{table(header, rows)}

The rate is {steady.rate:.0f} requests per second. It is {steady.share:.0%} of the closed-loop rate of {steady.baseline}
with 16 connections. Requests arrive as a Poisson process, whether or not earlier ones have been answered. Both servers
get the same arrival times. Latency is measured from the scheduled arrival of a request.{absent}"""


def _setting(result: Result) -> str:
    return f"{result.setting}; requests: {result.sent}"


def _whole(rate: Spread) -> str:
    return f"{rate.median:.0f} ({min(rate.values):.0f} to {max(rate.values):.0f})"


def _busy(share: float) -> str:
    return f"**{share:.0%}**" if share > SATURATED else f"{share:.0%}"


def _sweep(swept: Swept, picture: Path) -> str:
    heading = "## Preferred batch size, maximum batch size and delay"
    absent = "".join(f"\n- `{setting.override}` was left out: {why}" for setting, why in swept.absent.items())
    if not swept.outcomes:
        return f"{heading}\n{absent}"
    best = swept.best
    return f"""
{heading}

![Good answers a second by the settings of batching]({picture.name})

The figure shows the encoder's variant that compile chose, with 64 connections. Below each rate is the p50 of a single
connection. The highest rate has a maximum batch size of {best.max_size}, {best.preferred or "no size"} preferred and a
delay of {best.delay_us} µs.
There were {sum(outcome.errors for outcome in swept.outcomes.values())} errors in all settings together.{absent}"""
