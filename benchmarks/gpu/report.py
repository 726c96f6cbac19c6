"""RESULTS.md, generated from ``results.json``, and the list of steps before a run."""

from collections.abc import Sequence
from pathlib import Path

from app.config import load_recipe
from app.planner.cluster import cluster_of
from benchmarks.gpu.findings import Figure, Outcome, Results
from benchmarks.gpu.floors import training_floor
from benchmarks.gpu.steps import STEPS, Step
from benchmarks.markdown import table, verdict

_ROOT = Path(__file__).parents[2]
_TITLE = "# Results on a GPU"
_HEADER = ("figure", "measured", "beside", "measured / beside", "")


def report(results: Results) -> str:
    """Return the text of RESULTS.md."""
    outcomes = [(step, results.outcome(step.name)) for step in STEPS]
    counts = table(
        ("step", "proves", "outcome", "seconds"),
        [(step.name, step.proves, *_ended(outcome)) for step, outcome in outcomes],
    )
    facts = f"{results.date}, {results.device}. {results.versions}. Floors use the data sheet of {results.card}."
    sections = [
        _section(step, outcome) for step, outcome in outcomes if outcome and (outcome.figures or outcome.reason)
    ]
    return (
        "\n\n".join([_TITLE, f"Written by `benchmarks/gpu/run.sh` from `results.json`. {facts}", counts, *sections])
        + "\n"
    )


def figure_line(figure: Figure) -> str:
    """Return a figure as one line for a terminal."""
    reference = "" if figure.reference is None else f" ({figure.source}: {_number(figure.reference, figure.unit)})"
    goal = "" if figure.reached is None else "  reached" if figure.reached else "  MISSED"
    return f"{figure.name}: {_number(figure.value, figure.unit)}{reference}{goal}"


def list_steps(card: str) -> str:
    """Return the steps with their limits, and the floors of training steps on ``card``.

    Raises:
        PlanError: the planner's catalogue does not have the card.
    """
    device = cluster_of(f"1x{card}").device
    lines = [f"{sum(step.limit_s for step in STEPS)} s of limits; steps with no time left are not run"]
    for step in STEPS:
        lines.append(f"{step.limit_s:4d} s  {step.name}: {step.proves}")
        if "recipe" in step.options:
            recipe = load_recipe(_ROOT / step.options["recipe"], step.options["overrides"])
            floor, precision = training_floor(recipe), recipe.train.precision
            bound = floor.bound(device, precision)
            lines.append(
                f"        a step takes at least {1e3 * floor.seconds(device, precision):.0f} ms on {card}: {bound}"
            )
    return "\n".join(lines)


def _ended(outcome: Outcome | None) -> tuple[str, str]:
    if outcome is None:
        return "not run", ""
    missed = sum(figure.reached is False for figure in outcome.figures)
    status = outcome.status if outcome.status == "passed" else f"**{outcome.status}**"
    return f"{status}{f', **{missed} missed**' if missed else ''}", f"{outcome.seconds:.0f}"


def _section(step: Step, outcome: Outcome) -> str:
    parts = [f"## {step.name}"]
    if outcome.figures:
        parts.append(table(_HEADER, [_cells(figure) for figure in outcome.figures]))
    if outcome.reason:
        parts.append(f"{outcome.status.capitalize()}:\n\n" + _indented(outcome.reason.splitlines()))
    return "\n\n".join(parts)


def _cells(figure: Figure) -> Sequence[str]:
    reached = "" if figure.reached is None else verdict(figure.reached)
    value = _number(figure.value, figure.unit)
    if figure.reference is None or isinstance(figure.value, str):
        return _escaped(figure.name), _escaped(value), "", "", reached
    beside = f"{_number(figure.reference, figure.unit)} ({figure.source})"
    ratio = f"{figure.value / figure.reference:.2f}" if figure.reference else ""
    return _escaped(figure.name), value, _escaped(beside), ratio, reached


def _number(value: float | str, unit: str) -> str:
    text = value if isinstance(value, str) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
