"""Conversations: lists of messages, and the tokens of each with those that the model learns to answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import from_json

from app.data.sources.cells import Column
from app.data.tokenizer import LanguageTokenizer
from app.data.turns import with_reasoning
from app.errors import DataError, RecipeError
from app.pretrained import PretrainedFolder

_ASSISTANT = "assistant"


class Message(BaseModel):
    """One turn. Other keys of it are for the chat template."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: str
    train: bool | None = None
    """Whether the model learns the turn. None: it does if it is the assistant's."""

    @model_validator(mode="before")
    @classmethod
    def _convert_like_endpoint(cls, given: Any) -> Any:
        """Convert a message as the endpoint does: parse arguments of tool calls, and make ``developer`` ``system``."""
        if not isinstance(given, dict):
            return given
        if given.get("role") == "developer":
            given = {**given, "role": "system"}
        if not (calls := given.get("tool_calls")):
            return given
        if not isinstance(calls, list):
            raise ValueError(f"tool_calls is {calls!r:.80}: expected a list")
        return {**given, "content": given.get("content") or "", "tool_calls": list(map(_parse_arguments, calls))}

    @property
    def is_learned(self) -> bool:
        return self.train if self.train is not None else self.role == _ASSISTANT


def _parse_arguments(call: Any) -> Any:
    """Return a tool call with its arguments parsed, if they are text. Raises ValueError if they are no JSON object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        values = from_json(text, allow_inf_nan=False)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"the arguments of a tool call are {text!r:.80}: expected a JSON object")
    called = {**function, "arguments": values}
    return called if function is call else {**call, "function": called}


class Chat(NamedTuple):
    """A conversation."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """The tools that the model may call, in the format of the chat template."""


_TURNS = TypeAdapter(Annotated[list[Message], Field(min_length=1)])
_TOOLS = TypeAdapter(list[dict[str, Any]] | None)
MESSAGES = Column("a row", "messages", "nested")
"""The column of a table that has a conversation in each row."""
TOOLS = Column("the tools of a row", "tools", "nested", is_optional=True)
"""The optional column of a table that has the tools of each conversation."""


def read_chat(messages: str | None, tools: str | None = None) -> Chat:
    """Parse the two cells of a conversation. Raises DataError if it is invalid or has no turn to learn."""
    try:
        return Chat(_read_messages(messages), _TOOLS.validate_json(tools or "null") or None)
    except ValidationError as error:
        problem = error.errors()[0]
        raise DataError(
            f"{'.'.join(map(str, (TOOLS.name, *problem['loc'])))}: {problem['msg']}; expected "
            '[{"type": "function", "function": {"name": "…", "parameters": {…}}}], or null'
        ).of("chat.tools") from error


def _read_messages(cell: str | None) -> list[Message]:
    try:
        messages = _TURNS.validate_json(cell or "null")
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, (MESSAGES.name, *problem["loc"])))
        raise DataError(
            f"{key}: {problem['msg']}; expected "
            '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
        ).of("chat.turns") from error
    if not any(message.is_learned for message in messages):
        roles = ", ".join(message.role for message in messages)
        raise DataError(
            f"no turn to learn (the roles are {roles}): add an assistant's turn, or train: true to a message"
        ).of("chat.nothing_to_learn")
    return messages


def write_chat(chat: Chat) -> str:
    """Return a conversation as text for ``stored_chat``. Equal conversations give equal texts."""
    # Compact JSON has no line breaks, so one separates the two parts.
    tools = f"\n{_TOOLS.dump_json(chat.tools).decode()}" if chat.tools else ""
    return _TURNS.dump_json(chat.messages, exclude_defaults=True).decode() + tools


def stored_chat(text: str) -> Chat:
    """Parse a text that ``write_chat`` returned."""
    messages, _, tools = text.partition("\n")
    return read_chat(messages, tools)


@dataclass(frozen=True)
class EncodedChat:
    """The first tokens of a conversation, of shape (tokens,). ``learned`` tells those that the model learns to give."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    is_cut: bool


class ChatEncoder:
    """Writes conversations with a tokenizer's chat template, as tokens. It can be pickled."""

    def __init__(self, folder: PretrainedFolder, tokenizer: LanguageTokenizer) -> None:
        """Read the tokenizer of a pretrained model, as transformers does. ``tokenizer`` is the same one.

        Raises:
            RecipeError: there is no template.
        """
        from transformers import AutoTokenizer

        # The last one is only a target.
        self._max_tokens = tokenizer.facts["max_length"] + 1
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder.path)
        if tokenizer.template is not None:
            self._tokenizer.chat_template = tokenizer.template
        if not self._tokenizer.chat_template:
            raise RecipeError(
                f"{folder} has no chat template: add chat_template.jinja to the folder, or name a file in "
                "data.chat.template"
            ).of("chat.no_template", "data.chat.template")

    def encode(self, chat: Chat) -> EncodedChat:
        """Return the first tokens of a conversation. Raises DataError if the template does not suit it."""
        text, spans = self._render(chat)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens, length = encoded["input_ids"], self._max_tokens
        starts = np.array([start for start, _ in encoded["offset_mapping"][:length]], np.int64)
        learned = np.zeros(len(starts), bool)
        for first, last in spans:
            learned |= (starts >= first) & (starts < last)
        learned[:1] = False  # nothing comes before the first token
        return EncodedChat(np.array(tokens[:length], np.int32), learned, len(tokens) > length)

    def _render(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the places of the turns that are learned: from after the prompt to the next turn."""
        turns = [with_reasoning(message.model_dump(exclude={"train"})) for message in chat.messages]
        whole = self._apply(turns, chat.tools)
        if chat.tools and whole == self._apply(turns, None):
            raise DataError(
                "it has tools, which the chat template does not read: name a template that does in data.chat.template, "
                "or remove the column tools"
            ).of("chat.tools_unread")
        spans = []
        for number, message in enumerate(chat.messages):
            if not message.is_learned:
                continue
            before = self._apply(turns[:number], chat.tools, prompt=message.role == _ASSISTANT) if number else ""
            after = self._apply(turns[: number + 1], chat.tools) if number + 1 < len(turns) else whole
            if not whole.startswith(after) or not after.startswith(before):
                raise DataError(
                    f"the chat template changes earlier turns when turn {number + 1} follows, so the place of the "
                    "answer is not known: name a template without that in data.chat.template"
                ).of("chat.template")
            spans.append((len(before), len(after)))
        return whole, spans

    def _apply(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, prompt: bool = False
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template may raise anything, such as for a role that it does not know
            raise DataError(f"the chat template refuses it: {error}").of("chat.template") from error
        return text
