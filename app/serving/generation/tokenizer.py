"""Prompts as tokens, by Hugging Face ``tokenizers``. A client's text never becomes a special token."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer

from app.data.tokenizer import num_appended
from app.errors import RequestError, RequestTooLargeError, StorageError, first_line, short_repr
from app.serving.generation.decoder import AnswerText, decode, token_texts
from app.serving.generation.template import ChatTemplate, Message, Tool
from app.serving.generation.texts import PRIVATE, map_strings, split_at_names, strings, unused_characters

TOKENIZER_FILE, SETTINGS_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_MIN_LIMIT_BYTES = 2**16
_ANSWER = "42"
_SECRET = chr(PRIVATE.start)
"""The prefix of the names that special tokens have while content with their own names is encoded."""


@dataclass(frozen=True)
class _Renamed:
    """A tokenizer for which the names of some tokens are ordinary text. They have names that no text contains."""

    tokenizer: Tokenizer
    names: Mapping[str, str]
    """The new name of each of these tokens."""
    ids: Mapping[int, int]
    """The model's ids by this tokenizer's ids, where they differ."""

    def encode(self, text: str, has_beginning: bool) -> tuple[int, ...]:
        """Return the model's ids of a text. ``has_beginning``: whether it gets the tokens that begin a text."""
        return tuple(self.ids.get(token, token) for token in _encode(self.tokenizer, text, has_beginning))


