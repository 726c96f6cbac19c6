"""The page of a training run, from the files in its folder. The run may be under way."""

import json
from collections.abc import Iterable
from statistics import fmean

from upath import UPath

from app.data.prepared import DataReport
from app.pages.content import Chart, Picture, Series, State
from app.pages.page import Page
from app.pages.words import duration, number, percent
from app.reports.curves import Curves, Of, read_curves
from app.reports.run_folder import RunFolder, cost_of, link_to_run
from app.telemetry.augmentation import AugmentedSamples, ShownInput
from app.telemetry.evaluation import Evaluation, WorstSample
from app.telemetry.events import Event, read_events

_CHARTS: list[tuple[str, str, dict[str, tuple[Of, str]], bool]] = [
    ("Loss", "loss", {"training": ("step", "loss"), "validation": ("epoch", "val_loss")}, False),
    ("Accuracy", "share", {"validation": ("epoch", "val_accuracy")}, False),
    ("Perplexity", "perplexity", {"validation": ("epoch", "val_perplexity")}, True),
    ("Learning rate", "rate", {"learning rate": ("step", "lr")}, False),
    ("Gradient norm", "norm", {"gradient norm": ("step", "grad_norm")}, True),
    ("Samples per second", "samples/s", {"samples/s": ("step", "samples_per_s")}, False),
    ("Model FLOPs utilization", "share", {"MFU": ("step", "mfu")}, False),
    ("Waiting for data", "share", {"share of a step": ("step", "data_stall")}, False),
    ("Loss scale", "scale", {"loss scale": ("step", "loss_scale")}, True),
]
"""Title, axis, series, and whether the axis is logarithmic."""
_FIGURES = {
    "val_loss": "validation loss",
    "val_accuracy": "validation accuracy",
    "val_perplexity": "validation perplexity",
    "train_loss": "training loss",
    "best_epoch": "best epoch",
    "epochs": "epochs",
    "steps": "steps",
    "samples_per_s": "samples/s",
}
_PHASES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "rest_of_step": "rest of the step",
    "sync": "sync between workers",
    "validation": "validation",
    "checkpoint": "checkpoints",
}
_MAX_STALL = 0.1
"""Share of a step that training may wait for data before the page names the bottleneck of reading."""
_SHORT_CODE = len("sha256:") + 12
_SURVIVED = ("continued", "rolled_back")


def training_page(path: UPath) -> Page:
    """Return the page of the run in this folder."""
    run, curves, events = RunFolder(path), read_curves(path), read_events(path)
    page = Page(f"{run.recipe.get('name', run.run_id)}, trained", run.state)
    evaluation = Evaluation.load(path)
    if evaluation and evaluation.judgement and run.status == "succeeded":
        judgement = evaluation.judgement
        page.add_verdict(judgement.verdict, judgement.mood, judgement.basis)
    _add_summary(page, run, curves)
    _add_origin(page, run)
    _add_lineage(page, run)
    page.add_heading("Curves")
    charts = [curves.chart(*chart) for chart in _CHARTS]
    charts[1:1] = [_metric_chart(curves, name) for name in _other_metrics(curves.of_epochs)]
    if drawn := [chart for chart in charts if chart is not None]:
        page.add_charts(*drawn)
    else:
        page.add_text("No step has been recorded yet.")
    _add_time(page, run, curves)
    _add_augmentation(page, path)
    if evaluation:
        _add_evaluation(page, evaluation)
    _add_data(page, path, curves)
    _add_events(page, events)
    page.add_heading("Recipe")
    page.add_code(run.recipe_text, "Show the whole recipe, with every default")
    return page


def _add_summary(page: Page, run: RunFolder, curves: Curves) -> None:
    result = run.result
    if result and result.error:
        page.add_error(result.error)
    metrics = result.metrics if result else _latest(curves)
    titles = _FIGURES | {name: _title_of(name) for name in _other_metrics(metrics)}
    figures: dict[str, object] = {
        title: number(metrics[name]) for name, title in titles.items() if metrics.get(name) is not None
    }
    if result:
        figures["time"] = duration(result.duration_s)
    if figures:
        page.add_figures(figures)


def _other_metrics(names: Iterable[str]) -> list[str]:
    """Return the metrics of the task that have no title here."""
    return [name for name in names if name.startswith("val_") and name not in _FIGURES]


def _title_of(metric: str) -> str:
    return f"validation {metric.removeprefix('val_').replace('_', ' ')}"


