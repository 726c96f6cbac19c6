"""A language model to compile: a folder of transformers, with the texts on which its variants are compared."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from upath import UPath

from app.artifacts import ARCHITECTURE_FILE, RECIPE_FILE
from app.checksums import code_revision, sha256_of, sha256_of_file, verify_checksums
from app.compile.generation.export import TOKENIZER_FILES, load_causal_lm, quiet
from app.compile.generation.texts import passages_in, passages_of
from app.compile.source import prepared_data, require_same_task, trained_lineage
from app.config import Recipe, load_stored_recipe
from app.data.language import LanguageData, Passage
from app.data.tokenizer import LanguageTokenizer, num_ids, require_same_ids
from app.errors import CompileError, RayloomError, first_line
from app.pretrained import PretrainedFolder
from app.published.weights import convert_weights
from app.repository.manifest import ImportedFrom, Lineage, Split
from app.serving.generation.tokenizer import GenerationTokenizer
from app.storage import local_copy, to_path
from app.tasks import find_task

_MAX_BLOCK = 512
"""Maximum tokens of a passage from an imported model's texts."""


@dataclass(frozen=True)
class GenerationSource:
    """A language model with its texts. Paths are on this machine."""

    folder: Path
    """The folder of the weights, the configuration and the tokenizer, as transformers writes them."""
    task: str
    threads: int
    texts: list[Passage]
    """The passages that variants are compared on. If there are none, only fp32 can be published."""
    split: Split
    lineage: Callable[[str], Lineage]
    """Returns the model's lineage, given the folder of the run that compiles it."""
    load_test: Callable[[], list[Passage]]
    """Reads the test split; empty if there is none. It measures the published version, and never chooses a variant."""
    model: Any = field(repr=False)
    """The model of transformers in float32."""
    has_chat: bool
    """Whether there is a chat template."""
    end_ids: tuple[int, ...]
    """The tokens that end an answer."""


def trained_source(weights: UPath, recipe: Recipe, folder: Path, threads: int) -> GenerationSource:
    """Return the model of a weights folder, as transformers reads it. ``folder`` gets its files.

    Raises:
        StorageError: a folder is missing, or one of its files was changed.
        CompileError: the weights are of another task, or the architecture cannot be exported.
    """
    verify_checksums(weights)
    trained = load_stored_recipe(str(weights / RECIPE_FILE))
    require_same_task(trained, recipe, weights)
    task = find_task(trained.task)
    data = prepared_data(weights, trained, task)
    assert isinstance(data, LanguageData)
    model_folder = folder / "model"
    with local_copy(weights) as path, quiet():
        # Models of transformers are in its layout already.
        if (path / ARCHITECTURE_FILE).exists():
            shutil.copytree(path, model_folder)
        else:
            convert_weights(path, to_path(model_folder))
    end = data.tokenizer.end_id

    def load_test() -> list[Passage]:
        test = data.with_test().test
        return passages_of(test, end) if test else []

    def lineage(compile_run: str) -> Lineage:
        return trained_lineage(trained, weights, data, compile_run)

    texts = passages_of(data.validation, end)
    checked = _checked_model(model_folder)
    return GenerationSource(model_folder, trained.task, threads, texts, "validation", lineage, load_test, *checked)


def imported_source(given: Path, samples: Path | None, recipe: Recipe, threads: int) -> GenerationSource:
    """Return the model of a folder that transformers wrote, with the texts that a person gives, if any.

    Raises:
        CompileError: the folder lacks what a language model needs, or the architecture cannot be exported.
        DataError: the texts cannot be read.
    """
    checked = _checked_model(given)
    length = min(_MAX_BLOCK, int(checked[0].config.max_position_embeddings))
    texts = passages_in(samples, _tokenizer_of(given), length) if samples else []
    read = sorted(file for file in given.iterdir() if file.suffix in (".json", ".jinja", ".safetensors"))
    source = ImportedFrom(
        kind="hugging-face",
        source=str(given),
        files={file.name: sha256_of_file(file) for file in read},
        samples=str(samples) if samples else None,
    )

    def lineage(compile_run: str) -> Lineage:
        return Lineage(
            imported=source,
            compile_run=compile_run,
            recipe=sha256_of(recipe.model_dump_json().encode()),
            data_fingerprint=sha256_of(b"".join(passage.tokens.tobytes() for passage in texts)),
            code=code_revision(),
        )

    return GenerationSource(given, "language-modeling", threads, texts, "samples", lineage, list, *checked)


