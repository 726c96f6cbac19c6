"""Import a model that was trained elsewhere: check it, compile it, compare it and publish it."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.compile.compilation import Compilation
from app.compile.files import Log
from app.compile.generation.variants import require_rows
from app.compile.imported.formats import generates_text, open_model, require_merged
from app.compile.imported.model import ImportedModel, lines_of
from app.compile.imported.natural import read_processor
from app.compile.imported.source import ImportRows, imported_source, made_up_rows, own_rows
from app.compile.run import choose_and_publish, print_line
from app.compile.variants import RequestedVariants, requested_variants
from app.config import CompileConfig
from app.engines.architecture import usable_cores
from app.engines.base import Signature
from app.errors import CompileError
from app.heartbeat import run_lock
from app.runs import Outcome, Run

_CALIBRATED = ("int8", "fp8")


@dataclass(frozen=True)
class Given:
    """What a person brings."""

    model: Path
    samples: Path | None = None
    """A table or npz file of rows. None: rows are random."""

    labels: Path | None = None
    """The labels in the order of the output's columns: JSON, or one a line."""

    processor: Path | None = None
    """A folder with a tokenizer or image processor, in Hugging Face's layout."""

    scores: str | None = None
    """The output whose columns are the labels; by default, the only one that can be."""

    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The values of sizes that vary, for random rows."""


def import_model(run: Run, given: Given, log: Log = print_line) -> Outcome:
    """Publish a model under the name of the run's recipe, by the gates and the objective of its ``compile``.

    Args:
        log: called with each line of progress.

    Raises:
        RayloomError: the model or the rows are refused, before a run is opened. Or no variant passes the gates, and the
            report says why.
    """
    require_merged(given.model)
    if generates_text(given.model):
        _refuse_for_tokens(given)
        from app.compile.generation.run import compile_imported  # imports the engines of language models

        return compile_imported(run, given.model.absolute(), given.samples and given.samples.absolute(), log)
    require_rows(run.recipe)
    with tempfile.TemporaryDirectory(prefix="rayloom-import-") as temporary:
        folder = Path(temporary)
        model = _labelled(open_model(given.model, folder), given)
        if given.processor:
            natural = read_processor(given.processor.absolute())
            model = model.answering(natural.processor, natural.lengths, str(given.processor))
        rows = own_rows(given.samples.absolute(), model) if given.samples else made_up_rows(model, given.sizes)
        config = _config(run.recipe.compile, model.signature, rows, log)
        requested = _without_module(requested_variants(config))
        source = imported_source(model, rows, run.recipe, usable_cores())
        reference = source.reference
        # All that can be refused was refused by now, so a refusal leaves no run behind.
        run.open()
        score = f": {reference.score}" if reference.score else ""
        log(f"{model.source}: {source.baseline} on {len(rows.compared):,} {rows.kind} rows{score}")
        with run_lock(run.folder):
            return choose_and_publish(run, Compilation(source, config, requested, folder / "files", log), log)


def _refuse_for_tokens(given: Given) -> None:
    """Raise CompileError for an option that a language model does not have."""
    options = {
        "--labels": given.labels,
        "--processor": given.processor,
        "--scores": given.scores,
        "--size": given.sizes,
    }
    if named := [name for name, value in options.items() if value]:
        raise CompileError(
            f"{str(given.model)!r} is a language model, which has no {named[0]}: leave it out, and give texts with "
            "--samples"
        ).of("option.unsupported", named[0])


def _labelled(model: ImportedModel, given: Given) -> ImportedModel:
    labels = _read_labels(given.labels) if given.labels else model.labels
    return model.labelled(labels, given.scores or model.scores) if labels or given.scores else model


def _read_labels(path: Path) -> list[str]:
    """Return the labels of a JSON list, or of a file with one a line. Raises CompileError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        labels = json.loads(text) if path.suffix == ".json" else lines_of(text)
    except (OSError, ValueError) as error:
        raise CompileError(f"--labels {str(path)!r} cannot be read ({error}): give one label a line, or JSON").of(
            "file.unreadable", "--labels"
        ) from error
    if not (isinstance(labels, list) and labels and all(isinstance(label, str) for label in labels)):
        raise CompileError(f"--labels {str(path)!r} is no list of texts: give one label a line, or a list in JSON").of(
            "labels.not_a_list", "--labels"
        )
    return labels


def _config(config: CompileConfig, signature: Signature, rows: ImportRows, log: Log) -> CompileConfig:
    """Leave out what the model or its rows cannot do. Raises CompileError if nothing is left."""
    changes: dict[str, object] = {}
    if signature.takes_one_row and config.batch_sizes != [1]:
        log("the model takes one row a call, so batches of 1 are measured: export it with a dynamic batch for others")
        changes["batch_sizes"] = [1]
    if rows.calibration is None and (left_out := [name for name in config.precisions if name in _CALIBRATED]):
        kept = [name for name in config.precisions if name not in _CALIBRATED]
        reason = f"{', '.join(left_out)} needs real rows, 64 or more: give them with --samples"
        if not kept:
            raise CompileError(f"compile.precisions is {config.precisions}, and {reason}").of(
                "samples.missing", "--samples"
            )
        log(f"not made: {reason}")
        changes["precisions"] = kept
    return config.model_copy(update=changes)


def _without_module(requested: RequestedVariants) -> RequestedVariants:
    """Leave PyTorch out, which needs the code of the model."""
    variants = [variant for variant in requested.variants if not variant.runs_module]
    if not variants:
        raise CompileError(
            "compile.engines names only torch, which needs the code of the model: name another engine"
        ).of("torch.no_code", "compile.engines")
    return replace(requested, variants=variants)
