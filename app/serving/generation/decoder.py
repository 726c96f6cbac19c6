"""The text of an answer as its tokens come: complete characters, up to a stop text."""

import codecs
import json
import random
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

from app.errors import EngineError
from app.serving.generation.request import GeneratedToken

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_CHECKED_ANSWERS, _CHECKED_TOKENS = 32, 64
"""Random answers whose texts are compared with the tokenizer's own when it is loaded."""


class TextBuilder(Protocol):
    """Makes the text of an answer from its tokens, one after another."""

    def add(self, token: str) -> str:
        """Return the text that is complete with this token."""
        ...

    @property
    def is_pending(self) -> bool:
        """Whether the bytes of the last tokens are not yet complete text."""
        ...

    def end(self) -> str:
        """Return the rest. Bytes that are no character become U+FFFD."""
        ...


class TokenTexts(Protocol):
    """The mapping from a tokenizer's tokens to bytes."""

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of a token alone."""
        ...

    def builder(self) -> TextBuilder:
        """Return a builder for the text of one answer."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each printable character that stands for one, as GPT-2 chose them."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + index): byte for index, byte in enumerate(others)}


class ByteLevelTexts:
    """Texts of a byte-level tokenizer: each character of a token stands for a byte."""

    _alphabet = _byte_alphabet()

    def bytes_of(self, token: str) -> bytes:
        try:
            return bytes([self._alphabet[character] for character in token])
        except KeyError:  # an added token that is written as it is
            return token.encode()

    def builder(self) -> TextBuilder:
        return _Utf8(self)


class _Utf8:
    def __init__(self, texts: ByteLevelTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: str) -> str:
        return self._decoder.decode(self._texts.bytes_of(token))

    @property
    def is_pending(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True)
class PieceTexts:
    """Texts of SentencePiece's tokens. Tokens such as ``<0x0A>`` are bytes."""

    space: str = "▁"
    strips: int = 0
    """The maximum number of spaces that are stripped from the beginning of the text."""
    drops_first: bool = False
    """Whether the first token loses all its spaces."""
    has_bytes: bool = True

    def byte(self, token: str) -> int | None:
        """Return the byte that a token stands for; None if it is a text."""
        found = _BYTE.fullmatch(token) if self.has_bytes else None
        return int(found[1], 16) if found else None

    def text_of(self, token: str) -> str:
        """Return the text of a token that is not a byte."""
        return token.replace(self.space, " ")

    def bytes_of(self, token: str) -> bytes:
        byte = self.byte(token)
        return self.text_of(token).encode() if byte is None else bytes([byte])

    def builder(self) -> TextBuilder:
        return _Pieces(self)


class _Pieces:
    def __init__(self, texts: PieceTexts) -> None:
        self._texts = texts
        self._bytes = bytearray()
        self._strips = texts.strips
        self._is_first = True

    def add(self, token: str) -> str:
        if (byte := self._texts.byte(token)) is not None:
            # One invalid byte makes all adjacent bytes invalid, so they wait for the next text.
            self._bytes.append(byte)
            self._is_first = False
            return ""
        text = token.replace(self._texts.space, "") if self._drops else self._texts.text_of(token)
        self._is_first = False
        return self._stripped(self._characters() + text)

    @property
    def _drops(self) -> bool:
        return self._is_first and self._texts.drops_first

    @property
    def is_pending(self) -> bool:
        return bool(self._bytes)

    def end(self) -> str:
        return self._stripped(self._characters())

    def _characters(self) -> str:
        given, self._bytes = bytes(self._bytes), bytearray()
        try:
            return given.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(given)

    def _stripped(self, text: str) -> str:
        while self._strips and text.startswith(" "):
            text, self._strips = text[1:], self._strips - 1
        if text:
            self._strips = 0
        return text


def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """Return the texts of a tokenizer's tokens, after comparing them with its own decoder on random tokens.

    Raises:
        EngineError: its decoder is unknown, or gives other texts.
    """
    written = tokenizer.decoder.__getstate__() if tokenizer.decoder else b"null"
    texts = _find_texts(json.loads(written))
    if texts is None or not _agrees(texts, tokenizer):
        raise EngineError(
            f"the tokenizer's decoder is {written.decode()[:200]}, which cannot be streamed: expected that of a "
            "byte-level tokenizer, or of SentencePiece; publish a model with such a tokenizer"
        ).of("tokenizer.decoder")
    return texts


def _find_texts(decoder: Any) -> TokenTexts | None:  # JSON of the tokenizers library
    match decoder:
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return ByteLevelTexts()
        case {"type": "Metaspace", "replacement": str(space)}:
            drops = decoder.get("prepend_scheme", "always") != "never"
            return PieceTexts(space, drops_first=drops, has_bytes=False)
        case {"type": "Sequence", "decoders": [{"type": "Replace"} as replace, {"type": "ByteFallback"}, *rest]}:
            strips = _strips_of(rest)
            match replace:
                case {"pattern": {"String": str(space)}, "content": " "} if strips is not None:
                    return PieceTexts(space, strips)
    return None


