"""The page of results."""

from dataclasses import dataclass, field
from functools import cached_property

from benchmarks.markdown import Goal, goals_table, table, verdict
from benchmarks.network.cases import CASES, LENGTH, PLAIN, RATES, SAMPLES, blueprint
from benchmarks.network.machines import Measured
from benchmarks.network.predicted import Predictions, sent_bytes
from benchmarks.spread import Spread

LOSS, REDUCTIONS = "loss", "reductions"
"""Parts that are measured once: what training costs in loss, and all-reduces alone."""
LOSS_STEPS = 80
Found = dict[str, list[list[Measured]]]
"""Rounds of measurements by part: the name of a rate, or one of the above."""
_SLOW = "20 Mbit/s"
_GOAL, _MAX_ERROR, _MAX_BYTES_ERROR = 5.0, 0.25, 0.05
_COMPRESSED = "PowerSGD, rank 4"  # the default rank


@dataclass(frozen=True)
class Findings:
    """All that was measured."""

    found: Found
    header: str
    predictions: Predictions = field(default_factory=Predictions)

    def step_s(self, rate: str, case: str) -> Spread:
        """Return the seconds of a step, of each round."""
        return Spread(tuple(one.step_s for round_ in self.found[rate] for one in round_ if one.case == case))

    def sent_bytes(self, case: str) -> int:
        """Return the bytes that a machine sends in a step without a limit."""
        return next(one.sent_bytes for one in self.found[RATES[0].name][0] if one.case == case)

    def steps_per_s(self) -> dict[str, list[float]]:
        """Return the medians by case, of each rate."""
        return {case: [1 / self.step_s(rate.name, case).median for rate in RATES] for case in CASES}

    def gain(self, rate: str, case: str) -> float:
        """Return the steps a second of a case / those of plain ZeRO 0, as the median over rounds."""
        return self.step_s(rate, PLAIN.name).over(self.step_s(rate, case)).median

    @cached_property
    def predicted_s(self) -> dict[tuple[str, str], float]:
        """The planner's seconds of a step, by rate and case."""
        return {
            (rate.name, name): self.predictions.step_s(case, rate) for rate in RATES for name, case in CASES.items()
        }

    def error(self, rate: str, case: str) -> float:
        """Return the relative error of the predicted time of a step."""
        return self.predicted_s[rate, case] / self.step_s(rate, case).median - 1


def report(findings: Findings) -> str:
    """Return the page."""
    number = blueprint().num_parameters
    rounds = ", ".join(f"{len(findings.found[rate.name])} with {rate.name}" for rate in RATES)
    return f"""# Training over slow networks

`python -m benchmarks.network`. Rounds: {rounds}.
{findings.header}

{goals_table(_goals(findings))}

Two network namespaces, joined by a bridge, simulate two machines. Each runs one rank with one thread. `tc tbf`
limits the rate at which each sends and receives. A GPT with {number:,} parameters trains with AdamW. A step has
{SAMPLES} samples per rank, of {LENGTH} bytes each. Cells are medians over the rounds, which run all cases in the
same order. The namespaces share two cores and a kernel, so "no limit" shows the speed of memory. The latency and
packet loss of a real network are not simulated.

## Steps per second

{_speed_table(findings)}

![Steps per second by rate](steps.svg)

## Bytes sent per machine and step

{_bytes_table(findings)}

Bytes are read from the counters of the network interface. Plain ZeRO 0 sends 4 bytes per parameter. ZeRO 1 also
sends half of the parameters, which the other rank gathers. `communication_data_type` halves the bytes of gradients,
but not those of gathered parameters.

## What the planner predicts

{_predicted_table(findings)}

Cells are milliseconds per step, predicted / measured. The planner gets the processor's rates from `measure_machine`,
and the network's limit. Nothing was fitted to these runs. `rayloom plan --calibrate` would scale predictions by a
measured plan, and was not used. Without a limit and at 1 Gbit/s, most of the error is in computation, which takes
longer than predicted. At lower rates the predictions for ZeRO 1 are the worst. Its all-gathers are slower than the
ring that the planner assumes, for a reason that was not investigated. The planner does not count the arithmetic of
PowerSGD.

## What compression costs

{_loss_table(findings)}

The loss is the mean of the last 20 of {LOSS_STEPS} steps without a limit. All cases start from the same weights and
see the same samples. Over a slow network, the loss after a given time matters more than the loss after a given
number of steps.

## Within machines first

{_reductions_table(findings)}

These times were measured once. Two ranks on each of two machines sum a gradient of {4 * number / 1e6:.1f} MB in
fp32. "All ranks at once" is gloo's all-reduce over all ranks. "Within machines first" is `torch.distributed`'s
`reduce` within each machine, `all_reduce` between the first ranks, and `broadcast` within each machine. **Rayloom
has no such plan on CPUs**, and ZeRO++ is for GPUs. The table shows what such a plan could gain. In a ring of `n`
machines with `r` ranks each, each machine's link carries 2 (nr - 1) / nr of the gradient. In a ring of machines
alone it carries 2 (n - 1) / n. The gain falls from 1.5 with two machines of two ranks to 1.02 with 32 machines of
two.
"""


