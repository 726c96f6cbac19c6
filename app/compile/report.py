"""The reports of a compile run: ``report.json`` for programs, ``report.html`` for people."""

import platform
from collections.abc import Sequence

from pydantic import BaseModel
from upath import UPath

from app.compile.choice import Choice
from app.compile.compilation import Compilation
from app.compile.files import ModelFile
from app.compile.records import BuiltPlan, PublishedScore, VariantRecord
from app.compile.timing import OperatingPoint, pareto_front
from app.compile.variants import BUILT_AHEAD, Skipped
from app.pages.content import Chart, Series, State
from app.pages.page import REPORT_FILE, Page
from app.repository.manifest import Quantization, ServingDefaults
from app.repository.score import ACCURACY, Score
from app.storage import write_atomically

DATA_FILE = "report.json"


class CompileReport(BaseModel):
    """Everything that was measured, and the choice."""

    recipe: str
    machine: str
    threads: int
    baseline: str = "PyTorch"
    """What the variants were compared with."""

    validation_rows: int
    score_to_keep: Score | None
    files: list[ModelFile]
    variants: list[VariantRecord]
    skipped: list[Skipped]
    plans: list[BuiltPlan]
    points: list[OperatingPoint]
    front: list[OperatingPoint]
    """The Pareto front over all points of publishable variants."""

    chosen: VariantRecord | None
    point: OperatingPoint | None
    """The setting in which the chosen variant is served."""

    headline: str | None = None
    """How much faster than the baseline it is, and whether the score is kept. None: there is no baseline to compare."""

    serving: ServingDefaults | None
    accuracy: PublishedScore | None = None
    """Accuracy of the chosen variant."""

    error: str | None
    """Why nothing was chosen."""


def report_of(
    compilation: Compilation,
    recipe: str,
    choice: Choice | None,
    error: str | None = None,
) -> CompileReport:
    """Return the report of a run that has ended, or that failed with ``error``."""
    # A baseline or a refused variant on the Pareto front would hide the variants that can be chosen.
    publishable = [point for point in compilation.points if compilation.record_of(point).publishable]
    source_model = compilation.source_model
    return CompileReport(
        recipe=recipe,
        machine=platform.machine(),
        threads=source_model.threads,
        baseline=source_model.baseline,
        validation_rows=len(source_model.reference.rows),
        score_to_keep=source_model.score_to_keep,
        files=compilation.files,
        variants=compilation.records,
        skipped=compilation.skipped,
        plans=compilation.plans,
        points=compilation.points,
        front=pareto_front(publishable),
        chosen=choice and choice.record,
        point=choice and choice.point,
        headline=choice and _headline(compilation, choice),
        serving=choice and choice.serving,
        accuracy=choice and choice.accuracy,
        error=error,
    )


def _headline(compilation: Compilation, choice: Choice) -> str | None:
    point, source_model = choice.point, compilation.source_model
    baseline = compilation.baseline_of(point)
    if baseline is None:
        return None
    by_latency = compilation.config.objective.goal == "min_latency"
    speed = baseline.latency_ms / point.latency_ms if by_latency else point.throughput / baseline.throughput
    return f"{speed:.1f} × {source_model.baseline}{_kept(source_model.score_to_keep, choice.record.score)}"


def _kept(before: Score | None, after: Score | None) -> str:
    """Return what became of the score, as the end of a sentence."""
    if before is None or after is None:
        return ""
    lost = before.quality - after.quality
    return f", {before.metric.replace('_', ' ')} {'kept' if lost <= 0 else f'{lost:.4f} worse'}"


def write_report(report: CompileReport, folder: UPath) -> UPath:
    """Write both files, and return the page."""
    write_atomically(folder / DATA_FILE, report.model_dump_json(indent=1).encode())
    state = State("published" if report.chosen else "nothing published", "good" if report.chosen else "bad")
    page = Page(f"{report.recipe}, compiled", state)
    if report.error:
        page.add_error(report.error)
    if report.headline:
        page.add_verdict(
            report.headline, "", f"Compared with the best setting of {report.baseline} on the same device."
        )
    if report.accuracy and (judgement := report.accuracy.judgement):
        page.add_verdict(judgement.verdict, judgement.mood, judgement.basis)
    page.add_facts(_facts(report))
    page.add_heading("Variants")
    page.add_table(*_variants(report), is_list=True)
    for title, speeds in _speeds(report).items():
        page.add_heading(title)
        page.add_table(*speeds)
    if report.points:
        page.add_heading(f"Pareto front of {_metric(report)}, latency, throughput and size")
        page.add_table(*_points(report))
        page.add_heading("All measured settings")
        page.add_charts(_settings_chart(report.points, report.front))
    page.add_heading("Files")
    page.add_table(*_files(report))
    page.write(folder / REPORT_FILE)
    return folder / REPORT_FILE