def _checked_model(folder: Path) -> tuple[Any, bool, tuple[int, ...]]:
    """Load a folder's model. Return it, whether it has a chat template, and the tokens that end an answer.

    Raises:
        CompileError: its tokenizer is missing, does not fit, or cannot be served.
    """
    if not (folder / TOKENIZER_FILES[0]).exists():
        raise CompileError(
            f"{str(folder)!r} has no tokenizer: expected {TOKENIZER_FILES[0]}; write it with save_pretrained of the "
            "model's tokenizer"
        ).of("generation.no_tokenizer")
    tokenizer, model = _read_tokenizer(folder), load_causal_lm(folder)
    if (count := num_ids(tokenizer)) > (known := int(model.config.vocab_size)):
        raise CompileError(
            f"{str(folder)!r} has a tokenizer with ids up to {count - 1:,}, and a model for {known:,} tokens: give the "
            "tokenizer that the model was trained with"
        ).of("generation.vocabulary")
    try:
        # As an endpoint reads it, so that no version comes into production that an endpoint cannot load.
        served = GenerationTokenizer.load(folder)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        require_same_ids(tokenizer, PretrainedFolder(str(folder), folder))
    except RayloomError as error:
        raise CompileError(f"{str(folder)!r} has a tokenizer that cannot be served: {error}").of(
            "generation.tokenizer"
        ) from error
    end_ids = end_ids_of(folder, served.answer_end)
    if outside := [token for token in end_ids if token >= known]:
        raise CompileError(
            f"{str(folder)!r} names {outside[0]} as the token that ends an answer, and the model has {known:,} tokens: "
            "correct eos_token_id in generation_config.json"
        ).of("generation.no_end")
    return model, served.has_chat, end_ids


def end_ids_of(folder: Path, answer_end: int | None = None) -> tuple[int, ...]:
    """Return the tokens that end an answer: those in generation_config.json, the tokenizer's own, and ``answer_end``.

    ``answer_end`` is the token that the chat template writes after an answer. A base model that was fine-tuned on chats
    ends its answers only with it.
    The token in config.json is a default of the architecture. It counts only if there are no others.

    Raises:
        CompileError: no token ends an answer.
    """
    name = _json(folder / "tokenizer_config.json").get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    of_tokenizer = _read_tokenizer(folder).token_to_id(name) if isinstance(name, str) else None
    found = [
        *_ids(_json(folder / "generation_config.json").get("eos_token_id")),
        *_ids(of_tokenizer),
        *_ids(answer_end),
    ]
    found = found or _ids(_json(folder / ARCHITECTURE_FILE).get("eos_token_id"))
    if not found:
        raise CompileError(
            f"{str(folder)!r} names no token that ends an answer: set eos_token in tokenizer_config.json, or "
            "eos_token_id in generation_config.json"
        ).of("generation.no_end")
    return tuple(sorted({*found}))


def _ids(value: object) -> list[int]:
    return [int(item) for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]


def _tokenizer_of(folder: Path) -> LanguageTokenizer:
    return LanguageTokenizer(_read_tokenizer(folder), _MAX_BLOCK)


def _read_tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / TOKENIZER_FILES[0]))
    except Exception as error:  # the library raises Exception itself
        raise CompileError(
            f"{str(folder / TOKENIZER_FILES[0])!r} cannot be read ({first_line(error)}): write it again with "
            "save_pretrained of the model's tokenizer"
        ).of("generation.no_tokenizer") from error


def _json(file: Path) -> dict[str, Any]:
    """Return a JSON file of the folder; an empty one if it is missing. Raises CompileError if it is broken."""
    content: object = {}
    with suppress(FileNotFoundError):
        try:
            content = json.loads(file.read_bytes())
        except ValueError as error:
            raise CompileError(f"{str(file)!r} is not JSON ({first_line(error)}): write it again").of(
                "generation.unreadable"
            ) from error
    return content if isinstance(content, dict) else {}
