"""Documents as tokens and back, without loss, as byte pairs or plain bytes, by Hugging Face ``tokenizers``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from upath import UPath

from app.config import DataConfig
from app.storage import write_atomically

END = "<|endoftext|>"
TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "language.json"
_BYTES = pre_tokenizers.ByteLevel.alphabet()  # a printable character for each byte
_DOCUMENTS_PER_CALL = 64  # the library needs much memory per token


class _TokenizerSettings(BaseModel):
    max_length: int


class LanguageTokenizer:
    """Byte-level tokens: any text can be encoded, and is decoded unchanged. Token 0 ends a document.

    Byte pairs after Sennrich et al. 2015 (arXiv:1508.07909), over bytes as in GPT-2 (Radford et al. 2019).
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer = tokenizer
        # The text of the end token inside a document does not end it.
        self._tokenizer.encode_special_tokens = True
        self._max_length = max_length

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
        return cls(tokenizer, config.block_length)

    @property
    def facts(self) -> Mapping[str, int]:
        """``vocab_size``, and ``max_length``, the number of tokens of a block."""
        return {"vocab_size": self._tokenizer.get_vocab_size(), "max_length": self._max_length}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end token."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including that of end tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def join(self, documents: Sequence[str]) -> NDArray[np.unsignedinteger[Any]]:
        """Return the tokens of all documents, with an end token after each, in the smallest unsigned type that fits."""
        dtype = np.min_scalar_type(self._tokenizer.get_vocab_size() - 1)
        end = self._tokenizer.token_to_id(END)
        parts = [np.array([*ids, end], dtype) for ids in self._encode_all(documents)]
        return np.concatenate([np.empty(0, dtype), *parts])

    def _encode_all(self, documents: Sequence[str]) -> Iterator[list[int]]:
        remaining = iter(documents)
        while group := list(islice(remaining, _DOCUMENTS_PER_CALL)):
            # This call leaves out the tokens' offsets, which nobody reads.
            for encoded in self._tokenizer.encode_batch_fast(group):
                yield encoded.ids

    def save(self, folder: UPath) -> None:
        """Write everything that ``load`` needs."""
        write_atomically(folder / TOKENIZER_FILE, self.to_json().encode())
        settings = _TokenizerSettings(max_length=self._max_length)
        write_atomically(folder / SETTINGS_FILE, settings.model_dump_json().encode())

    def to_json(self) -> str:
        """Return the tokenizer as JSON that Hugging Face's libraries read."""
        text: str = self._tokenizer.to_str(pretty=True)
        return text

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """Return the tokenizer that ``save`` wrote. Raises FileNotFoundError."""
        settings = _TokenizerSettings.model_validate_json((folder / SETTINGS_FILE).read_bytes())
        return cls(Tokenizer.from_str((folder / TOKENIZER_FILE).read_text(encoding="utf-8")), settings.max_length)