def _metric_chart(curves: Curves, name: str) -> Chart | None:
    title = name.removeprefix("val_").replace("_", " ")
    return curves.chart(title.capitalize(), title, {"validation": ("epoch", name)})


def _latest(curves: Curves) -> dict[str, float]:
    """Return the newest values of a run that is under way."""
    of_epochs = {name: curve.values[-1] for name, curve in curves.of_epochs.items()}
    steps = curves.of_steps.get("loss")
    return of_epochs | ({"steps": steps.steps[-1]} if steps else {})


def _add_origin(page: Page, run: RunFolder) -> None:
    """Add the machine, date and code of the run, and its recipe's differences from the defaults."""
    facts: dict[str, object] = {}
    if run.usage:
        last = run.usage[-1]
        facts = {
            "machine": last.machine or "unknown",
            "began": f"{run.usage[0].began:%Y-%m-%d %H:%M} UTC",
            "code": last.code[:_SHORT_CODE] or "unknown",
        }
    page.add_facts(facts)
    if differences := run.differences:
        page.add_heading("The recipe's differences from its defaults")
        page.add_code("\n".join(f"{key}: {json.dumps(value, default=str)}" for key, value in differences.items()))


def _add_lineage(page: Page, run: RunFolder) -> None:
    """Add the chain from data to weights. What came of the weights is on the pages of later jobs."""
    recipe, artifacts = run.recipe, run.result.artifacts if run.result else {}
    steps: dict[str, object] = {"data": recipe.get("data", {}).get("source", "unknown")}
    if trial := recipe.get("tuned_from"):
        steps["trial"] = link_to_run("tune", trial["run"], f"trial {trial['trial']} of {trial['run']}")
    steps["training"] = run.run_id
    if checkpoint := artifacts.get("checkpoint"):
        steps["checkpoint"] = checkpoint.rpartition("/")[2]
    if weights := artifacts.get("weights"):
        steps["weights"] = weights
    page.add_heading("Lineage")
    page.add_trail(steps)


def _add_time(page: Page, run: RunFolder, curves: Curves) -> None:
    """Add where the time went, as the first worker saw it, and what it cost."""
    page.add_heading("Time and cost")
    phases = curves.total("phase_s.")
    in_workers = sum(attempt.seconds for attempt in run.usage)
    amounts: dict[str, float] = {title: phases[name] for name, title in _PHASES.items() if name in phases}
    amounts["start of the workers, and the rest"] = max(0.0, in_workers - sum(phases.values()))
    # Several attempts may be of several jobs, and the result has the time of the last job alone.
    if run.result and len(run.usage) == 1:
        amounts["before and after the workers"] = max(0.0, run.result.duration_s - in_workers)
    page.add_bars(amounts, duration)
    if "data_stall" in curves.of_steps:
        page.add_text(_reading(fmean(curves.of_steps["data_stall"].values), curves))
    workers = ", ".join(str(attempt.workers) for attempt in run.usage)
    facts = {"workers" if len(run.usage) < 2 else "workers of each attempt": workers, **cost_of(run.usage)}
    if fragmented := curves.of_steps.get("memory.fragmentation"):
        facts["GPU memory fragmentation"] = f"{percent(max(fragmented.values))} of what torch reserved, at most"
    page.add_facts(facts)


def _reading(stall: float, curves: Curves) -> str:
    """Return a sentence on whether training waits for its data, and why."""
    if stall <= _MAX_STALL or curves.reading is None:
        return f"Data is no bottleneck: {percent(stall)} of a step."
    return f"Training waited for data in {percent(stall)} of a step: {curves.reading}."


def _add_augmentation(page: Page, path: UPath) -> None:
    samples = AugmentedSamples.load(path)
    if samples is None:
        return
    page.add_heading("Augmentation")
    changes = [f"change {number}" for number in range(1, 1 + len(samples.after[0]))]
    rows = [
        [_cell(sample), *map(_cell, changed)] for sample, changed in zip(samples.before, samples.after, strict=True)
    ]
    page.add_table(["sample", *changes], rows)


def _cell(shown: ShownInput) -> str | Picture:
    return Picture(shown.png_base64, "a sample", shown.caption) if shown.png_base64 else shown.text


def _add_evaluation(page: Page, found: Evaluation) -> None:
    page.add_heading("Predictions on the validation split")
    if found.skipped:
        page.add_text(f"Not made: {found.skipped}.")
        return
    page.add_text(f"The weights of the best epoch, on {found.rows:,} of {found.of:,} rows.")
    if found.matrix:
        page.add_matrix(found.labels, found.matrix)
    if found.numbers:
        page.add_charts(*_number_charts(found.numbers))
    _add_scores(page, found)
    if found.worst:
        page.add_heading("Worst samples")
        page.add_table(*_worst_table(found))