def _strips_of(decoders: Sequence[Any]) -> int | None:
    match decoders:
        case [{"type": "Fuse"}]:
            return 0
        case [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": int(start), "stop": 0}]:
            return start
    return None


def _agrees(texts: TokenTexts, tokenizer: Tokenizer) -> bool:
    draw, ids = random.Random(0), sorted(tokenizer.get_vocab().values())
    for _ in range(_CHECKED_ANSWERS if ids else 0):
        answer = draw.choices(ids, k=_CHECKED_TOKENS)
        if decode(texts, [tokenizer.id_to_token(token) or "" for token in answer]) != tokenizer.decode(
            answer, skip_special_tokens=False
        ):
            return False
    return True


def decode(texts: TokenTexts, tokens: Iterable[str]) -> str:
    """Return the text of all tokens."""
    builder = texts.builder()
    return "".join([*map(builder.add, tokens), builder.end()])


class StopTexts:
    """Finds the stop text that is complete first, in a text that comes in parts, by Knuth, Morris and Pratt.

    The division into parts does not matter. If several are complete with the same character, the longest counts.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """``stop``: texts of one character or more."""
        self._stop = [(text, _borders(text)) for text in stop]
        self._states = [0] * len(stop)
        self._held = ""

    @property
    def held(self) -> int:
        """The number of characters that may be the beginning of a stop text."""
        return len(self._held)

    def add(self, text: str) -> tuple[str, bool]:
        """Return the text that can be sent, and whether a stop text follows it."""
        if not self._stop:
            return text, False
        for place, character in enumerate(text, start=1):
            if found := self._advance(character):
                return (self._held + text[:place])[:-found], True
        text, held = self._held + text, max(self._states)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def end(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Return the length of the stop text that is complete with a character; 0 if there is none."""
        found = 0
        for index, (stop, borders) in enumerate(self._stop):
            state = self._states[index]
            while state and stop[state] != character:
                state = borders[state - 1]
            state += stop[state] == character
            self._states[index] = state
            if state == len(stop):
                found = max(found, state)
        return found


def _borders(text: str) -> list[int]:
    """Return, for each prefix of a text, the length of its longest proper suffix that is also a prefix."""
    borders, length = [0] * len(text), 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders


@dataclass(frozen=True)
class TextPart:
    """The next part of an answer's text, with the tokens that it completes."""

    text: str
    tokens: tuple[GeneratedToken, ...]
    is_stopped: bool = False
    """Whether a stop text follows, so that the answer ends here."""


class AnswerText:
    """The text of an answer. Tokens are held back together with their text."""

    def __init__(self, texts: TokenTexts, stop: Sequence[str]) -> None:
        self._texts, self._builder, self._stop = texts, texts.builder(), StopTexts(stop)
        self._built = 0  # characters
        self._pending: deque[tuple[GeneratedToken, int]] = deque()
        """Tokens, and the number of characters with which each is complete."""

    def add(self, tokens: Sequence[tuple[int, str, bool]], logprobs: Sequence[float]) -> TextPart:
        """Add tokens: the id, the token, and whether it is special, so that it has no text."""
        sent = ""
        for index, (token, written, is_special) in enumerate(tokens):
            before, text = self._built, "" if is_special else self._builder.add(written)
            self._built += len(text)
            own, logprob = self._texts.bytes_of(written), logprobs[index] if logprobs else None
            # Its text may begin with bytes of earlier tokens, and may lack stripped spaces.
            offset = max(before, self._built - len(own.decode(errors="replace")))
            generated = GeneratedToken(token, own, logprob, offset)
            self._pending.append((generated, self._built + self._builder.is_pending))
            complete, is_stopped = self._stop.add(text)
            sent += complete
            if is_stopped:
                return TextPart(sent, self._complete(len(sent)), is_stopped=True)
        return TextPart(sent, self._complete(len(sent)))

    def end(self) -> TextPart:
        """End the answer, and return the rest of it."""
        rest = self._builder.end()
        self._built += len(rest)
        complete, is_stopped = self._stop.add(rest)
        if is_stopped:
            return TextPart(complete, self._complete(len(complete)), is_stopped=True)
        tokens = tuple(token for token, _ in self._pending)
        return TextPart(complete + self._stop.end(), tokens)

    _sent = 0

    def _complete(self, characters: int) -> tuple[GeneratedToken, ...]:
        """Return the tokens that are complete after more characters."""
        self._sent += characters
        tokens = []
        while self._pending and self._pending[0][1] <= self._sent:
            tokens.append(self._pending.popleft()[0])
        return tuple(tokens)
