"""The conversations of one split of a unit as shards, in blocks of one or more."""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from app.data.chat import CONVERSATIONS, CUT, LEARNED, POSITIONS, TARGETS
from app.data.conversations import ChatEncoder, EncodedChat, stored_chat
from app.data.examples import Natural
from app.data.preparation.writers import UNIT_SHARDS, token_type
from app.data.prepared import IGNORED
from app.data.sharded import TOKENS
from app.data.shards import LENGTH, Shard, ShardPlace, ShardWriter
from app.data.tokenizer import LanguageTokenizer

_BLOCKS_AT_ONCE = 1024


class ChatWriter:
    """Tokenises conversations, and writes them in blocks.

    Those of a unit are packed together. Compressed files may give more, which are packed in several parts.
    """

    def __init__(self, place: ShardPlace, tokenizer: LanguageTokenizer, encoder: ChatEncoder, is_packed: bool) -> None:
        self._length, self._encoder, self._is_packed = tokenizer.facts["max_length"], encoder, is_packed
        columns = {TOKENS: pa.list_(token_type(tokenizer)), TARGETS: pa.list_(pa.int32())}
        columns |= {POSITIONS: pa.list_(pa.int32())} if is_packed else {}
        self._schema = pa.schema(columns | dict.fromkeys((LENGTH, CONVERSATIONS, LEARNED, CUT), pa.int32()))
        self._shards, self._max_bytes = ShardWriter(place, self._schema), UNIT_SHARDS * place.size
        self._chats: list[EncodedChat] = []
        self._bytes = 0

    def add(self, inputs: Sequence[Natural], labels: Sequence[str]) -> None:  # noqa: ARG002
        """Add cleaned conversations."""
        for item in cast(Sequence[str], inputs):
            self._chats.append(self._encoder.encode(stored_chat(item)))
            self._bytes += self._chats[-1].tokens.nbytes + self._chats[-1].learned.nbytes
            if self._bytes >= self._max_bytes:
                self._write()

    def _write(self) -> None:
        # The last token of each is only a target.
        lengths = [len(chat.tokens) - 1 for chat in self._chats]
        groups = pack(lengths, self._length) if self._is_packed else [[number] for number in range(len(lengths))]
        for start in range(0, len(groups), _BLOCKS_AT_ONCE):
            some = groups[start : start + _BLOCKS_AT_ONCE]
            rows = [_row([self._chats[number] for number in group]) for group in some]
            self._shards.add(pa.RecordBatch.from_pylist(rows, self._schema))
        self._chats, self._bytes = [], 0

    def close(self) -> list[Shard]:
        """Write what is left, and return all shards."""
        self._write()
        return self._shards.close()


def _row(chats: Sequence[EncodedChat]) -> Mapping[str, Any]:
    targets = np.concatenate([np.where(chat.learned, chat.tokens, IGNORED)[1:] for chat in chats])
    return {
        TOKENS: np.concatenate([chat.tokens[:-1] for chat in chats]),
        TARGETS: targets,
        POSITIONS: np.concatenate([np.arange(len(chat.tokens) - 1) for chat in chats]),
        LENGTH: len(targets),
        CONVERSATIONS: len(chats),
        LEARNED: np.count_nonzero(targets != IGNORED),
        CUT: sum(chat.is_cut for chat in chats),
    }


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