def _facts(report: CompileReport) -> dict[str, object]:
    serving = report.serving.model_dump() if report.serving else {}
    if serving:
        by_length = serving["max_batch_size_by_length"].items()
        serving["max_batch_size_by_length"] = ", ".join(f"{length}: {rows}" for length, rows in by_length) or "the same"
        serving["preferred_batch_sizes"] = ", ".join(map(str, serving["preferred_batch_sizes"])) or "any"
    return {
        "chosen": report.point or f"nothing: {report.error}",
        **serving,
        **({"published": report.accuracy} if report.accuracy else {}),
        f"{_metric(report)} of {report.baseline}": f"{_value(report.score_to_keep)} on {report.validation_rows:,} rows",
        "machine": f"{report.machine}, {report.threads} cores",
    }


def _variants(report: CompileReport) -> tuple[list[str], list[list[object]]]:
    columns = ["variant", "size, MB", _metric(report), "largest difference", "cosine", "gates"]
    rows: list[list[object]] = [
        [
            record.variant,
            f"{record.size_bytes / 1e6:.2f}",
            _value(record.score),
            f"{record.max_difference:.1e}",
            f"{record.cosine:.5f}",
            "; ".join(record.reasons) or ("baseline" if record.baseline else "passed"),
        ]
        for record in report.variants
    ]
    # Variants that did not run have a name and a reason, and no figures.
    blank = [""] * (len(columns) - 2)
    rows += [
        [f"{variant.engine} {variant.precision}", *blank, f"not run: {variant.reason}"] for variant in report.skipped
    ]
    rows += [
        [f"{BUILT_AHEAD} {plan.precision}", *blank, f"built for {', '.join(plan.targets)}"] for plan in report.plans
    ]
    return columns, rows


def _speeds(report: CompileReport) -> dict[str, tuple[list[str], list[list[object]]]]:
    """Return tables of the variants by batch size, with their titles."""
    records = report.variants
    sizes = sorted({size for record in records for size in record.latency_ms})
    columns = ["variant", *(f"batch {size}" for size in sizes)]
    tables: dict[str, list[list[object]]] = {
        "Milliseconds of a call": [
            [item.variant, *(f"{item.latency_ms[size]:.2f}" for size in sizes)] for item in records
        ],
        "Rows per second": [[item.variant, *(f"{item.throughput[size]:,.0f}" for size in sizes)] for item in records],
    }
    return {title: (columns, rows) for title, rows in tables.items() if rows}


def _points(report: CompileReport) -> tuple[list[str], list[list[object]]]:
    columns = ["", "variant", "batch", "streams", "threads each", _metric(report), "ms", "p95 ms", "rows/s", "MB"]
    return columns, [
        [
            "chosen" if point == report.point else "",
            point.variant,
            point.batches,
            point.concurrency.streams,
            point.concurrency.threads,
            _value(point.score),
            f"{point.latency_ms:.2f}",
            f"{point.latency_p95_ms:.2f}",
            f"{point.throughput:,.0f}",
            f"{point.size_bytes / 1e6:.2f}",
        ]
        for point in sorted(report.front, key=lambda point: point.latency_ms)
    ]


def _files(report: CompileReport) -> tuple[list[str], list[list[object]]]:
    columns = ["file", "MB", "parity on ONNX Runtime (bf16: OpenVINO)", "gates", "quantization"]
    return columns, [
        [
            file.name,
            f"{file.size_bytes / 1e6:.2f}",
            file.parity or "",
            file.verdict,
            _quantization(file.quantization),
        ]
        for file in report.files
    ]


def _quantization(quantization: Quantization | None) -> str:
    if quantization is None:
        return ""
    return f"{quantization}: {', '.join(quantization.exempt)}" if quantization.exempt else str(quantization)


def _settings_chart(points: Sequence[OperatingPoint], front: Sequence[OperatingPoint]) -> Chart:
    """Return latency against throughput, with a color for each variant."""
    by_variant: dict[str, list[OperatingPoint]] = {}
    for point in points:
        by_variant.setdefault(str(point.variant), []).append(point)
    return Chart(
        title="Latency and throughput",
        x_label="ms of a call",
        y_label="rows/s",
        series=[
            Series(
                name,
                [point.latency_ms for point in measured],
                [point.throughput for point in measured],
                kind="points",
                labels=[_label_of(point, point in front) for point in measured],
            )
            for name, measured in by_variant.items()
        ],
        log_x=True,
        log_y=True,
    )


def _metric(report: CompileReport) -> str:
    return report.score_to_keep.metric.replace("_", " ") if report.score_to_keep else ACCURACY


def _value(score: Score | None) -> str:
    return f"{score.value:.4f}" if score else "not known"


def _label_of(point: OperatingPoint, is_on_front: bool) -> str:
    place = "\non the Pareto front" if is_on_front else ""
    return f"{point}\n{point.score or 'score not known'}, {point.size_bytes / 1e6:.2f} MB{place}"
