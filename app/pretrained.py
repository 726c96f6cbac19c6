"""Folders of pretrained models in Hugging Face's layout, from a disk, storage, an installed package or the hub."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from socket import gethostname
from typing import Any, Literal, get_args

from filelock import FileLock
from upath import UPath

from app.checksums import checksum_lines, checksums_of, sha256_of
from app.errors import RecipeError, first_line
from app.storage import HOME, ProgressCallback, is_local, is_plain_name, no_op, to_path, version_of

CONFIG_FILE, TOKENIZER_FILE, IMAGE_FILE = "config.json", "tokenizer.json", "preprocessor_config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
"""The file by which PEFT recognizes an adapter's folder."""
_ONE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
Companion = Literal[
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "generation_config.json",
]
"""Files that transformers reads beside the tokenizer. A run keeps them."""
_OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt"]
_HUB_NAME = r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?"
"""A hub name, which may be followed by a branch, a tag or a commit."""


@dataclass(frozen=True)
class SentenceStep:
    """A module by which sentence-transformers makes a vector: the last part of its class, and how it pools."""

    kind: str
    pooling: str | None = None


@dataclass(frozen=True)
class PretrainedFolder:
    """A folder on this machine's disk. ``location`` is how the recipe names it, for messages."""

    location: str
    path: Path
    commit: str | None = None
    """The commit of the hub's repository; None if the folder is not from the hub."""

    def __str__(self) -> str:
        return f"model.pretrained {self.location!r}"

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return a JSON file of the folder; None if there is none. Raises RecipeError if it is broken."""
        try:
            content = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RecipeError(f"{self}: {name} is not JSON ({error}): download the folder again").of(
                "json.invalid", "model.pretrained"
            ) from error
        if not isinstance(content, dict):
            raise RecipeError(
                f"{self}: {name} holds a {type(content).__name__}, expected an object: download it again"
            ).of("file.not_an_object", "model.pretrained")
        return content

    @property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``. Raises RecipeError if it is missing, or the folder has an adapter."""
        if reason := unmerged_adapter(self.path):
            raise RecipeError(f"{self} {reason}").of("pretrained.adapter", "model.pretrained")
        config = self.read_json(CONFIG_FILE)
        if config is None or "model_type" not in config:
            raise RecipeError(
                f"{self} has no {CONFIG_FILE} with a model_type: give a folder that transformers' save_pretrained wrote"
            ).of("pretrained.no_config", "model.pretrained")
        return config

    @property
    def sentence_steps(self) -> list[SentenceStep]:
        """The modules of ``modules.json``, in order; none if sentence-transformers did not write the folder."""
        try:
            modules = json.loads((self.path / "modules.json").read_bytes())
            return [SentenceStep(module["type"].split(".")[-1], self._pooling(module["path"])) for module in modules]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecipeError(f"{self}: modules.json cannot be read ({error}): download the folder again").of(
                "file.unreadable", "model.pretrained"
            ) from error

    def _pooling(self, module: str) -> str | None:
        """Return how a module pools the vectors of tokens, such as ``mean``; None if it does not."""
        config = (self.read_json(f"{module}/{CONFIG_FILE}") if module else None) or {}
        if given := config.get("pooling_mode"):
            return given if isinstance(given, str) else " and ".join(given)
        # Older versions have a key for each.
        keys = [key for key, is_used in config.items() if key.startswith("pooling_mode_") and is_used]
        return " and ".join(key.removeprefix("pooling_mode_").removesuffix("_tokens") for key in keys) or None

    @property
    def companions(self) -> Mapping[str, bytes]:
        """The small files that transformers reads beside the tokenizer, by name."""
        return {name: (self.path / name).read_bytes() for name in get_args(Companion) if (self.path / name).is_file()}

    def special_token(self, kind: str) -> str | None:
        """Return a special token, such as ``pad_token``; None if the tokenizer has none of this kind."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = (self.read_json(name) or {}).get(kind)
            if token := token.get("content") if isinstance(token, dict) else token:
                return str(token)
        return None

    @property
    def max_positions(self) -> int | None:
        """The number of tokens that have a position in the model; None if nothing limits it."""
        limits = [self.config.get("max_position_embeddings"), self.config.get("n_positions")]
        found = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
        return None if found is None else found - _positions_of_padding(self.path)

    @property
    def max_tokens(self) -> int | None:
        """The number of tokens that the model and its tokenizer read at most; None if nothing limits it."""
        limits = [self.max_positions, (self.read_json("tokenizer_config.json") or {}).get("model_max_length")]
        return min(
            (int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 2**31), default=None
        )

    def require_length(self, length: int, key: str) -> None:
        """Raise RecipeError if ``key`` of the recipe asks for more tokens than the model reads."""
        if self.max_tokens is not None and length > self.max_tokens:
            raise RecipeError(f"{key} is {length}, but {self} reads {self.max_tokens} tokens at most: lower {key}").of(
                "length.too_long", key
            )

    @property
    def weights_files(self) -> list[Path]:
        """The safetensors files. Raises RecipeError if one is missing, or if there are only other formats."""
        index = self.read_json(_INDEX_FILE)
        names = sorted(set(index["weight_map"].values())) if index else [_ONE_FILE]
        if odd := [name for name in names if not is_plain_name(name)]:
            raise RecipeError(
                f"{self}: {_INDEX_FILE} names {odd[0]!r}, which is not a file of the folder: download the folder again"
            ).of("path.outside", "model.pretrained")
        if missing := [name for name in names if not (self.path / name).is_file()]:
            others = [name for name in _OTHER_WEIGHTS if (self.path / name).exists()]
            found = f"only {', '.join(others)}, which can run code when it is read" if others else "none of its weights"
            raise RecipeError(
                f"{self} has no {missing[0]} ({found}): expected safetensors; write them with save_pretrained of "
                "transformers, or download the whole folder"
            ).of("pretrained.no_weights", "model.pretrained")
        return [self.path / name for name in names]

    def weights_sha256(self, recorded: str | None = None, on_progress: ProgressCallback = no_op) -> str:
        """Return the checksum of the weights. For several files it is that of the lines that ``sha256sum`` prints.

        Raises:
            RecipeError: the run has ``recorded`` another checksum. The message names both.
        """
        sums = checksums_of(self.weights_files, on_progress)
        found = next(iter(sums.values())) if len(sums) == 1 else sha256_of(checksum_lines(sums))
        if recorded not in (None, found):
            raise RecipeError(
                f"{self} has other weights on {gethostname()} than the run was given: their sha256 is {found}, "
                f"model.weights_sha256 is {recorded}; restore the folder, the same on every node, or start a new run "
                "without weights_sha256"
            ).of("pretrained.changed", "model.pretrained")
        return found


def unmerged_adapter(folder: Path) -> str | None:
    """Return why a folder with an adapter is refused, as the end of a sentence; None if it has none.

    transformers answers with the adapter where PEFT is installed, and with its base elsewhere.
    """
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        return None
    return (
        f"has an adapter, {ADAPTER_CONFIG_FILE}, which is not merged into the weights: load it with PEFT, and write "
        "the whole model into another folder with merge_and_unload().save_pretrained(FOLDER)"
    )


def _positions_of_padding(folder: Path) -> int:
    """Return the number of positions that no token can have: in RoBERTa's family, those up to that of padding."""
    import torch
    from transformers import AutoConfig, AutoModel

    try:
        configuration = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # The configuration does not say it. The model does, and without weights it is built at once.
        with torch.device("meta"):
            model = AutoModel.from_config(configuration)
    except Exception:  # of many classes. A model that cannot be built is refused where it is built
        return 0
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = (getattr(table, "padding_idx", None) for table in tables)
    return max((index + 1 for index in padding if index is not None), default=0)


