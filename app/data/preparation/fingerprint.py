"""What shards depend on: the files of the source, and the recipe keys that preparation reads."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from app.checksums import sha256_of, sha256_of_file
from app.config import Recipe
from app.data.preparation.samples import SampleKind, TokenKind
from app.data.shards import FORMAT
from app.data.sources.formats.base import SourceFile
from app.data.tokenizer import LanguageTokenizer
from app.pretrained import open_pretrained
from app.storage import to_path

_READ = {"source", "seed", "validation_fraction", "test_fraction", "test_source", "group_column", "clean"}
"""Keys of ``data`` that every preparation reads, beside columns."""

_RULES = 8
"""The rules by which shards are made. A change needs another number. Runs go on with the shards that they have."""


def settings_of(recipe: Recipe, kind: SampleKind) -> dict[str, Any]:
    """Return everything but the files of the source that the shards of a recipe depend on."""
    config = recipe.data
    settings = {
        "format": FORMAT,
        "rules": _RULES,
        "kind": kind.contents,
        "size": config.shards.size,
        **config.model_dump(mode="json", include=_READ),
        "columns": [one.columns.model_dump(mode="json") for one in config.each_source()],
        **_own_code(type(kind), *((kind.targets,) if kind.targets else ())),
    }
    if isinstance(kind, TokenKind):
        return settings | _blocks(recipe)
    # Processors of other samples read the shards as they are.
    return settings | ({"targets": f"{kind.targets.__module__}:{kind.targets.__qualname__}"} if kind.targets else {})


def _own_code(*types: type) -> dict[str, Any]:
    """Return the sha256 of each file of a project that defines one of the classes or a base class, if there are any.

    Their code decides what rows and labels are, and a project can change it without other ``_RULES``.
    """
    modules = {base.__module__ for one in types for base in one.__mro__}
    own = {name for name in modules if name.partition(".")[0] not in {"app", *sys.stdlib_module_names}}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in own}
    sums = {name: sha256_of_file(to_path(file)) for name, file in files.items() if file}
    return {"code": sums} if sums else {}


def _blocks(recipe: Recipe) -> dict[str, Any]:
    """Return what blocks of tokens depend on."""
    config = recipe.data
    read = config.model_dump(mode="json", include={"block_length": True, "chat": {"packing"}})
    if recipe.model.pretrained is None:
        return read | {"tokenizer": config.tokenizer.model_dump(mode="json")}
    # The location of a model would not reveal a changed tokenizer there.
    tokenizer = LanguageTokenizer.from_pretrained(open_pretrained(str(recipe.model.source)), config)
    return read | {"tokenizer_sha256": tokenizer.sha256}


def fingerprint_of(files: Sequence[SourceFile], settings: dict[str, Any]) -> str:
    """Return the sha256 of a source and of the settings that shards depend on."""
    content = json.dumps([settings, [asdict(file) for file in files]], sort_keys=True)
    return sha256_of(content.encode())
