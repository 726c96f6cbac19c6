"""Documents as tokens and back, without loss, as byte pairs or plain bytes, by Hugging Face ``tokenizers``."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from upath import UPath

from app.checksums import checksum_lines, sha256_of
from app.config import DataConfig
from app.errors import RecipeError
from app.pretrained import TOKENIZER_FILE, PretrainedFolder
from app.storage import to_path, write_atomically

END = "<|endoftext|>"
SETTINGS_FILE = "language.json"
TRANSFORMERS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")
"""Files of tokenizers that transformers makes fast ones of."""
PROBES = ("a good film", "Ein KÜHLER Film, isn't it?  12.5 €", "这本书\n很好")
"""Texts on which two tokenizers are compared: with capitals, accents, punctuation, digits, and without spaces."""
_BYTES = pre_tokenizers.ByteLevel.alphabet()  # a printable character for each byte
# The library needs much memory for each token.
_DOCUMENTS_PER_CALL, _MAX_CHARACTERS = 64, 2**20


class _TokenizerSettings(BaseModel):
    max_length: int
    end: str = END
    companions: list[str] = []
    """Names of files that are kept beside the tokenizer."""


class _Piece(NamedTuple):
    """A part of a document. A long one as a whole would take over 100 bytes of memory for each character."""

    text: str
    is_last: bool


def _pieces_of(document: str) -> Iterator[_Piece]:
    """Cut a long document at word ends, where byte pairs end anyway."""
    start = 0
    while len(document) - start > _MAX_CHARACTERS:
        stop = start + _MAX_CHARACTERS
        cut = max(document.rfind("\n", start, stop), document.rfind(" ", start, stop))
        stop = cut if cut > start else stop
        yield _Piece(document[start:stop], is_last=False)
        start = stop
    yield _Piece(document[start:], is_last=True)


def _grouped(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield texts that are tokenised in one call."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and (len(group) == _DOCUMENTS_PER_CALL or size + len(text) > _MAX_CHARACTERS):
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


class LanguageTokenizer:
    """Byte-level tokens: any text can be encoded, and is decoded unchanged. Token 0 ends a document.

    It can also be the tokenizer of a pretrained model, whose own end token ends a document.

    Byte pairs after Sennrich et al. 2015 (arXiv:1508.07909), over bytes as in GPT-2 (Radford et al. 2019).
    """

    def __init__(
        self, tokenizer: Tokenizer, max_length: int, end: str = END, companions: Mapping[str, bytes] | None = None
    ) -> None:
        """``end`` is the token that ends a document. ``companions`` are files that transformers also reads."""
        self._tokenizer, self._end, self._companions = tokenizer, end, companions or {}
        # The text of the end token inside a document does not end it.
        self._tokenizer.encode_special_tokens = True
        # A pretrained folder may have been saved with truncation and padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._max_length = max_length
        self._num_ids, self._num_appended = num_ids(tokenizer), num_appended(tokenizer)

    @classmethod
    def fit(cls, documents: Iterable[str], config: DataConfig) -> Self:
        """Learn byte pairs from ``documents``. The kind ``bytes`` learns nothing."""
        learns = config.tokenizer.kind == "bpe"
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=config.tokenizer.vocab_size if learns else 1 + len(_BYTES),
            min_frequency=2,
            max_token_length=config.tokenizer.max_piece_length,
            special_tokens=[END],
            initial_alphabet=_BYTES,
            show_progress=False,
        )
        tokenizer.train_from_iterator(documents if learns else (), trainer)
        companions = {TRANSFORMERS_FILE: _transformers_settings(config.block_length)}
        return cls(tokenizer, config.block_length, companions=companions)

    @classmethod
    def from_pretrained(cls, folder: PretrainedFolder, config: DataConfig) -> Self:
        """Return the folder's tokenizer.

        Raises:
            RecipeError: the folder has no tokenizer, it has no end token, its ids differ from those of
                transformers, blocks are longer than the model reads, or ``data.chat.template`` cannot be read.
        """
        folder.require_length(config.block_length, "data.block_length")
        tokenizer, end = read_tokenizer(folder), folder.special_token("eos_token")
        if end is None or tokenizer.token_to_id(end) is None:
            raise RecipeError(
                f"{folder} has no eos_token in tokenizer_config.json, to end a document: add it there"
            ).of("tokenizer.no_end", "model.pretrained")
        own = {TEMPLATE_FILE: _read_template(config.chat.template)} if config.chat.template else {}
        made = cls(tokenizer, config.block_length, end, {**folder.companions, **own})
        require_same_ids(tokenizer, folder)  # the constructor has removed truncation and padding
        return made

    @property
    def end_id(self) -> int:
        """The token that ends a document."""
        end = self._tokenizer.token_to_id(self._end)
        assert end is not None
        return end

    @property
    def template(self) -> str | None:
        """The chat template beside the tokenizer; None if there is none."""
        content = self._companions.get(TEMPLATE_FILE)
        return None if content is None else content.decode()

    @property
    def sha256(self) -> str:
        """sha256 of the tokenizer and of the files beside it."""
        sums = {"tokenizer": sha256_of(self.to_json().encode())}
        sums |= {name: sha256_of(content) for name, content in self._companions.items()}
        return sha256_of(checksum_lines(sums))

    @property
    def facts(self) -> Mapping[str, int]:
        """``vocab_size``, and ``max_length``, the number of tokens of a block."""
        return {"vocab_size": self._num_ids, "max_length": self._max_length}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end token."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids[: -self._num_appended or None]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including that of end tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def join(self, documents: Sequence[str]) -> NDArray[np.unsignedinteger[Any]]:
        """Return the tokens of all documents, with an end token after each, in the smallest unsigned type that fits."""
        dtype = np.min_scalar_type(self._num_ids - 1)
        end = self._tokenizer.token_to_id(self._end)
        pieces = [piece for document in documents for piece in _pieces_of(document)]
        encoded = self._encode_all([piece.text for piece in pieces])
        parts = [
            np.array([*ids, end] if piece.is_last else ids, dtype) for piece, ids in zip(pieces, encoded, strict=True)
        ]
        return np.concatenate([np.empty(0, dtype), *parts])

    def _encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        for group in _grouped(texts):
            # This call leaves out the tokens' offsets, which nobody reads.
            for encoded in self._tokenizer.encode_batch_fast(group):
                yield encoded.ids[: -self._num_appended or None]

    def save(self, folder: UPath) -> None:
        """Write everything that ``load`` needs."""
        write_atomically(folder / TOKENIZER_FILE, self.to_json().encode())
        for name, content in self._companions.items():
            write_atomically(folder / name, content)
        settings = _TokenizerSettings(max_length=self._max_length, end=self._end, companions=[*self._companions])
        # Last: who finds the settings finds the rest.
        write_atomically(folder / SETTINGS_FILE, settings.model_dump_json().encode())

    def to_json(self) -> str:
        """Return the tokenizer as JSON that Hugging Face's libraries read."""
        text: str = self._tokenizer.to_str(pretty=True)
        return text

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """Return the tokenizer that ``save`` wrote. Raises FileNotFoundError."""
        settings = _TokenizerSettings.model_validate_json((folder / SETTINGS_FILE).read_bytes())
        tokenizer = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
        companions = {name: (folder / name).read_bytes() for name in settings.companions}
        return cls(tokenizer, settings.max_length, settings.end, companions)