class GenerationTokenizer:
    """The tokenizer of a language model, with its chat template if it has one.

    Any thread may call its methods. Encode long texts outside of the event loop.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None = None, context_length: int | None = None
    ) -> None:
        """Prepare a tokenizer.

        Args:
            tokenizer: the tokenizer, without truncation and padding.
            template: the chat template; None if the model takes plain prompts only.
            context_length: the maximum tokens of a prompt. Text that is too long is refused before it is encoded.

        Raises:
            EngineError: the tokenizer's decoder is not known.
        """
        self._tokenizer, self._template = tokenizer, template
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._texts = token_texts(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, name in added.items() if name.special)
        literals = template.literals if template else ""
        control = {
            token
            for token, name in added.items()
            if name.special or (name.content in literals and not name.content.isspace())
        }
        self._control = frozenset(control)
        self._control_names = sorted((added[token].content for token in control), key=len, reverse=True)
        self._normalizes = tokenizer.normalizer is not None and any(added[token].normalized for token in control)
        unknown = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
        # The model itself turns ordinary text into unknown tokens.
        self._guarded = self._special - {unknown}
        self._plain = _rename(tokenizer, ())
        self._plain.tokenizer.encode_special_tokens = True
        # A prompt must not end with an end token, because the model continues it.
        self._without_end = slice(-num_appended(tokenizer) or None)
        self._begins = self._plain.encode("", has_beginning=True)[self._without_end]
        self._marked = _rename(tokenizer, self._control)
        # Every name of these tokens contains one of these characters.
        self._signs = {sign for name in self._control_names for sign in name if not (sign.isalnum() or sign in "_ ")}
        self._context_length = context_length
        longest = max((len(self._texts.bytes_of(token)) for token in tokenizer.get_vocab()), default=1)
        self.limit_bytes = max(_MIN_LIMIT_BYTES, (context_length or 2**20) * longest)
        """The maximum size of a prompt's text."""

    @classmethod
    def load(cls, folder: Path, context_length: int | None = None) -> Self:
        """Read the tokenizer of a model's folder.

        Raises:
            StorageError: the folder has no tokenizer, or it cannot be read.
            EngineError: the tokenizer's decoder or its chat template is not known.
        """
        try:
            tokenizer = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
            settings = _read_settings(folder / SETTINGS_FILE)
            source = _read_template(folder / TEMPLATE_FILE, settings)
        except FileNotFoundError as error:
            raise StorageError(f"the model has no {TOKENIZER_FILE}: publish it again").of(
                "version.incomplete"
            ) from error
        except Exception as error:  # the library raises Exception itself
            raise StorageError(f"the model's tokenizer cannot be read ({first_line(error)}): publish it again").of(
                "file.unreadable"
            ) from error
        named = _named_tokens(settings)
        _complete(tokenizer, named.values())
        return cls(tokenizer, ChatTemplate(source, named) if source else None, context_length)

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def writes_tool_calls(self) -> bool:
        """Whether the template asks for tool calls in the form of Hermes, as JSON between tags that are text."""
        if self._template is None or not self._template.reads_tools:
            return False
        literals = self._template.literals
        is_json = "<tool_call>" in literals and "arguments" in literals and "<function=" not in literals
        return is_json and self._tokenizer.token_to_id("<tool_call>") not in self._special

    @property
    def answer_end(self) -> int | None:
        """The special token that the chat template writes after an answer; None if there is none."""
        if self._template is None:
            return None
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            _, found, after = self._template.render(turns, None).rpartition(_ANSWER)
        except RequestError:  # the template requires other turns
            return None
        names = (part for part, is_name in split_at_names(after if found else "", self._control_names) if is_name)
        name = next(names, None)
        return None if name is None else self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, with those that begin a text. The names of special tokens are text in it.

        Raises:
            RequestTooLargeError: the text is too long for the model.
            RequestError: the text is not valid Unicode.
        """
        self._require_size(len(text), "prompt")
        self._require_fits(text, "prompt")
        tokens = self._plain.encode(text, has_beginning=True)[self._without_end]
        if self._own(tokens) != self._own(self._begins):
            raise RequestError(
                "the model's tokenizer makes special tokens of what prompt contains: leave their names out"
            ).of("chat.special_tokens", "prompt")
        return tokens

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> tuple[int, ...]:
        """Return the tokens of messages as the chat template writes them, up to the beginning of the answer.

        The template's own special tokens are tokens. The same names in messages and tools are text.

        Raises:
            RequestTooLargeError: the messages are too long for the model.
            RequestError: the model has no chat template, the template refuses the messages or would turn their content
                into special tokens, or a text is not valid Unicode.
        """
        if self._template is None:
            raise RequestError("the model has no chat template: send a prompt to /v1/completions").of(
                "chat.no_template", "messages"
            )
        self._require_turns(messages)
        given = [*strings(messages), *strings(tools or [])]
        self._require_size(sum(map(len, given)), "messages")
        everything = "\0".join(given)
        named = [name for name in self._control_names if name in everything]
        if named:
            tokens = self._encode_marked(messages, tools, everything, named)
        else:
            text = self._template.render(messages, tools)
            self._require_fits(text, "messages")
            tokens = _encode(self._tokenizer, text, has_beginning=False)
        if named or self._normalizes or not self._signs.isdisjoint(everything):
            self._require_own_tokens(tokens, messages, tools)
        return tuple(tokens)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of all tokens of an answer."""
        return decode(self._texts, (token for _, token, is_special in self.written(tokens) if not is_special))

    def answer(self, stop: Sequence[str]) -> AnswerText:
        """Return a builder for the text of an answer, which ends at a stop text."""
        return AnswerText(self._texts, stop)

    def written(self, tokens: Iterable[int]) -> list[tuple[int, str, bool]]:
        """Return the name of each token, and whether it is special, so that it has no text."""
        return [(token, self._tokenizer.id_to_token(token) or "", token in self._special) for token in tokens]

    def _require_turns(self, messages: Sequence[Message]) -> None:
        roles = [message.get("role") for message in messages]
        for index, role in enumerate(roles):
            if role not in _ROLES:
                raise RequestError(
                    f"messages[{index}].role is {short_repr(role)}: expected one of {', '.join(sorted(_ROLES))}"
                ).of("chat.role", f"messages[{index}].role")
        if "user" not in roles:
            raise RequestError("messages has no turn of the user: add one").of("chat.no_user", "messages")
        if self._context_length and len(messages) > self._context_length:
            raise RequestTooLargeError(
                f"messages has {len(messages)} turns, and the model takes {self._context_length} tokens: send fewer"
            ).of("prompt.too_long", "messages")

    def _require_size(self, characters: int, key: str) -> None:
        if characters > self.limit_bytes:
            raise RequestTooLargeError(
                f"{key} has {characters} characters, which is more than the model's {self._context_length} tokens can "
                f"be: send {self.limit_bytes} at most"
            ).of("prompt.too_long", key)

    def _require_fits(self, text: str, key: str) -> None:
        """Raise RequestTooLargeError if the beginning of a long text already has too many tokens."""
        if self._context_length is None:
            return
        length = 4 * self._context_length
        while 2 * length < len(text):
            # The last word of the beginning may be cut, so its tokens may differ from those of the whole text.
            tokens = len(_encode(self._plain.tokenizer, text[:length], has_beginning=False))
            if tokens > 2 * self._context_length:
                raise RequestTooLargeError(
                    f"{key} has {tokens} tokens in its first {length} of {len(text)} characters: the model reads "
                    f"{self._context_length}; shorten it"
                ).of("prompt.too_long", key)
            length *= 4

    def _encode_marked(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, everything: str, named: Sequence[str]
    ) -> tuple[int, ...]:
        """Encode messages that contain names of special tokens, which are marked so that the template's own differ."""
        assert self._template is not None
        if _SECRET in everything:
            raise RequestError(
                f"messages or tools contain {named[0]}, the name of a special token, and U+{ord(_SECRET):X}, a private "
                "character: leave one of them out"
            ).of("chat.special_tokens", "messages")
        begin, end = unused_characters(everything + self._template.literals, 2)

        def marked(text: str) -> str:
            return "".join(begin + part + end if is_name else part for part, is_name in split_at_names(text, named))

        text = self._template.render(map_strings(messages, marked), map_strings(tools, marked))
        self._require_fits(text, "messages")
        # A template may have separated the marks of a name. The remaining parts must not form a name either.
        mark, own, place = re.compile(f"{begin}([^{begin}{end}]*){end}|[{begin}{end}]"), [], 0
        names = [name for name in self._control_names if name in text]
        for found in mark.finditer(text):
            own += [self._with_new_names(text[place : found.start()], names), found[1] or ""]
            place = found.end()
        own.append(self._with_new_names(text[place:], names))
        return self._marked.encode("".join(own), has_beginning=False)

    def _with_new_names(self, text: str, names: Sequence[str]) -> str:
        return "".join(self._marked.names.get(part, part) for part, _ in split_at_names(text, names))

    def _require_own_tokens(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> None:
        """Raise RequestError unless all special tokens are the template's own.

        This holds if messages without any part of their names give the same special tokens.
        """
        assert self._template is not None
        harmless = str.maketrans(dict.fromkeys(self._signs, "\N{REPLACEMENT CHARACTER}"))

        def disarmed(text: str) -> str:
            text = text.translate(harmless)
            return re.sub(r"[^\x00-\x7f]", "\N{REPLACEMENT CHARACTER}", text) if self._normalizes else text

        text = self._template.render(map_strings(messages, disarmed), map_strings(tools, disarmed))
        expected = _encode(self._tokenizer, text, has_beginning=False)
        if self._own(tokens) != self._own(expected):
            raise RequestError(
                "the model's chat template would make special tokens of what messages or tools contain: leave such "
                f"names as {self._control_names[0]} out"
            ).of("chat.special_tokens", "messages")

    def _own(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token in self._guarded]


def _encode(tokenizer: Tokenizer, text: str, has_beginning: bool) -> tuple[int, ...]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has {short_repr(text[error.start])}, half of a character: send valid Unicode").of(
            "text.unicode"
        ) from None
    # Unlike ``encode``, it releases the GIL.
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=has_beginning)
    return tuple(encoded.ids)


