"""Texts as token ids, by a byte-pair tokenizer of Hugging Face ``tokenizers``, padded to length buckets."""

import bisect
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self, cast

import numpy as np
from pydantic import BaseModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from upath import UPath

from app.config import DataConfig
from app.data.examples import Input, Modality
from app.data.tokenizer import TOKENIZER_FILE
from app.errors import DataError
from app.storage import write_atomically
from app.tensors import Tensors, TensorSpec

SPECIAL_TOKENS = [PAD, UNKNOWN, START] = ["[PAD]", "[UNK]", "[CLS]"]
SETTINGS_FILE = "text.json"
# In characters. Longer pieces are too rare to learn from a few thousand texts.
_MAX_PIECE_LENGTH = 4


class _TextSettings(BaseModel):
    buckets: list[int]


class TextProcessor:
    """Makes token ids and their mask, each int64 of shape (batch, length), where length is one of the buckets."""

    modality: ClassVar[Modality] = "text"

    def __init__(self, tokenizer: Tokenizer, buckets: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.enable_truncation(buckets[-1])
        self._tokenizer.no_padding()
        self._buckets = list(buckets)

    @classmethod
    def fit(cls, inputs: Sequence[Input], config: DataConfig) -> Self:
        """Train byte-pair merges on ``inputs``, after Unicode NFKC and lower-casing."""
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=config.tokenizer.vocab_size,
            min_frequency=2,
            max_token_length=config.tokenizer.max_piece_length or _MAX_PIECE_LENGTH,
            special_tokens=SPECIAL_TOKENS,
            show_progress=False,
        )
        tokenizer.train_from_iterator(cast(Sequence[str], inputs), trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
        )
        return cls(tokenizer, config.buckets)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        limits = {"input_ids": self._tokenizer.get_vocab_size(), "attention_mask": 2}
        return tuple(
            TensorSpec(name, np.dtype(np.int64), (-1, -1), max_length=self._buckets[-1], values_below=limit)
            for name, limit in limits.items()
        )

    @property
    def facts(self) -> Mapping[str, int]:
        return {
            "vocab_size": self._tokenizer.get_vocab_size(),
            "max_length": self._buckets[-1],
            "unknown_id": SPECIAL_TOKENS.index(UNKNOWN),
        }

    def encode(self, inputs: Sequence[Input]) -> Tensors:
        """Return ids and mask of a batch, padded to the smallest bucket that fits its longest text."""
        for item in inputs:
            if not isinstance(item, str):
                raise DataError(f"got {type(item).__name__} as an input: expected a text")
        rows = self._tokenizer.encode_batch(cast(list[str], list(inputs)))
        length = self._buckets[bisect.bisect_left(self._buckets, max(len(row.ids) for row in rows))]
        for row in rows:
            row.pad(length)  # [PAD] is token 0
        return {
            "input_ids": np.array([row.ids for row in rows], np.int64),
            "attention_mask": np.array([row.attention_mask for row in rows], np.int64),
        }

    def save(self, folder: UPath) -> None:
        write_atomically(folder / TOKENIZER_FILE, self._tokenizer.to_str(pretty=True).encode())
        write_atomically(folder / SETTINGS_FILE, _TextSettings(buckets=self._buckets).model_dump_json().encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        settings = _TextSettings.model_validate_json((folder / SETTINGS_FILE).read_bytes())
        return cls(Tokenizer.from_str((folder / TOKENIZER_FILE).read_text(encoding="utf-8")), settings.buckets)