def _goals(findings: Findings) -> list[Goal]:
    gain = findings.gain(_SLOW, _COMPRESSED)
    worst = max(((rate.name, case) for rate in RATES[1:] for case in CASES), key=lambda at: abs(findings.error(*at)))
    errors = {case: sent_bytes(CASES[case]) / findings.sent_bytes(case) - 1 for case in CASES}
    case = max(errors, key=lambda name: abs(errors[name]))
    return [
        Goal(f"{_COMPRESSED}: steps/s at {_SLOW} / without compression", f"≥ {_GOAL:g}", f"{gain:.1f}",
             verdict(gain >= _GOAL)),
        Goal(f"predicted step time, worst cell with a limit ({worst[1]} at {worst[0]})", f"± {_MAX_ERROR:.0%}",
             f"{findings.error(*worst):+.0%}", verdict(abs(findings.error(*worst)) <= _MAX_ERROR)),
        Goal(f"predicted bytes, worst case ({case})", f"± {_MAX_BYTES_ERROR:.0%}", f"{errors[case]:+.1%}",
             verdict(abs(errors[case]) <= _MAX_BYTES_ERROR)),
    ]  # fmt: skip


def _speed_table(findings: Findings) -> str:
    rows = [[case, *(_speed_cell(findings, rate.name, case) for rate in RATES)] for case in CASES]
    return f"{table(['', *(rate.name for rate in RATES)], rows)}\n\nIn brackets: steps/s relative to plain ZeRO 0."


def _speed_cell(findings: Findings, rate: str, case: str) -> str:
    return f"{1 / findings.step_s(rate, case).median:.3g} (x {findings.gain(rate, case):.2f})"


def _bytes_table(findings: Findings) -> str:
    rows = []
    for name, case in CASES.items():
        sent, predicted = findings.sent_bytes(name), sent_bytes(case)
        share = sent / findings.sent_bytes(PLAIN.name)
        rows.append(
            [name, f"{sent / 1e6:.2f}", f"{share:.3f}", f"{predicted / 1e6:.2f}", f"{predicted / sent - 1:+.1%}"]
        )
    return table(["", "MB", "of ZeRO 0", "predicted MB", "error"], rows)


def _predicted_table(findings: Findings) -> str:
    rows = [[case, *(_predicted_cell(findings, rate.name, case) for rate in RATES)] for case in CASES]
    return table(["", *(rate.name for rate in RATES)], rows)


def _predicted_cell(findings: Findings, rate: str, case: str) -> str:
    predicted, measured = findings.predicted_s[rate, case], findings.step_s(rate, case).median
    return f"{predicted * 1e3:,.0f} / {measured * 1e3:,.0f} ({predicted / measured - 1:+.0%})"


def _loss_table(findings: Findings) -> str:
    losses = {one.case: one.loss or 0.0 for one in findings.found[LOSS][0]}
    plain = losses[PLAIN.name]
    return table(
        ["", "loss", "difference"], [[case, f"{loss:.3f}", f"{loss - plain:+.3f}"] for case, loss in losses.items()]
    )


def _reductions_table(findings: Findings) -> str:
    measured = findings.found[REDUCTIONS][0]
    rows = []
    for rate, flat, inner in zip(RATES, measured[::2], measured[1::2], strict=True):
        gain = f"{flat.step_s / inner.step_s:.2f}"
        times = (f"{one.step_s:.2f} s, {one.sent_bytes / 1e6:.1f} MB" for one in (flat, inner))
        rows.append([rate.name, *times, gain])
    return table(["", "all ranks at once", "within machines first", "times as fast"], rows)