def _rename(tokenizer: Tokenizer, hidden: Collection[int]) -> _Renamed:
    """Return a tokenizer with the same model, in which some added tokens have names that no text contains."""
    renamed = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (given := getattr(tokenizer, part)) is not None:
            setattr(renamed, part, given)
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    names = {
        token: _SECRET + chr(PRIVATE[index + 1]) if token in hidden else name.content
        for index, (token, name) in enumerate(added)
    }
    for token, name in added:
        renamed.add_tokens([_with_name(name, names[token])])
    ids = {_id_of(renamed, names[token]): token for token, _ in added}
    return _Renamed(renamed, {name.content: names[token] for token, name in added if token in hidden}, ids)


def _id_of(tokenizer: Tokenizer, name: str) -> int:
    token = tokenizer.token_to_id(name)
    assert token is not None
    return token


def _with_name(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _read_settings(file: Path) -> Mapping[str, Any]:
    settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not isinstance(settings, dict):
        raise ValueError(f"{file.name} is no object")
    return settings


def _read_template(file: Path, settings: Mapping[str, Any]) -> str | None:
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several with names
        template = {one["name"]: one["template"] for one in template}.get("default")
    return template


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    given = {name: settings[name] for name in _NAMED_TOKENS if settings.get(name) is not None}
    return {name: token["content"] if isinstance(token, dict) else str(token) for name, token in given.items()}


def _complete(tokenizer: Tokenizer, named: Collection[str]) -> None:
    """Mark the tokens as special that the settings beside a tokenizer name, as transformers does."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    more = [name for name in named if name not in special and tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in more])
