"""Format versions of models for people."""

from collections.abc import Iterator, Sequence

from app.cli.tables import aligned
from app.repository.manifest import Generation, ImportedFrom, Manifest, Quantization, ServingDefaults
from app.repository.repository import ListedVersion

_HEADER = ("model", "version", "aliases", "precision", "engine", "score", "size", "created")


def table_of(listed: Sequence[ListedVersion]) -> Iterator[str]:
    """Yield a line for each version of each model, below a header."""
    return aligned([_HEADER, *map(_row, listed)])


def description_of(manifest: Manifest, aliases: Sequence[str], folder: str) -> Iterator[str]:
    """Yield everything in a version's manifest, one line per fact."""
    key, lineage = manifest.engine_key, manifest.lineage
    return aligned(
        [
            ("model", f"{manifest.name}, version {manifest.version}"),
            ("aliases", ", ".join(aliases) or "none"),
            ("created", f"{manifest.created:%Y-%m-%d %H:%M:%S} UTC"),
            ("task", manifest.task),
            ("engine", str(key)),
            ("score", manifest.score_in_words),
            (f"to {lineage.baseline}", _parity(manifest)),
            *_generation(manifest.generation),
            *(("quantized", line) for line in _quantization(manifest.quantization)),
            *(("input", str(tensor)) for tensor in manifest.inputs),
            *(("output", str(tensor)) for tensor in manifest.outputs),
            ("serving", _serving(manifest.serving, manifest.generation is not None)),
            ("data", lineage.data_fingerprint),
            ("recipe", f"sha256:{lineage.recipe}"),
            ("code", lineage.code),
            *([("trial", lineage.trial)] if lineage.trial else []),
            *([("teacher", lineage.teacher)] if lineage.teacher else []),
            *([("pretrained", lineage.pretrained)] if lineage.pretrained else []),
            *([("train run", lineage.train_run)] if lineage.train_run else []),
            *(("imported", line) for line in _imported(lineage.imported)),
            ("compile run", lineage.compile_run),
            ("source file", f"sha256:{key.onnx_sha256}"),
            ("folder", f"{folder}, {_size(manifest.size_bytes)}"),
            *(("file", f"{sha256}  {file}") for file, sha256 in manifest.files.items()),
        ]
    )


def _row(listed: ListedVersion) -> tuple[str, ...]:
    identity = listed.name, str(listed.version), ", ".join(listed.aliases)
    manifest = listed.manifest
    if manifest is None:
        return *identity, "damaged", "", "", "", ""
    return (
        *identity,
        manifest.engine_key.precision,
        manifest.engine_key.engine,
        str(manifest.score or ""),
        _size(manifest.size_bytes),
        f"{manifest.created:%Y-%m-%d %H:%M} UTC",
    )


def _parity(manifest: Manifest) -> str:
    return f"cosine {manifest.cosine:.4f}, largest difference {manifest.max_difference:.1e}"


def _generation(generation: Generation | None) -> Iterator[tuple[str, str]]:
    """Yield what a language model generates, and how it was measured. Nothing for a model that answers batches."""
    if generation is None:
        return
    chat = "with a chat template" if generation.has_chat else "without a chat template"
    yield "generates", f"{generation.context_length:,} tokens with the prompt, {chat}"
    yield "greedy tokens", f"equal in {generation.greedy.equal_prompts} of {generation.greedy.prompts} prompts"
    if generation.speculation:
        yield "speculation", str(generation.speculation)
    if (ours := generation.perplexity) and (before := generation.baseline_perplexity):
        yield "perplexity", f"{ours}, in float32 {before.value:.3f}"


def _imported(imported: ImportedFrom | None) -> Iterator[str]:
    """Yield the source of an imported model, and the sha256 of each of its files. Nothing for a trained one."""
    if imported is not None:
        yield str(imported)
        yield f"rows: {imported.samples or 'random'}"
        yield from (f"{sha256}  {file}" for file, sha256 in imported.files.items())


def _quantization(quantization: Quantization | None) -> Iterator[str]:
    """Yield how a model was quantized, and the layers left in float. Nothing for a float model."""
    if quantization is not None:
        yield str(quantization)
        yield from quantization.exempt


def _serving(defaults: ServingDefaults, generates: bool) -> str:
    if generates:
        return f"{defaults.max_batch_size} streams, replicas {defaults.replicas}, threads {defaults.threads}"
    by_length = ", ".join(f"{length}: {rows}" for length, rows in defaults.max_batch_size_by_length.items())
    preferred = ", ".join(map(str, defaults.preferred_batch_sizes))
    return (
        f"max_batch_size {defaults.max_batch_size}{f' (by length {by_length})' if by_length else ''}"
        f"{f', preferred {preferred}' if preferred else ''}, timeout_us "
        f"{defaults.timeout_us}, replicas {defaults.replicas}, threads {defaults.threads}"
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"
