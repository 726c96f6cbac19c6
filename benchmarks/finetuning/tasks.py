"""Every built-in task and two imported models, up to answers over HTTP: python -m benchmarks.finetuning.tasks

Each task is trained by one rank and by two, trained as its recipe stands, compiled, deployed on a cluster and asked.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter
from pydantic_core import to_json

from app.compile.run import CompileMetrics
from app.config import BUILT_IN_TASKS, load_recipe
from app.published.loaded import load_model
from app.published.prediction import Prediction
from app.reports.curves import read_curves
from app.runs import Result
from app.storage import to_path
from app.tasks import find_served_task
from benchmarks.cluster import Cluster, local_cluster
from benchmarks.finetuning.builtin_tasks import ASKED, Case, cases
from benchmarks.finetuning.imports import ROWS, Imported, foreign_models, measure_import
from benchmarks.launch import python, torchrun
from benchmarks.machine import Conditions, machine, versions
from benchmarks.markdown import Goal, table, verdict

RESULTS = Path(__file__).with_name("TASKS.md")
STEPS = 20
MAX_LOSS_APART, MAX_METRIC_APART = 1e-4, 1e-3
"""Relative, of two ranks from one."""
MAX_ANSWER_APART = {"fp32": 1e-4}
MAX_NARROW_APART = 2e-2
"""For a variant below fp32, whose calls may have other shapes."""
T = TypeVar("T")
_EXPLANATION = f"""\
- **Ranks**: each recipe trains for {STEPS} steps with its own optimizer, in one process and in two with ZeRO 1.
  Dropout is 0, because each rank draws its own masks. The table shows the largest relative difference.
- **Compile**: each recipe trains with its own dropout, some for fewer epochs. Metrics are measured on the validation
  split, and gates are those of the recipe. A refused variant failed a gate, or the machine cannot run it. It is not
  published.
- **Answers**: the version is deployed on a cluster. {ASKED} rows are sent to `predict`. The answers are compared
  with those of the version's engine in another process. Numbers may differ by {MAX_ANSWER_APART["fp32"]:.0e} in
  fp32, and by {MAX_NARROW_APART:.0e} in lower precisions, because requests are batched. Everything else must be
  equal.
- Language models are not compiled."""


@dataclass(frozen=True)
class Compiled:
    """A published version: its metric on the validation split beside PyTorch's, and its answers over HTTP."""

    metric: str
    pytorch: float
    published: float
    variant: str
    drop: float
    """As ``compile.gates.max_accuracy_drop`` limits it."""
    max_drop: float
    passed: int
    refused: int
    answers_apart: float
    """The largest difference of a number over HTTP from the engine's own; infinite where a text differs."""
    max_answers_apart: float

    @property
    def keeps_metric(self) -> bool:
        """Whether the published variant is within its gate. A NaN is not."""
        return self.drop <= self.max_drop + 1e-9

    @property
    def answers_equal(self) -> bool:
        """Whether the answers over HTTP are the engine's."""
        return self.answers_apart <= self.max_answers_apart


@dataclass(frozen=True)
class Measured:
    """One task."""

    task: str
    losses_apart: float
    """The largest relative difference of a step's loss, two ranks against one."""
    metrics_apart: float
    """The same of a validation metric after the last step."""
    compiled: Compiled | None
    """None: models of the task are not compiled."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the report, and write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetuning.tasks", description=__doc__)
    parser.add_argument("--tasks", nargs="*", help="tasks to measure; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file to write")
    parser.add_argument("--measured", type=Path, help="folder of measurements; existing ones are kept")
    arguments = parser.parse_args(argv)
    conditions = Conditions()
    with tempfile.TemporaryDirectory(prefix="bench-tasks-") as temporary, local_cluster() as cluster:
        folder, kept = Path(temporary), arguments.measured or Path(temporary) / "measured"
        earlier = len(list(kept.glob("*.json")))
        wanted = [case for case in cases(folder) if not arguments.tasks or case.task in arguments.tasks]
        found = [keep(kept / f"{case.task}.json", Measured, partial(measure, case, cluster, folder)) for case in wanted]
        imported = [
            keep(kept / f"{model.name}.json", Imported, partial(measure_import, model, cluster, folder / "storage"))
            for model in foreign_models(folder)
        ]
    note = f" {earlier} rows come from earlier runs." if earlier else ""
    text = report(found, imported, f"{conditions}{note}")
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


def keep(file: Path, kind: type[T], measure: Callable[[], T]) -> T:
    """Return the measurement that a file has. If there is no file, measure and write it."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(to_json(measure(), indent=1, inf_nan_mode="constants"))
    found = TypeAdapter(kind).validate_json(file.read_bytes())
    print(found, flush=True)
    return found