def _add_scores(page: Page, found: Evaluation) -> None:
    """Add how well each label is found, and how far probabilities can be trusted."""
    if found.scores:
        page.add_heading("Scores by label")
        columns = ["label", "rows", "precision", "recall", "F1"]
        rows: list[list[object]] = [
            [score.label, f"{score.rows:,}", _share(score.precision), _share(score.recall), _share(score.f1)]
            for score in found.scores
        ]
        page.add_table(columns, rows)
    if (calibration := found.calibration) is not None:
        page.add_heading("Calibration")
        page.add_text(
            f"Expected calibration error {calibration.error:.4f}: the mean distance between the probability of a "
            "prediction and how often such predictions are right."
        )
        bins = calibration.bins
        reached = Series(
            "right", [part.probability for part in bins], [part.right for part in bins], "both",
            [f"{part.count:,} predictions" for part in bins],
        )  # fmt: skip
        ideal = Series("as often as said", [0.0, 1.0], [0.0, 1.0])
        page.add_charts(Chart("Reliability", "probability", "share that is right", [reached, ideal]))


def _number_charts(numbers: list[tuple[float, float]]) -> tuple[Chart, Chart]:
    """Return charts of predicted against true numbers, and of residuals."""
    true, predicted = map(list, zip(*numbers, strict=True))
    ends = [min(true), max(true)]
    residuals = [given - value for value, given in numbers]
    width = [min(predicted), max(predicted)]
    return (
        Chart("Predicted against true", "true", "predicted",
              [Series("rows", true, predicted, "points"), Series("all right", ends, ends)]),
        Chart("Residuals", "predicted", "predicted − true",
              [Series("rows", predicted, residuals, "points"), Series("all right", width, [0.0, 0.0])]),
    )  # fmt: skip


def _worst_table(found: Evaluation) -> tuple[list[str], list[list[object]]]:
    if found.worst[0].label is None:
        return ["text", "mean loss"], [[sample.text or "", f"{sample.loss:.3f}"] for sample in found.worst]
    has_probability = found.worst[0].probability is not None
    columns = ["input", "label", "predicted", *(["probability of the label"] if has_probability else []), "loss"]
    return columns, [
        [
            Picture(sample.png_base64, "the input") if sample.png_base64 else sample.text or "",
            sample.label or "",
            # A number is never just right.
            sample.predicted if found.numbers else _marked(sample),
            *([f"{sample.probability or 0.0:.4f}"] if has_probability else []),
            f"{sample.loss:.3f}",
        ]
        for sample in found.worst
    ]


def _marked(sample: WorstSample) -> State:
    return State(sample.predicted or "", "good" if sample.predicted == sample.label else "bad")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _add_data(page: Page, path: UPath, curves: Curves) -> None:
    report = DataReport.load(path)
    if report is None:
        return
    page.add_heading("Data")
    cleaning = report.cleaning
    page.add_facts(
        {
            "source": report.source,
            f"{cleaning.what} given": f"{cleaning.given:,}",
            "kept": f"{cleaning.kept:,}",
            **{f"dropped: {reason}": f"{count:,}" for reason, count in cleaning.reasons.items()},
            **{f"rows for {split}": f"{count:,}" for split, count in report.rows.items()},
            **{f"trained on, of {name}": f"{count:,.0f}" for name, count in curves.total("source_samples.").items()},
        }
    )
    if cleaning.columns:
        page.add_table(["column", "read as"], list(cleaning.columns.items()))
    if cleaning.shown:
        page.add_table(["dropped", "example"], cleaning.shown)


def _add_events(page: Page, events: list[Event]) -> None:
    alerts = [event for event in events if event.kind == "alert"]
    survived = [event for event in events if event.kind in _SURVIVED]
    page.add_heading("Alerts and failures")
    page.add_figures(
        {
            "alerts fired": len(alerts),
            "times continued": sum(event.kind == "continued" for event in survived),
            "rollbacks": sum(event.kind == "rolled_back" for event in survived),
        }
    )
    if events:
        columns = ["time, UTC", "what", "step", "epoch", "details"]
        rows = [
            [
                f"{event.time:%Y-%m-%d %H:%M:%S}",
                event.kind.replace("_", " "),
                number(event.step),
                number(event.epoch),
                event.message,
            ]
            for event in events
        ]
        page.add_table(columns, rows)
