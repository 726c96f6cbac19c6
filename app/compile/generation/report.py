"""The reports of a compile run of a language model: ``report.json`` for programs, ``report.html`` for people."""

import platform

from upath import UPath

from app.compile.generation.compilation import GenerationChoice, GenerationCompilation
from app.compile.generation.records import GenerationReport
from app.compile.report import DATA_FILE
from app.pages.content import State
from app.pages.page import REPORT_FILE, Page
from app.storage import write_atomically


def report_of(
    compilation: GenerationCompilation, recipe: str, choice: GenerationChoice | None, error: str | None = None
) -> GenerationReport:
    """Return the report of a run that has ended, or that failed with ``error``."""
    published = choice.published if choice else None
    return GenerationReport(
        recipe=recipe,
        machine=platform.machine(),
        threads=compilation.source.threads,
        documents=compilation.documents,
        variants=compilation.records,
        skipped=compilation.skipped,
        points=compilation.points,
        chosen=choice and choice.record,
        point=choice and choice.point,
        serving=choice and choice.serving,
        accuracy=published and published.score,
        perplexity=published and published.perplexity,
        baseline_perplexity=published and published.baseline,
        error=error,
    )


def write_report(report: GenerationReport, folder: UPath) -> UPath:
    """Write both files, and return the page."""
    write_atomically(folder / DATA_FILE, report.model_dump_json(indent=1).encode())
    state = State("published" if report.chosen else "nothing published", "good" if report.chosen else "bad")
    page = Page(f"{report.recipe}, compiled", state)
    if report.error:
        page.add_error(report.error)
    page.add_facts(_facts(report))
    page.add_heading("Variants")
    page.add_table(*_variants(report), is_list=True)
    if report.points:
        page.add_heading("Speed")
        page.add_table(*_points(report))
    page.write(folder / REPORT_FILE)
    return folder / REPORT_FILE


def _facts(report: GenerationReport) -> dict[str, object]:
    serving = report.serving
    return {
        "chosen": report.point or f"nothing: {report.error}",
        **({"streams": serving.max_batch_size, "replicas": serving.replicas} if serving else {}),
        **({"threads": serving.threads} if serving else {}),
        **({"published": report.accuracy} if report.accuracy else {}),
        **({"perplexity": str(report.perplexity)} if report.perplexity else {}),
        **({"in float32": str(report.baseline_perplexity)} if report.baseline_perplexity else {}),
        "compared on": f"{report.documents:,} documents" if report.documents else "random prompts, without texts",
        "machine": f"{report.machine}, {report.threads} cores",
    }


def _variants(report: GenerationReport) -> tuple[list[str], list[list[object]]]:
    columns = ["variant", "MB", "weights", "perplexity", "rise", "greedy tokens", "largest difference", "gates"]
    rows: list[list[object]] = [
        [
            record.title,
            f"{record.size_bytes / 1e6:.2f}",
            record.weights,
            f"{record.perplexity.value:.3f}" if record.perplexity else "not known",
            record.rise or "",
            f"equal in {record.greedy.equal_prompts} of {record.greedy.prompts} prompts",
            f"{record.max_difference:.1e}",
            "; ".join(record.reasons) or "passed",
        ]
        for record in report.variants
    ]
    blank = [""] * (len(columns) - 2)
    rows += [[variant.precision, *blank, f"not made: {variant.reason}"] for variant in report.skipped]
    return columns, rows


def _points(report: GenerationReport) -> tuple[list[str], list[list[object]]]:
    columns = [
        "",
        "variant",
        "streams",
        "replicas",
        "threads each",
        "tokens/s",
        "first token, ms",
        "p95 of a token, ms",
    ]
    return columns, [
        [
            "chosen" if point == report.point else "",
            point.title,
            point.streams,
            point.concurrency.streams,
            point.concurrency.threads,
            f"{point.tokens_per_s:,.0f}",
            f"{point.first_token_ms:.1f}",
            f"{point.token_p95_ms:.2f}",
        ]
        for point in report.points
    ]
