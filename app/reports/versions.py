"""Versions of models as pages show them: what they came from, and how they measured up."""

from upath import UPath

from app.pages.content import Link
from app.pages.words import number
from app.reports.run_folder import link_to_run
from app.repository.manifest import Manifest

_SHORT_SHA = 12


def trail_of(manifest: Manifest, storage: UPath) -> dict[str, object]:
    """Return the chain from the data to the version, with links to the pages of the runs between."""
    lineage = manifest.lineage
    steps: dict[str, object] = {"data": f"sha256 {lineage.data_fingerprint[:_SHORT_SHA]}"}
    if lineage.trial:
        search = lineage.trial.rpartition(" ")[2]
        steps["trial"] = link_to_run("tune", search, lineage.trial)
    if lineage.imported:
        steps["imported from"] = str(lineage.imported)
    if lineage.pretrained:
        steps["weights from"] = lineage.pretrained
    if lineage.train_run:
        steps["training and checkpoint"] = _link(lineage.train_run, storage)
    steps["compilation"] = _link(lineage.compile_run, storage)
    steps["model file"] = f"sha256 {manifest.engine_key.onnx_sha256[:_SHORT_SHA]}"
    steps["version"] = f"{manifest.name}/{manifest.version}"
    return steps


def facts_of(manifest: Manifest) -> dict[str, object]:
    """Return what is known of a version."""
    return {
        "engine": str(manifest.engine_key),
        "score": manifest.score_in_words,
        f"difference from {manifest.lineage.baseline}": (
            f"{manifest.max_difference:.1e} at most, cosine {manifest.cosine:.5f}"
        ),
        "quantization": _quantization_of(manifest),
        "size": f"{manifest.size_bytes / 1e6:.2f} MB",
        "created": f"{manifest.created:%Y-%m-%d %H:%M:%S} UTC",
        "recipe": f"sha256 {manifest.lineage.recipe[:_SHORT_SHA]}",
        "code": manifest.lineage.code,
        ("streams" if manifest.generation else "largest batch"): number(manifest.serving.max_batch_size),
    }


def _quantization_of(manifest: Manifest) -> str:
    if manifest.generation:
        return "none" if manifest.engine_key.precision == "fp32" else f"weights in {manifest.engine_key.precision}"
    return str(manifest.quantization or "none")


def _link(run_folder: str, storage: UPath) -> Link | str:
    """Return a link to a run's page, if the run lies in this storage."""
    folder = run_folder.rstrip("/")
    if not folder.startswith(str(storage).rstrip("/")):
        return folder
    job, run_id = folder.split("/")[-2:]
    return link_to_run(job, run_id)
