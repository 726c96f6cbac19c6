"""Loads a published language model: its files, its tokenizer, and its engine in a separate process."""

import asyncio
import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path

from app.engines.architecture import architecture_of
from app.engines.generation.registry import open_generation
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.serving.config import GeneratorConfig
from app.serving.generation.served import ServedGenerator
from app.serving.generation.tokenizer import GenerationTokenizer
from app.storage import is_local, open_storage, to_path

LOG = logging.getLogger(__name__)


async def load_generator(config: GeneratorConfig) -> ServedGenerator:
    """Verify a version, start its engine, and return it ready for requests.

    Raises:
        StorageError: the version is missing, was changed, or has another seal.
        EngineError: the engine cannot load it.
    """
    with ExitStack() as stack:
        manifest, folder = await asyncio.to_thread(_fetch, config, stack)
        assert manifest.generation is not None  # as ``deployed_model`` has checked
        _warn_of_other_processor(manifest)
        length = manifest.generation.context_length
        tokenizer = await asyncio.to_thread(GenerationTokenizer.load, folder, length)
        engine = open_generation(manifest.engine_key.engine, folder, config.settings(manifest))
        await engine.start()
        # The files stay until the engine is closed, because a new process reads them again.
        held = stack.pop_all()
        return ServedGenerator(manifest, engine, tokenizer, config.policy, config.cache_bytes, on_close=held.close)


def _warn_of_other_processor(manifest: Manifest) -> None:
    """Warn if this processor rounds small weights differently than the one whose perplexity passed the gate."""
    key = manifest.engine_key
    if key.device == "cpu" and (architecture := architecture_of("cpu", key.precision)) != key.architecture:
        LOG.warning(
            "model %r, version %d, was checked with %s; on %s its answers may differ slightly",
            *(manifest.name, manifest.version, key, architecture),
        )


def _fetch(config: GeneratorConfig, stack: ExitStack) -> tuple[Manifest, Path]:
    """Verify a version, and return the folder of its files: a copy in ``stack`` if they are not on a disk."""
    repository = Repository(open_storage(config.storage))
    folder = repository.folder(config.name, config.version)
    if is_local(folder):
        return repository.verify(config.name, config.version, config.seal), Path(folder.path)
    copy = stack.enter_context(tempfile.TemporaryDirectory(prefix="rayloom-model-"))
    return repository.fetch(config.name, config.version, to_path(copy), seal=config.seal), Path(copy)