def measure(case: Case, cluster: Cluster, folder: Path) -> Measured:
    """Measure one task."""
    short = (*case.overrides, *case.without_dropout, f"train.max_steps={STEPS}", "train.report_samples=0")
    one, two = (_trained(case, folder / f"ranks-{ranks}", ranks, *short) for ranks in (1, 2))
    losses = [read_curves(_run_folder(result)).of_steps["loss"].values for result in (one, two)]
    metrics = [
        {name: value for name, value in result.metrics.items() if name.startswith("val_") and value is not None}
        for result in (one, two)
    ]
    assert len(losses[0]) == len(losses[1])
    assert metrics[0].keys() == metrics[1].keys()
    return Measured(
        case.task,
        max(_relative(given, expected) for expected, given in zip(*losses, strict=True)),
        max(_relative(metrics[1][name], expected) for name, expected in metrics[0].items()),
        _compiled(case, cluster, folder / "storage") if case.inputs else None,
    )


def _trained(case: Case, storage: Path, ranks: int, *overrides: str) -> Result:
    return Result.of_output(torchrun(ranks, "app.training", case.recipe, *overrides, f"storage={storage}"))


def _run_folder(result: Result) -> Any:
    return to_path(result.artifacts["weights"]).parent


def _relative(given: float, expected: float) -> float:
    """Return the relative difference, which is infinite for NaN. Zero is compared as it is."""
    apart = abs(given - expected) / (abs(expected) or 1.0)
    return apart if math.isfinite(apart) else math.inf


def _compiled(case: Case, cluster: Cluster, storage: Path) -> Compiled:
    """Train as the recipe stands, compile, deploy, and ask."""
    overrides = (*case.overrides, f"storage={storage}")
    _trained(case, storage, 2, *case.overrides)
    threads = str(os.cpu_count() or 1)
    output = python("app.compile", case.recipe, *overrides, OMP_NUM_THREADS=threads)
    metrics = CompileMetrics.model_validate(Result.of_output(output).metrics)
    recipe = load_recipe(case.recipe, overrides)
    baseline, chosen = next(record for record in metrics.variants if record.baseline), metrics.chosen
    assert baseline.score
    assert chosen.score
    gate = find_served_task(recipe.task).gate
    assert gate
    ours = [record for record in metrics.variants if not record.baseline]
    return Compiled(
        metric=chosen.score.metric,
        pytorch=baseline.score.value,
        published=chosen.score.value,
        variant=f"{chosen.engine} {chosen.precision}",
        drop=gate.drop(baseline.score.value, chosen.score.value),
        max_drop=recipe.compile.gates.max_accuracy_drop,
        passed=sum(record.passed for record in ours),
        refused=sum(not record.passed for record in ours) + len(metrics.skipped),
        answers_apart=_ask(recipe.name, case.inputs, cluster, storage),
        max_answers_apart=MAX_ANSWER_APART.get(chosen.precision, MAX_NARROW_APART),
    )


def _ask(name: str, inputs: Sequence[Any], cluster: Cluster, storage: Path) -> float:
    """Return how far the answers over HTTP are from those of the version's engine in this process."""
    deployed = cluster.submit("deploy", name, f"storage={storage}", "serve.threads=1").result
    url = f"{deployed.artifacts['http']}/v1/models/{name}/predict"
    answer = httpx.post(url, json={"inputs": list(inputs)}, timeout=60).raise_for_status().json()
    given = [Prediction.model_validate(item).model_dump() for item in answer["predictions"]]
    model = load_model(to_path(storage), name, 1, 1)
    expected: list[Any] = [None] * len(inputs)
    for group in model.encode(inputs):
        for index, prediction in zip(group.indices, model.decode(model.engine.run(group.tensors), group), strict=True):
            expected[index] = prediction.model_dump()
    model.engine.close()
    return answers_apart(given, expected)


