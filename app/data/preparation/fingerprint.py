"""What shards depend on: the files of the source, and the recipe keys that preparation reads."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from app.checksums import checksum_lines, sha256_of
from app.config import DataConfig, Recipe
from app.data.preparation.samples import SampleKind
from app.data.shards import FORMAT
from app.data.sources.formats.base import DOCUMENTS, SourceFile
from app.data.tokenizer import read_tokenizer
from app.pretrained import PretrainedFolder, open_pretrained

_READ = {"source", "seed", "validation_fraction", "test_fraction", "test_source", "group_column", "clean"}
"""Keys of ``data`` that every preparation reads, beside columns."""


def settings_of(recipe: Recipe, kind: SampleKind) -> dict[str, Any]:
    """Return everything but the files of the source that the shards of a recipe depend on."""
    config = recipe.data
    settings = {
        "format": FORMAT,
        "kind": kind.contents,
        "size": config.shards.size,
        **config.model_dump(mode="json", include=_READ),
        "columns": [one.columns.model_dump(mode="json") for one in config.each_source()],
    }
    if kind.contents == DOCUMENTS:
        return settings | _blocks(recipe, config)
    # Other processors read the shards as they are.
    return settings | ({"targets": f"{kind.targets.__module__}:{kind.targets.__qualname__}"} if kind.targets else {})


def _blocks(recipe: Recipe, config: DataConfig) -> dict[str, Any]:
    """Return what blocks of tokens depend on."""
    if recipe.model.pretrained is None:
        return {"block_length": config.block_length, "tokenizer": config.tokenizer.model_dump(mode="json")}
    # The location of a model would not reveal a changed tokenizer there.
    sha256 = _tokenizer_sha256(open_pretrained(str(recipe.model.source)))
    return {"block_length": config.block_length, "tokenizer_sha256": sha256}


def _tokenizer_sha256(folder: PretrainedFolder) -> str:
    """Return the sha256 of a pretrained tokenizer and of the files beside it."""
    sums = {"tokenizer": sha256_of(read_tokenizer(folder).to_str().encode())}
    sums |= {name: sha256_of(content) for name, content in folder.companions.items()}
    return sha256_of(checksum_lines(sums))


def fingerprint_of(files: Sequence[SourceFile], settings: dict[str, Any]) -> str:
    """Return the sha256 of a source and of the settings that shards depend on."""
    content = json.dumps([settings, [asdict(file) for file in files]], sort_keys=True)
    return sha256_of(content.encode())
