"""Texts as token ids, by a byte-pair tokenizer of Hugging Face ``tokenizers``, padded to length buckets."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import ClassVar, Literal, Self, cast, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from tokenizers import Encoding, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from upath import UPath

from app.config import DataConfig
from app.data.examples import Input, Modality
from app.data.tokenizer import num_ids, read_tokenizer, require_same_ids
from app.errors import DataError, RecipeError
from app.pretrained import TOKENIZER_FILE, Companion, PretrainedFolder
from app.storage import write_atomically
from app.tensors import Tensors, TensorSpec

SPECIAL_TOKENS = [PAD, UNKNOWN, START] = ["[PAD]", "[UNK]", "[CLS]"]
SETTINGS_FILE = "text.json"
# In characters. Longer pieces are too rare to learn from a few thousand texts.
_MAX_PIECE_LENGTH = 4
_CHARACTERS_PER_TOKEN = 4
_SPARE_TOKENS = 16
"""Tokens to compute beyond the longest bucket. Only tokens next to a cut can differ from those of the whole text."""
_ROWS_AT_ONCE = 4096
"""Texts of a split that are encoded together to find their lengths."""


SEGMENTS = "token_type_ids"
PaddingSide = Literal["left", "right"]


class _TextSettings(BaseModel):
    buckets: list[int]
    pad_id: int = 0
    unknown_id: int = SPECIAL_TOKENS.index(UNKNOWN)
    padding_side: PaddingSide = "right"
    has_segments: bool = False
    companions: list[Companion] = []
    """Names of files that are kept beside the tokenizer. No others, since whoever publishes a version writes this."""


class TextProcessor:
    """Makes token ids and their mask, each int64 of shape (batch, length), where length is one of the buckets."""

    modality: ClassVar[Modality] = "text"

    def __init__(
        self,
        tokenizer: Tokenizer,
        buckets: Sequence[int],
        pad_id: int = 0,
        unknown_id: int = SPECIAL_TOKENS.index(UNKNOWN),
        companions: Mapping[str, bytes] | None = None,
        padding_side: PaddingSide = "right",
        has_segments: bool = False,
    ) -> None:
        """Set how texts are encoded.

        Args:
            companions: files of a pretrained tokenizer that transformers also reads, kept beside it.
            has_segments: whether the model also takes the segment of each token.
        """
        self._tokenizer = tokenizer
        self._tokenizer.enable_truncation(buckets[-1])
        self._tokenizer.no_padding()
        self._num_ids = num_ids(tokenizer)
        self._buckets = list(buckets)
        self._pad_id, self._unknown_id = pad_id, unknown_id
        self._companions = companions or {}
        self._padding_side: PaddingSide = padding_side
        self._has_segments = has_segments

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

    @classmethod
    def from_pretrained(cls, folder: PretrainedFolder, config: DataConfig) -> Self:
        """Return the folder's tokenizer. It pads with its own token, or the model's, else with the end token."""
        folder.require_length(config.buckets[-1], "data.buckets")
        tokenizer = read_tokenizer(folder)
        settings = folder.read_json("tokenizer_config.json") or {}
        if (settings.get("truncation_side") or (tokenizer.truncation or {}).get("direction")) == "left":
            raise RecipeError(
                f"{folder} has the truncation_side left, which keeps the end of a long text, but Rayloom keeps the "
                "beginning: set it to right in tokenizer_config.json if that suits the model"
            ).of("pretrained.truncation_side", "model.pretrained")

        def id_of(*kinds: str) -> int | None:
            tokens = (folder.special_token(kind) for kind in kinds)
            ids = (tokenizer.token_to_id(token) for token in tokens if token is not None)
            return next((number for number in ids if number is not None), None)

        own = tokenizer.padding["pad_id"] if tokenizer.padding else None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        require_same_ids(tokenizer, folder)
        # The end of a text is not padding for a model that knows another token.
        given = (id_of("pad_token"), folder.config.get("pad_token_id"), own, id_of("eos_token"))
        pad_id = next((number for number in given if isinstance(number, int) and number >= 0), None)
        if pad_id is None:
            raise RecipeError(f"{folder} has no padding token: set pad_token in tokenizer_config.json").of(
                "tokenizer.no_padding", "model.pretrained"
            )
        unknown_id = id_of("unk_token", "pad_token", "eos_token") or 0
        return cls(tokenizer, config.buckets, pad_id, unknown_id, folder.companions)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        limits: dict[str, int | None] = {"input_ids": self._num_ids, "attention_mask": 2}
        if self._has_segments:
            limits[SEGMENTS] = None
        return tuple(
            TensorSpec(name, np.dtype(np.int64), (-1, -1), max_length=self._buckets[-1], values_below=limit)
            for name, limit in limits.items()
        )

    @property
    def facts(self) -> Mapping[str, int]:
        return {
            "vocab_size": self._num_ids,
            "max_length": self._buckets[-1],
            "unknown_id": self._unknown_id,
            "pad_id": self._pad_id,
        }

    def changed(self, padding_side: PaddingSide | None = None, has_segments: bool | None = None) -> Self:
        """Return the processor with its padding on another side of the texts, or with the segment of each token."""
        side = padding_side or self._padding_side
        segments = self._has_segments if has_segments is None else has_segments
        ids = self._pad_id, self._unknown_id
        return type(self)(self._tokenizer, self._buckets, *ids, self._companions, side, segments)

    def encode(self, inputs: Sequence[Input]) -> Tensors:
        """Return ids and mask of a batch, padded to the smallest bucket that fits its longest text."""
        for item in inputs:
            if not isinstance(item, str):
                raise DataError(f"got {type(item).__name__} as an input: expected a text").of("input.type")
        return self._encode_texts(cast(Sequence[str], inputs))

    def encode_changed(self, inputs: Sequence[Input], changes: Sequence[Callable[[str], str]]) -> Tensors:
        """Return the batch with the changes of ``app.data.augmentation``."""
        texts = cast(Sequence[str], inputs)
        return self._encode_texts([change(text) for change, text in zip(changes, texts, strict=True)])

    def _encode_texts(self, texts: Sequence[str]) -> Tensors:
        rows = self._encodings(texts)
        length = self._buckets[bisect.bisect_left(self._buckets, max(len(row.ids) for row in rows))]
        for row in rows:
            row.pad(length, direction=self._padding_side, pad_id=self._pad_id)
        tensors = {
            "input_ids": np.array([row.ids for row in rows], np.int64),
            "attention_mask": np.array([row.attention_mask for row in rows], np.int64),
        }
        return tensors | ({SEGMENTS: np.array([row.type_ids for row in rows], np.int64)} if self._has_segments else {})

    def _encodings(self, texts: Sequence[str]) -> list[Encoding]:
        """Tokenise texts up to the longest bucket.

        Tokenising the rest of a long text would take time and memory and change nothing. So the first characters are
        tokenised, then twice as many, until some tokens are left over.
        """
        found: dict[int, Encoding] = {}
        left, limit = list(range(len(texts))), _CHARACTERS_PER_TOKEN * self._buckets[-1]
        while left:
            encoded = self._tokenizer.encode_batch([_first_words(texts[index], limit) for index in left])
            found.update(zip(left, encoded, strict=True))
            left = [index for index in left if len(texts[index]) > limit and _spare(found[index]) < _SPARE_TOKENS]
            limit *= 2
        return [found[index] for index in range(len(texts))]

    def padded_lengths(self, inputs: Iterable[Input]) -> NDArray[np.int32]:
        """Return the length that each text is padded to alone, of shape (texts,)."""
        texts, counts = iter(cast(Iterable[str], inputs)), [0]
        while some := list(islice(texts, _ROWS_AT_ONCE)):
            counts += [len(row.ids) for row in self._tokenizer.encode_batch(some)]
        buckets = np.array(self._buckets, np.int32)
        return buckets[np.searchsorted(buckets, counts[1:])]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the first character and the end of each token of a text that is encoded alone."""
        (encoded,) = self._encodings([text])
        found: list[tuple[int, int]] = encoded.offsets
        return found

    def save(self, folder: UPath) -> None:
        write_atomically(folder / TOKENIZER_FILE, self._tokenizer.to_str(pretty=True).encode())
        settings = _TextSettings(
            buckets=self._buckets,
            pad_id=self._pad_id,
            unknown_id=self._unknown_id,
            padding_side=self._padding_side,
            has_segments=self._has_segments,
            companions=[name for name in get_args(Companion) if name in self._companions],
        )
        write_atomically(folder / SETTINGS_FILE, settings.model_dump_json().encode())
        for name, content in self._companions.items():
            write_atomically(folder / name, content)

    @classmethod
    def load(cls, folder: UPath) -> Self:
        settings = _TextSettings.model_validate_json((folder / SETTINGS_FILE).read_bytes())
        tokenizer = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
        companions: dict[str, bytes] = {name: (folder / name).read_bytes() for name in settings.companions}
        ids = settings.pad_id, settings.unknown_id
        return cls(tokenizer, settings.buckets, *ids, companions, settings.padding_side, settings.has_segments)


def _first_words(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a text, cut at the end of a word if possible."""
    if len(text) <= limit:
        return text
    cut = text.rfind(" ", 0, limit)
    return text[: cut if cut > 0 else limit]


def _spare(encoded: Encoding) -> int:
    """Return the number of tokens beyond the longest bucket."""
    return sum(len(more.ids) for more in encoded.overflowing)