def answers_apart(given: Any, expected: Any) -> float:
    """Return the largest difference of two numbers in JSON; infinite where anything else differs."""
    if isinstance(expected, float) and isinstance(given, float | int):
        return abs(given - expected)
    if isinstance(expected, dict) and isinstance(given, dict) and given.keys() == expected.keys():
        return max((answers_apart(given[key], value) for key, value in expected.items()), default=0.0)
    if isinstance(expected, list) and isinstance(given, list) and len(given) == len(expected):
        return max((answers_apart(*pair) for pair in zip(given, expected, strict=True)), default=0.0)
    return 0.0 if given == expected else math.inf


def goals(found: Sequence[Measured], imported: Sequence[Imported]) -> list[Goal]:
    """Return the goals, and what was reached."""
    losses, metrics = max(task.losses_apart for task in found), max(task.metrics_apart for task in found)
    served = [task.compiled for task in found if task.compiled]
    kept, equal = sum(task.keeps_metric for task in served), sum(task.answers_equal for task in served)
    exact = sum(model.is_equal for model in imported)
    of_ranks = f"{len(found)} tasks, two ranks against one"
    unmeasured = _unmeasured(found)
    return [
        Goal("built-in tasks measured", "all", f"{len(found)} of {len(BUILT_IN_TASKS)}", verdict(not unmeasured)),
        Goal(
            f"{of_ranks}: losses of {STEPS} steps",
            f"≤ {MAX_LOSS_APART:.0e} apart",
            f"{losses:.1e}",
            verdict(losses <= MAX_LOSS_APART),
        ),
        Goal(
            f"{of_ranks}: validation metrics",
            f"≤ {MAX_METRIC_APART:.0e} apart",
            f"{metrics:.1e}",
            verdict(metrics <= MAX_METRIC_APART),
        ),
        Goal(
            "compile: the published version keeps its task's own metric",
            "all",
            f"{kept} of {len(served)}",
            verdict(kept == len(served)),
        ),
        Goal(
            "`predict` over HTTP answers as the engine",
            "all",
            f"{equal} of {len(served)}",
            verdict(equal == len(served)),
        ),
        Goal(
            "ONNX files of other exporters answer as ONNX Runtime in fp32",
            "bit-equal",
            f"{exact} of {len(imported)}",
            verdict(exact == len(imported)),
        ),
    ]


def _unmeasured(found: Sequence[Measured]) -> list[str]:
    """Return the built-in tasks that are not among those found."""
    return [name for name in BUILT_IN_TASKS if name not in {task.task for task in found}]


_COLUMNS = (
    *("task", "losses apart", "metrics apart", "metric", "PyTorch", "published"),
    *("variant", "passed, refused", "answers apart"),
)


def report(found: Sequence[Measured], imported: Sequence[Imported], conditions: str) -> str:
    """Return the page."""
    reached = [(goal.what, goal.goal, goal.reached, goal.verdict) for goal in goals(found, imported)]
    tasks = [(task.task, f"{task.losses_apart:.1e}", f"{task.metrics_apart:.1e}", *_cells(task)) for task in found]
    models = [
        (model.what, model.exporter, f"{model.inputs} and {model.outputs}", "yes" if model.is_equal else "no")
        for model in imported
    ]
    unmeasured = _unmeasured(found)
    left_out = f"\n- Not measured in this run: {', '.join(unmeasured)}." if unmeasured else ""
    return f"""# Built-in tasks and imported models

`python -m benchmarks.finetuning.tasks` wrote this. {machine()}.
{versions(("rayloom", "deepspeed", "onnxruntime", "openvino", "torch"))}.
{conditions}

{table(("what", "goal", "reached", ""), reached)}

{table(_COLUMNS, tasks)}

{_EXPLANATION}{left_out}

{table(("imported model", "exporter", "inputs and outputs", "bit-equal"), models)}

Each file is imported with ONNX Runtime and fp32 only, deployed by name, and called over HTTP with requests of
{", ".join(map(str, ROWS))} rows. Values, types and shapes are compared with an ONNX Runtime session on the same file.
"""


def _cells(task: Measured) -> tuple[str, ...]:
    """Return the cells of a compiled task."""
    if (compiled := task.compiled) is None:
        return ("–",) * 6
    return (
        compiled.metric,
        f"{compiled.pytorch:.4f}",
        f"{compiled.published:.4f}",
        compiled.variant,
        f"{compiled.passed}, {compiled.refused}",
        f"{compiled.answers_apart:.1e}",
    )


if __name__ == "__main__":
    main()
