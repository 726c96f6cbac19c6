"""Data of chats: conversations as tokens, packed into blocks in which each attends to itself alone."""

import bisect
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.config import DataConfig
from app.data.conversations import ChatEncoder, EncodedChat, fingerprint_of, read_conversations
from app.data.examples import CleaningReport, Reason
from app.data.prepared import IGNORED, TRAIN, VALIDATION, Batch, Dataset, finish_saving
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError
from app.pretrained import open_pretrained
from app.storage import stream_atomically, write_atomically

Document = TypeVar("Document")
_TEMPLATE_FILE = "chat_template.jinja"
_ARRAYS = ("tokens", "learned", "chats", "blocks")


@dataclass(frozen=True)
class ChatBlocks(Dataset):
    """Conversations, in blocks of one or more.

    Attributes:
        tokens: of all conversations, int32 of shape (tokens,).
        learned: whether the model learns to give each token, of the same shape.
        chats: where each conversation begins in ``tokens``, and where the last ends, of shape (conversations + 1,).
        blocks: the number of the first conversation of each block, and that of all, of shape (blocks + 1,).
        block_length: tokens to which packed blocks are padded. None: to the longest of a batch.
    """

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    chats: NDArray[np.int64]
    blocks: NDArray[np.int64]
    block_length: int | None

    def __len__(self) -> int:
        return len(self.blocks) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens that the model reads of each block, of shape (blocks,). The last of each chat is only a target."""
        return np.diff(self.chats[self.blocks]) - np.diff(self.blocks)

    @property
    def padded_lengths(self) -> NDArray[np.int32]:
        """Tokens of each block with its padding, of shape (blocks,)."""
        lengths = self.lengths.astype(np.int32)
        return np.full_like(lengths, self.block_length) if self.block_length else lengths

    @property
    def num_targets(self) -> NDArray[np.int64]:
        """Targets of each block, of shape (blocks,). They weigh its loss."""
        counts = np.concatenate([[0], np.cumsum(self.learned)])
        return np.diff(counts[self.chats[self.blocks]])

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return ``input_ids`` and targets, each int64 of shape (batch, length), and ``position_ids`` if packed.

        Positions begin anew with each conversation. By them, transformers keeps the attention of conversations apart.
        """
        length = self.block_length or int(self.lengths[list(indices)].max())
        inputs, positions = (np.zeros((len(indices), length), np.int64) for _ in range(2))
        targets = np.full((len(indices), length), IGNORED, np.int64)
        for row, index in enumerate(indices):
            place = 0
            for chat in range(self.blocks[index], self.blocks[index + 1]):
                start, stop = self.chats[chat], self.chats[chat + 1]
                here = slice(place, place := place + int(stop - start) - 1)
                inputs[row, here] = self.tokens[start : stop - 1]
                positions[row, here] = np.arange(stop - start - 1)
                targets[row, here] = np.where(self.learned[start + 1 : stop], self.tokens[start + 1 : stop], IGNORED)
        packed = {"position_ids": positions} if self.block_length else {}
        return Batch({"input_ids": inputs, **packed}, targets)

    @classmethod
    def of(cls, chats: Sequence[EncodedChat], block_length: int, packing: bool) -> Self:
        """Pack conversations of at most ``block_length + 1`` tokens."""
        lengths = [len(chat.tokens) - 1 for chat in chats]
        groups = pack(lengths, block_length) if packing else [[number] for number in range(len(chats))]
        ordered = [chats[number] for group in groups for number in group]
        return cls(
            tokens=np.concatenate([chat.tokens for chat in ordered]),
            learned=np.concatenate([chat.learned for chat in ordered]),
            chats=np.cumsum([0, *(len(chat.tokens) for chat in ordered)]),
            blocks=np.cumsum([0, *map(len, groups)]),
            block_length=block_length if packing else None,
        )

    def save(self, file: UPath) -> None:
        """Write the arrays for ``load``."""
        with stream_atomically(file) as opened:
            np.savez(opened, allow_pickle=False, **{name: getattr(self, name) for name in _ARRAYS})

    @classmethod
    def load(cls, file: UPath, block_length: int | None) -> Self:
        """Read what ``save`` wrote."""
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            return cls(**{name: arrays[name] for name in _ARRAYS}, block_length=block_length)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Share out conversations over few blocks: the longest first, each into the fullest block that has room for it.

    (Best-fit decreasing: https://en.wikipedia.org/wiki/Best-fit_bin_packing)
    """
    blocks: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # the room that is left, and the block; ascending
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        place = bisect.bisect_left(rooms, (lengths[number], -1))
        room, block = rooms.pop(place) if place < len(rooms) else (capacity, len(blocks))
        if block == len(blocks):
            blocks.append([])
        blocks[block].append(number)
        if room > lengths[number]:
            bisect.insort(rooms, (room - lengths[number], block))
    return blocks


@dataclass(frozen=True)
class ChatData:
    """Blocks of the training and validation conversations, and the tokenizer of the pretrained model."""

    train: ChatBlocks
    validation: ChatBlocks
    tokenizer: LanguageTokenizer
    template: str
    report: CleaningReport
    origins: ClassVar[None] = None

    @property
    def facts(self) -> Mapping[str, int]:
        """``vocab_size`` and ``max_length``."""
        return self.tokenizer.facts

    @property
    def tokens_per_sample(self) -> int:
        """The mean number of tokens in a block, without padding."""
        return round(float(self.train.lengths.mean()))

    @property
    def fingerprint(self) -> str:
        """sha256 over the tokenizer and both splits, in order."""
        digest = hashlib.sha256(self.tokenizer.to_json().encode())
        for split in (self.train, self.validation):
            for name in _ARRAYS:
                digest.update(np.ascontiguousarray(getattr(split, name)).data)
        return digest.hexdigest()

    @property
    def rows(self) -> Mapping[str, int]:
        """The blocks of each split."""
        return {TRAIN: len(self.train), VALIDATION: len(self.validation)}

    @property
    def summary(self) -> str:
        chats, lengths = len(self.train.chats) - 1, self.train.lengths
        filled = lengths.sum() / (len(lengths) * (self.train.block_length or lengths.max()))
        return (
            f"{self.report}\ntraining on {chats:,} conversations in {len(self.train):,} blocks, {filled:.0%} full, "
            f"with {int(self.train.num_targets.sum()):,} tokens to learn of {int(lengths.sum()):,}; validating on "
            f"{len(self.validation.chats) - 1:,}"
        )

    def save(self, folder: UPath) -> None:
        """Write the blocks, the report as JSON, and the tokenizer's own files with the template."""
        folder.mkdir(parents=True, exist_ok=True)
        self.train.save(folder / f"{TRAIN}.npz")
        self.validation.save(folder / f"{VALIDATION}.npz")
        finish_saving(self, folder)

    def save_codec(self, folder: UPath) -> None:
        """Write the tokenizer's own files, and the template."""
        self.tokenizer.save(folder)
        write_atomically(folder / _TEMPLATE_FILE, self.template.encode())

    @classmethod
    def load(cls, folder: UPath, config: DataConfig) -> Self:
        """Return the data that ``save`` wrote."""
        length = config.block_length if config.chat.packing else None
        return cls(
            ChatBlocks.load(folder / f"{TRAIN}.npz", length),
            ChatBlocks.load(folder / f"{VALIDATION}.npz", length),
            LanguageTokenizer.load(folder),
            (folder / _TEMPLATE_FILE).read_text(encoding="utf-8"),
            CleaningReport.load(folder),
        )


def prepare(config: DataConfig, pretrained: str) -> ChatData:
    """Read, clean, split and tokenise the conversations. Equal configurations give equal data.

    Raises:
        DataError: the source cannot be read, a row is no conversation with an answer, or there are too few.
        RecipeError: the pretrained model has no tokenizer or chat template, or reads fewer tokens.
    """
    folder = open_pretrained(pretrained)
    tokenizer = LanguageTokenizer.from_pretrained(folder, config)
    encoder = ChatEncoder(folder, config.chat.template)
    chats, report = _encode_all(config, encoder)
    parts = [ChatBlocks.of(part, config.block_length, config.chat.packing) for part in split_documents(chats, config)]
    return ChatData(parts[0], parts[1], tokenizer, encoder.template, report)


def _encode_all(config: DataConfig, encoder: ChatEncoder) -> tuple[list[EncodedChat], CleaningReport]:
    """Return the conversations as tokens. One whose first answer begins after ``block_length`` tokens is dropped."""
    kept: list[EncodedChat] = []
    seen: set[str] = set()
    dropped: Counter[Reason] = Counter()
    num_cut = 0
    for chat in read_conversations(config):
        key = fingerprint_of(chat)
        if key in seen and config.clean.deduplicate is not False:
            dropped["duplicate"] += 1
            continue
        seen.add(key)
        whole = encoder.encode(chat)
        cut = whole.cut(config.block_length + 1)
        if not cut.learned[1:].any():
            dropped["no_answer"] += 1
            continue
        num_cut += len(cut.tokens) < len(whole.tokens)
        cut.learned[0] = False  # nothing comes before the first token
        kept.append(cut)
    if not kept:
        raise DataError(
            f"data.source {config.source!r} has no conversation to learn: raise data.block_length or give more"
        )
    given = len(kept) + dropped.total()
    return kept, CleaningReport(what="conversations", given=given, kept=len(kept), dropped=dropped, cut=num_cut)


def split_documents(documents: Sequence[Document], config: DataConfig) -> tuple[list[Document], list[Document]]:
    """Return a seeded split by document, so that no part of a validation document is trained on."""
    # A legacy generator: NumPy guarantees that its permutations never change.
    order = np.random.RandomState(config.seed).permutation(len(documents))
    held_out = math.ceil(config.validation_fraction * len(documents))
    if not 0 < held_out < len(documents):
        raise DataError(
            f"data.source {config.source!r} has {len(documents)} documents after cleaning, which cannot be split with "
            f"data.validation_fraction {config.validation_fraction}: give a folder of files, or a table with a "
            "document a row"
        )
    validation, train = ([documents[index] for index in part] for part in (order[:held_out], order[held_out:]))
    return train, validation
