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

One server runs at a time; in a round they take turns, and each round begins with another. Each is started anew and
warmed up, then loaded by wrk: one thread, so many connections, each of which sends its next request once the last one
is answered; it takes turns through 32 rows that differ. Before each load the server is asked for every row, several at
once, and its answers are compared with those of ONNX Runtime run directly: in float32 no number may be more than 0.001
off, of a variant in a narrower precision the cosine of each row must be 0.97 or more. Percentiles are wrk's, in which a
pause that held up a connection counts as often as requests would have been sent meanwhile. Errors are answers with
status 400 or more, broken connections and waits over 10 s. "Generator busy" is the share of its one core that wrk took,
in the worst round; beyond 90 %, in bold, it may have been what held the server back. "CPU" is the CPU time that all
processes of the machine, including wrk, took for each answer. "Stolen" is how much of a core the
hypervisor gave to other machines, likewise: what runs in several processes loses more by it than a bare loop. A load
that lost more than 5 % of a core is made again, four times at most, and the one that lost least counts.

One replica each, one thread for each engine. Peers run the same file on the same ONNX Runtime, each as its own
documentation shows (`peers/`), without batching and with it, and are sent what they natively take. Models are
compiled by `jobs.compile` with `compile.objective.goal=max_throughput`, on one core; compile's choice is among fp32,
bf16 and int8. Its settings of batching are the version's own, unless a line above says otherwise. A bare loop calls the
engine in a process of its own, with the batch size that gives most.

PyTorch eager is behind Ray Serve with the fast ingress, as Rayloom is, and answers one request after the other. All are
asked for texts that the tokenizer has padded to 32, 64 or 128 tokens; PyTorch cuts the padding off."""

_HOW_GRPC = """

gRPC is loaded by h2load instead: one thread, so many connections, each with one unary ModelInfer call at a time. It
sends one row again and again. All rows are checked before each load, as over HTTP. A short load estimates how many
calls fill the time, and that number is made, so no call is cancelled. h2load does not read gRPC's status, but a refused
call has no message. So errors are calls without the bytes of an answer, on broken connections, or after a wait of 10 s.
Percentiles are h2load's, in which a pause counts once for each connection that it held up."""


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
{found.conditions} Anything above 0.5 before
means that other work took part of the cores, and that single numbers are worth little."""


def _goals(found: Findings) -> str:
    rows = [(goal.what, goal.goal, goal.reached, goal.verdict) for goal in goals(found)]
    return f"""
{table(("what", "goal", "reached, beside", ""), rows)}

Of each round the ratio, of the rounds the median, with the least and the most. The best peer is the one with the most
good answers a second at that number of connections; without batching, the one that answers soonest."""


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
## {steady.title}, at one rate

{table(header, rows)}

The rate is {steady.rate:.0f} requests a second, {steady.share:.0%} of what {steady.baseline} answers to 16 connections
that ask without a pause. Requests are due at the times of a Poisson process, whether or not earlier ones have been
answered. The times are the same for both servers. Latency is counted from the time that a request is due.{absent}"""


def _setting(result: Result) -> str:
    return f"{result.setting}; sent {result.sent}"


def _whole(rate: Spread) -> str:
    return f"{rate.median:.0f} ({min(rate.values):.0f} to {max(rate.values):.0f})"


def _busy(share: float) -> str:
    return f"**{share:.0%}**" if share > SATURATED else f"{share:.0%}"


def _sweep(swept: Swept, picture: Path) -> str:
    heading = "## Preferred size, largest size, delay"
    absent = "".join(f"\n- `{setting.override}` was left out: {why}" for setting, why in swept.absent.items())
    if not swept.outcomes:
        return f"{heading}\n{absent}"
    best = swept.best
    return f"""
{heading}

![Good answers a second by the settings of batching]({picture.name})

The encoder's variant that compile chose, with 64 connections; below each rate the median of one connection alone.
The highest rate: {best.max_size} rows at most, {best.preferred or "no size"} preferred, a delay of {best.delay_us} µs.
{sum(outcome.errors for outcome in swept.outcomes.values())} errors in all settings together.{absent}"""
