"""What shards depend on: the files of the source, and the recipe keys that preparation reads."""

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from app.checksums import sha256_of
from app.config import Recipe
from app.data.preparation.samples import SampleKind, TokenKind
from app.data.shards import FORMAT
from app.data.sources.formats.base import SourceFile
from app.data.tokenizer import LanguageTokenizer
from app.pretrained import open_pretrained

_READ = {"source", "seed", "validation_fraction", "test_fraction", "test_source", "group_column", "clean"}
"""Keys of ``data`` that every preparation reads, beside columns."""

_RULES = 9
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
    """Return the sha256 of each project file that defines one of the classes or a base class, or is imported there.

    This code decides what rows and labels are. A project can change it while ``_RULES`` stays the same.
    """
    sums: dict[str, str] = {}
    for name in {base.__module__ for one in types for base in one.__mro__}:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or _is_known(name):
            continue
        _add_code(sums, Path(file).parents[name.count(".") + file.endswith("__init__.py")], name)
        sums.setdefault(name, sha256_of(Path(file).read_bytes()))  # a module may have another name than its file
    return {"code": sums} if sums else {}


def _is_known(name: str) -> bool:
    """Return whether a module belongs to Rayloom or to the standard library."""
    return name.partition(".")[0] in {"app", *sys.stdlib_module_names}


def _add_code(sums: dict[str, str], root: Path, name: str) -> None:
    """Add the sha256 of a module below ``root``, and recursively those of its imports there.

    Modules of Rayloom and of the standard library are skipped. Imports of an installed package are not followed.
    """
    if name in sums or _is_known(name):
        return
    path = root.joinpath(*name.split("."))
    file = next(filter(Path.is_file, (path.with_name(f"{path.name}.py"), path / "__init__.py")), None)
    if file is None:
        return
    sums[name] = sha256_of(content := file.read_bytes())
    if root.name in {"site-packages", "dist-packages"}:
        return
    with suppress(SyntaxError):  # such as an optional import for another version of Python
        for imported in _imports(ast.parse(content), name if file.parent == path else name.rpartition(".")[0]):
            _add_code(sums, root, imported)


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names that a module of ``package`` imports, and their parent packages."""
    names: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom():
                parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
                # The imported name may be a module or an attribute of one.
                names += [".".join(filter(None, [*parents, node.module, alias.name])) for alias in node.names]
    for name in names:
        yield from accumulate(name.split("."), "{}.{}".format)


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
