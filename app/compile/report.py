"""What a compile run leaves to read: ``report.json`` for programs, ``report.html`` for a person."""

import platform
from collections.abc import Sequence

from pydantic import BaseModel
from upath import UPath

from app.compile.choice import Choice
from app.compile.compilation import Compilation
from app.compile.files import ModelFile
from app.compile.operating_points import OperatingPoint, pareto_front
from app.compile.plots import front_plot
from app.compile.records import BuiltPlan, PublishedAccuracy, VariantRecord
from app.compile.variants import BUILT_AHEAD, Skipped
from app.page import Page
from app.repository.manifest import Quantization, ServingDefaults
from app.storage import write_atomically

DATA_FILE, PAGE_FILE = "report.json", "report.html"


class CompileReport(BaseModel):
    """Everything that was measured, and what came of it."""

    recipe: str
    machine: str
    threads: int
    validation_rows: int
    accuracy_to_keep: float
    files: list[ModelFile]
    variants: list[VariantRecord]
    skipped: list[Skipped]
    plans: list[BuiltPlan]
    points: list[OperatingPoint]
    front: list[OperatingPoint]
    """Of the variants that could be published: what no other point beats."""

    chosen: VariantRecord | None
    point: OperatingPoint | None
    """The setting that the chosen variant is served in."""

    serving: ServingDefaults | None
    accuracy: PublishedAccuracy | None = None
    """Accuracy of the chosen variant."""

    error: str | None
    """Why nothing was chosen."""


def report_of(
    compilation: Compilation,
    recipe: str,
    choice: Choice | None,
    error: str | None = None,
) -> CompileReport:
    """As much as there is."""
    publishable = [each for each in compilation.points if compilation.record_of(each).publishable]
    subject = compilation.subject
    return CompileReport(
        recipe=recipe,
        machine=platform.machine(),
        threads=subject.threads,
        validation_rows=len(subject.reference.classes),
        accuracy_to_keep=subject.accuracy_to_keep,
        files=compilation.files,
        variants=compilation.records,
        skipped=compilation.skipped,
        plans=compilation.plans,
        points=compilation.points,
        front=pareto_front(publishable),
        chosen=choice and choice.record,
        point=choice and choice.point,
        serving=choice and choice.serving,
        accuracy=choice and choice.accuracy,
        error=error,
    )


def write_report(report: CompileReport, folder: UPath) -> UPath:
    """Write both files, and return the page."""
    write_atomically(folder / DATA_FILE, report.model_dump_json(indent=1).encode())
    page = Page(f"{report.recipe}, compiled")
    page.add_facts(_facts(report))
    page.add_heading("Variants")
    page.add_table(*_variants(report))
    if report.points:
        page.add_heading("Pareto front of accuracy, latency, throughput and size")
        page.add_table(*_points(report.front, report.point))
        page.add_heading("Every setting that was measured")
        page.add_text("A marker's area is the size of the file, its symbol says whether it lies on the front.")
        page.add_figure(front_plot(report.points, report.front))
    page.add_heading("Files")
    page.add_table(*_files(report))
    page.write(folder / PAGE_FILE)
    return folder / PAGE_FILE


def _facts(report: CompileReport) -> dict[str, object]:
    serving = report.serving.model_dump() if report.serving else {}
    if serving:
        by_length = serving["max_batch_size_by_length"].items()
        serving["max_batch_size_by_length"] = ", ".join(f"{length}: {rows}" for length, rows in by_length) or "the same"
        serving["preferred_batch_sizes"] = ", ".join(map(str, serving["preferred_batch_sizes"])) or "any"
    return {
        "chosen": report.point or f"nothing: {report.error}",
        **serving,
        **({"published accuracy": report.accuracy} if report.accuracy else {}),
        "accuracy of PyTorch": f"{report.accuracy_to_keep:.4f} on {report.validation_rows:,} validation samples",
        "machine": f"{report.machine}, {report.threads} cores",
    }


def _variants(report: CompileReport) -> tuple[list[str], list[list[object]]]:
    sizes = sorted({size for each in report.variants for size in each.latency_ms})
    columns = ["variant", "size, MB", "accuracy", "largest difference", "cosine"]
    columns += [f"ms, batch {size}" for size in sizes] + [f"rows/s, batch {size}" for size in sizes] + ["gates"]
    rows: list[list[object]] = [
        [
            each.variant,
            f"{each.size_bytes / 1e6:.2f}",
            f"{each.accuracy:.4f}",
            f"{each.max_difference:.1e}",
            f"{each.cosine:.5f}",
            *(f"{each.latency_ms[size]:.2f}" for size in sizes),
            *(f"{each.throughput[size]:,.0f}" for size in sizes),
            "; ".join(each.reasons) or ("to compare with" if each.baseline else "hold"),
        ]
        for each in report.variants
    ]
    blank = [""] * (len(columns) - 2)
    rows += [[f"{each.engine} {each.precision}", *blank, f"not run: {each.reason}"] for each in report.skipped]
    rows += [
        [f"{BUILT_AHEAD} {each.precision}", *blank, f"built for {', '.join(each.targets)}"] for each in report.plans
    ]
    return columns, rows


def _points(points: Sequence[OperatingPoint], point: OperatingPoint | None) -> tuple[list[str], list[list[object]]]:
    columns = ["", "variant", "batch", "at once", "threads each", "accuracy", "ms", "ms, 95 of 100", "rows/s", "MB"]
    return columns, [
        [
            "chosen" if each == point else "",
            each.variant,
            each.batches,
            each.concurrency.streams,
            each.concurrency.threads,
            f"{each.accuracy:.4f}",
            f"{each.latency_ms:.2f}",
            f"{each.latency_p95_ms:.2f}",
            f"{each.throughput:,.0f}",
            f"{each.size_bytes / 1e6:.2f}",
        ]
        for each in sorted(points, key=lambda each: each.latency_ms)
    ]


def _files(report: CompileReport) -> tuple[list[str], list[list[object]]]:
    columns = ["file", "MB", "as ONNX Runtime runs it, and bf16 OpenVINO", "gates", "quantised"]
    return columns, [
        [
            each.name,
            f"{each.size_bytes / 1e6:.2f}",
            each.parity or "",
            each.verdict,
            _quantised(each.quantization),
        ]
        for each in report.files
    ]


def _quantised(quantization: Quantization | None) -> str:
    if quantization is None:
        return ""
    return f"{quantization}: {', '.join(quantization.exempt)}" if quantization.exempt else str(quantization)