def _transformers_settings(max_length: int) -> bytes:
    """Return what transformers reads beside ``tokenizer.json``, so that the folder can be fine-tuned."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": max_length}
    return json.dumps(settings, indent=1).encode()


def num_ids(tokenizer: Tokenizer) -> int:
    """Return the greatest id of a tokenizer plus one. Some leave ids out, so they have fewer tokens."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def num_appended(tokenizer: Tokenizer) -> int:
    """Return the number of special tokens that a tokenizer appends to each text, such as an end token."""
    # A vocabulary of DNA, for example, has no token for "a". One of its own tokens is a text that it knows.
    for text in chain(["a"], filter(None, map(tokenizer.id_to_token, range(num_ids(tokenizer))))):
        mask = "".join(map(str, tokenizer.encode(text).special_tokens_mask))
        if "0" in mask:
            return len(mask) - len(mask.rstrip("1"))
    return 0


def read_tokenizer(folder: PretrainedFolder) -> Tokenizer:
    """Return the tokenizer of a pretrained model, with the truncation and padding that were saved with it.

    Raises:
        RecipeError: the folder has none, or it cannot be read.
    """
    file = folder.path / TOKENIZER_FILE
    others = [name for name in OTHER_TOKENIZERS if (folder.path / name).exists()]
    try:
        if file.exists():
            return Tokenizer.from_file(str(file))
        if others:
            return _converted(folder)
        if (folder.path / TRANSFORMERS_FILE).exists():
            _converted(folder)  # without files, a fast one would be empty
    except RecipeError:
        raise
    except Exception as error:  # the library raises Exception itself
        if file.exists() or others:
            raise RecipeError(
                f"{folder}: {file.name if file.exists() else others[0]} cannot be read ({error}): download the folder "
                "again"
            ).of("file.unreadable", "model.pretrained") from error
    raise RecipeError(
        f"{folder} has no tokenizer: expected {TOKENIZER_FILE}; write it with save_pretrained of the model's tokenizer"
    ).of("tokenizer.missing", "model.pretrained")


def _converted(folder: PretrainedFolder) -> Tokenizer:
    """Return a tokenizer that transformers makes of older files. Raises RecipeError if it cannot be made fast."""
    read = _read_by_transformers(folder)
    if not read.is_fast:
        raise RecipeError(
            f"{folder}: its tokenizer, {type(read).__name__}, has no fast version in transformers, and Rayloom needs "
            "one: give a model with another tokenizer, or a task with a processor of your own"
        ).of("tokenizer.slow", "model.pretrained")
    tokenizer: Tokenizer = read.backend_tokenizer
    return tokenizer


def _read_by_transformers(folder: PretrainedFolder) -> Any:
    """Return the tokenizer as transformers makes it of all files of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)


def require_same_ids(tokenizer: Tokenizer, folder: PretrainedFolder) -> None:
    """Raise RecipeError if transformers, which also reads tokenizer_config.json, gives a text other ids."""
    if not all((folder.path / name).is_file() for name in (TOKENIZER_FILE, TRANSFORMERS_FILE)):
        return
    try:
        theirs = _read_by_transformers(folder)
    except Exception:  # of many types. Custom tokenizer code may be missing, and tokenizer.json suffices
        return
    for text in PROBES:
        expected, given = theirs(text)["input_ids"], tokenizer.encode(text).ids
        if given != expected:
            raise RecipeError(
                f"{folder}: {text!r} has the tokens {given} by {TOKENIZER_FILE}, and {expected} if transformers also "
                f"reads {TRANSFORMERS_FILE}: write both with save_pretrained of the right tokenizer"
            ).of("tokenizer.differs", "model.pretrained")


def _read_template(location: str) -> bytes:
    try:
        text: str = to_path(location).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RecipeError(f"data.chat.template {location!r} cannot be read ({error}): check the path").of(
            "file.unreadable", "data.chat.template"
        ) from error
    return text.encode()
