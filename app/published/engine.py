"""Opens the engine of a published version, if it gives the same numbers on this machine as when compile checked it."""

import logging
import math
from pathlib import Path

from app.engines.architecture import Device, architecture_of, compute_capability
from app.engines.base import Engine, EngineSettings, library_errors
from app.engines.cache import machine_cache
from app.engines.registry import devices_of, open_engine, runs_module, runs_plans
from app.errors import EngineError, StorageError
from app.repository.known_answers import ANSWERS_FILE, KnownAnswers
from app.repository.manifest import EngineKey, Manifest

LOG = logging.getLogger(__name__)

_DIFFERENCE_FACTOR = 2
"""Two results that are equally far from PyTorch, on opposite sides, are twice as far from each other."""

_REORDERED = 1e-3
"""Difference that the order of float32 sums may cause, on other hardware or with shards."""


def open_published(manifest: Manifest, folder: Path, threads: int) -> Engine:
    """Open the engine that a version's key names, in its precision and on its device.

    An ONNX file is compiled for this machine's processor and library version, and cached on this machine. In float32
    the processor may differ from the key's, because the file means the same numbers there. In other precisions another
    version of the library may round and fuse differently, so it must first pass the version's known answers. A
    TensorRT plan is checked by its engine.

    Args:
        folder: the version's files, as in the manifest.

    Raises:
        StorageError: the version has no file for its engine.
        EngineError: the engine cannot run here or would give other numbers (the key and this machine are named), or the
            file has other inputs or outputs than the manifest.
    """
    key, title = manifest.engine_key, f"model {manifest.name!r}, version {manifest.version},"
    if key.file not in manifest.files:
        raise StorageError(f"{title} has no {key.file}, which {key.engine} opens: publish it again").of(
            "version.incomplete"
        )
    try:
        device, sha256 = _device_for(key), manifest.files[key.file]
        # What an engine makes of a large file is as large, and would be in memory beside it while it is written.
        cache = None if manifest.has_shards else machine_cache()
        settings = EngineSettings(key.precision, threads, device=device, cache=cache, sha256=sha256)
        if runs_module(key.engine):
            engine = _open_module(manifest, folder, settings)
        else:
            engine = open_engine(key.engine, folder / key.file, settings)
    except EngineError as error:
        raise EngineError(f"{title} was compiled for {key}: {error}").of(error.rule, error.key) from error
    # Before the known answers, which have the inputs of the manifest.
    if difference := engine.signature.difference(manifest.signature):
        engine.close()
        raise EngineError(f"{title} {difference}, as its manifest says: publish it again").of("engine.other_tensors")
    if engine.version != key.engine_version:
        LOG.warning("%s was checked with %s; %s compiled it again", title, key, engine.version)
        if key.precision != "fp32":
            require_known_answers(engine, manifest, folder)
    return engine


def _open_module(manifest: Manifest, folder: Path, settings: EngineSettings) -> Engine:
    from app.engines.torch import TorchEngine  # imports torch, which takes seconds
    from app.published.weights import read_weights

    with library_errors("the module cannot be created"):
        return TorchEngine(read_weights(folder).model, manifest.signature, settings)


def require_known_answers(engine: Engine, manifest: Manifest, folder: Path) -> None:
    """Compare an engine with the version's known answers. Close it if it fails.

    Raises:
        EngineError: its difference from PyTorch is more than twice the difference that compile measured. The engine
            torch had no difference then, so for it the order of sums is allowed for.
    """
    if ANSWERS_FILE not in manifest.files:
        return
    known, measured = KnownAnswers.load(folder), manifest.scaled_difference
    difference = known.difference(engine, manifest.differing_rows)
    reordered = _REORDERED if runs_module(manifest.engine_key.engine) else 0.0
    # "not <=" instead of ">", because NaN must fail.
    if not difference <= max(_DIFFERENCE_FACTOR * measured, reordered):
        engine.close()
        changed = (
            "outputs of whole numbers, BOOL or strings differ, or are infinite"
            if math.isinf(difference)
            else f"its outputs are up to {difference:.1e} of their magnitude from PyTorch's, and were {measured:.1e}"
        )
        raise EngineError(
            f"model {manifest.name!r}, version {manifest.version}, was checked with {manifest.engine_key}: with "
            f"{engine.version} {changed}; run "
            f"jobs.compile with {engine.version}, or install the version that it was checked with"
        ).of("engine.results_differ")


def _device_for(key: EngineKey) -> Device:
    """Return the engine's device on this machine. Raises EngineError if it would give other numbers there."""
    # The engine itself refuses a plan that was built for other hardware.
    if runs_plans(key.engine):
        return key.device
    device = key.device
    # A file in float32 means the same numbers on a CPU, so a machine without a GPU may serve it.
    if device == "gpu" and key.precision == "fp32" and "cpu" in devices_of(key.engine) and compute_capability() is None:
        device = "cpu"
    architecture = architecture_of(device, key.precision)
    if (device, architecture) == (key.device, key.architecture):
        return device
    if key.precision != "fp32":
        raise EngineError(
            f"this machine is {device} {architecture}, where {key.precision} gives other numbers than those that were "
            "checked: run jobs.compile on a machine like this one"
        ).of("machine.results_differ")
    LOG.warning("compiled for %s; compiled again for this machine, %s %s", key, device, architecture)
    return device