def open_pretrained(location: str) -> PretrainedFolder:
    """Return the folder that ``model.pretrained`` names. A remote one is copied to this machine once.

    A hub name may end in ``@`` and a branch, a tag or a commit.

    Raises:
        RecipeError: there is no such folder, or the hub cannot be reached.
    """
    if location.startswith("package:"):
        return PretrainedFolder(location, _in_package(location))
    path = to_path(location)
    if not is_local(path):
        return PretrainedFolder(location, _copied(location, path))
    folder = Path(location.removeprefix("file://")).expanduser()
    if folder.is_dir():
        return PretrainedFolder(location, folder)
    if folder.is_absolute() or location.startswith(".") or not re.fullmatch(_HUB_NAME, location):
        raise RecipeError(f"model.pretrained {location!r} does not exist: give a folder, a URI or a hub name").of(
            "file.missing", "model.pretrained"
        )
    downloaded = _downloaded(location)
    return PretrainedFolder(location, downloaded, downloaded.name)


def _in_package(location: str) -> Path:
    package, _, inside = location.removeprefix("package:").partition("/")
    try:
        folder = Path(str(files(package))) / inside
    except ModuleNotFoundError as error:
        raise RecipeError(f"model.pretrained {location!r}: {error}; install the package on every machine").of(
            "import.fails", "model.pretrained"
        ) from error
    if not folder.is_dir():
        raise RecipeError(f"model.pretrained {location!r}: the package {package} has no folder {inside!r}").of(
            "file.missing", "model.pretrained"
        )
    return folder


def _copied(location: str, source: UPath) -> Path:
    """Return a copy of a remote folder, under a name that depends on its files. Workers of a machine share it."""
    try:
        listing = sorted((entry["name"], entry["size"], version_of(entry)) for entry in source.fs.ls(source.path))
    except Exception as error:  # each protocol's driver has errors of its own
        raise RecipeError(f"model.pretrained {location!r} cannot be read ({error}): check the URI").of(
            "file.unreadable", "model.pretrained"
        ) from error
    if unversioned := next((name for name, _, version in listing if version is None), None):
        raise RecipeError(
            f"model.pretrained {location!r}: the driver lists neither an ETag nor a time of the last change of "
            f"{unversioned!r}, so a changed model would not be noticed; copy the folder to a disk or to S3"
        ).of("storage.no_versions", "model.pretrained")
    folder = HOME / "pretrained" / sha256_of(json.dumps([location, listing]).encode())[:16]
    with _only_one(folder) as is_there:
        if not is_there:
            temporary = folder.with_name(f"{folder.name}.tmp")
            source.fs.get(f"{source.path}/", f"{temporary}/", recursive=True)
            temporary.rename(folder)
    return folder


@contextmanager
def _only_one(folder: Path) -> Iterator[bool]:
    """Hold a lock, so that one process of this machine makes ``folder``. Yield whether it exists."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        yield folder.exists()


def _downloaded(name: str) -> Path:
    """Return the folder of the hub's cache, whose name is the commit."""
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # of the network, of the hub and of the file system
        raise RecipeError(
            f"model.pretrained {name!r} is no folder here, and the hub did not answer with it ({first_line(error)}): "
            "give a folder or a URI, or connect this machine to the network"
        ).of("hub.no_answer", "model.pretrained") from error
