"""The engine of a published version, on a machine where it gives the numbers that compile judged."""

import logging
from pathlib import Path

from app.engines.architecture import Device, architecture_of, compute_capability
from app.engines.base import Engine, EngineSettings, library_errors
from app.engines.cache import machine_cache
from app.engines.registry import devices_of, open_engine, runs_module, runs_plans
from app.errors import EngineError, StorageError
from app.repository.known_answers import ANSWERS_FILE, KnownAnswers
from app.repository.manifest import EngineKey, Manifest

LOG = logging.getLogger(__name__)

_TIMES_AS_FAR = 2
"""What was judged may have been as far from PyTorch on the other side."""

_REORDERED = 1e-3
"""Of a logit: the same model in float32 on other hardware, or sharded."""


def open_published(manifest: Manifest, folder: Path, threads: int) -> Engine:
    """Open the engine that a version's key names, in its precision and on its device.

    An ONNX file is compiled for what is here, another version of the library too, and kept in this machine's cache.
    In float32 it may be another processor: the file means the same numbers there. In another precision another version
    of the library may round and fuse in other ways: it answers the rows that were kept first. A plan is checked by its
    engine.

    Args:
        folder: of the version's files, as the manifest has them.

    Raises:
        StorageError: the version has no file for its engine.
        EngineError: the engine cannot run here, or would not give the numbers that were judged: then the key and this
            machine are named; or the file takes or gives other tensors than the manifest says.
    """
    key, title = manifest.engine_key, f"model {manifest.name!r}, version {manifest.version},"
    if key.file not in manifest.files:
        raise StorageError(f"{title} has no {key.file}, which {key.engine} opens: publish it again")
    try:
        device, sha256 = _device_for(key), manifest.files[key.file]
        settings = EngineSettings(key.precision, threads, device=device, cache=machine_cache(), sha256=sha256)
        if runs_module(key.engine):
            engine = _open_module(manifest, folder, settings)
        else:
            engine = open_engine(key.engine, folder / key.file, settings)
    except EngineError as error:
        raise EngineError(f"{title} was compiled for {key}: {error}") from error
    if difference := engine.signature.difference(manifest.signature):
        engine.close()
        raise EngineError(f"{title} {difference}, as its manifest says: publish it again")
    if engine.version != key.engine_version:
        LOG.warning("%s was judged with %s; %s compiled it anew", title, key, engine.version)
        if key.precision != "fp32":
            require_known_answers(engine, manifest, folder)
    return engine


def _open_module(manifest: Manifest, folder: Path, settings: EngineSettings) -> Engine:
    from app.engines.torch import TorchEngine  # imports torch, which other versions need not wait for
    from app.training.weights import read_weights

    with library_errors("the module cannot be made"):
        return TorchEngine(read_weights(folder).model, manifest.signature, settings)


def require_known_answers(engine: Engine, manifest: Manifest, folder: Path) -> None:
    """Close an engine that is more than twice as far from PyTorch as what was judged. Raises EngineError.

    PyTorch itself was no distance away: sums in another order may be.
    """
    if ANSWERS_FILE not in manifest.files:
        return
    judged, difference = manifest.max_difference, KnownAnswers.load(folder).difference(engine)
    if not difference <= max(_TIMES_AS_FAR * judged, _REORDERED if runs_module(manifest.engine_key.engine) else 0.0):
        engine.close()
        raise EngineError(
            f"model {manifest.name!r}, version {manifest.version}, was judged with {manifest.engine_key}: by "
            f"{engine.version} its logits are up to {difference:.1e} from PyTorch's, and were {judged:.1e}; run "
            f"jobs.compile with {engine.version}, or install the version that it was judged with"
        )


def _device_for(key: EngineKey) -> Device:
    """Where the engine runs on this machine. Raises EngineError if its numbers would be others there."""
    if runs_plans(key.engine):
        return key.device
    device = key.device
    if device == "gpu" and key.precision == "fp32" and "cpu" in devices_of(key.engine) and compute_capability() is None:
        device = "cpu"
    architecture = architecture_of(device, key.precision)
    if (device, architecture) == (key.device, key.architecture):
        return device
    if key.precision != "fp32":
        raise EngineError(
            f"this machine is {device} {architecture}, where {key.precision} gives other numbers than those that were "
            "judged: run jobs.compile on a machine like this one"
        )
    LOG.warning("compiled for %s; compiled anew for this machine, %s %s", key, device, architecture)
    return device
