"""Conversations: rows of messages, and the tokens of each with those that the model learns to answer."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from app.config import DataConfig
from app.data.builtin import BUILTIN_DOCUMENTS
from app.data.sources.cells import Column, Columns
from app.data.sources.source import Source, find_builtin
from app.data.sources.units import read_source
from app.errors import DataError, RecipeError
from app.pretrained import PretrainedFolder
from app.storage import to_path

_ASSISTANT = "assistant"


class Message(BaseModel):
    """One turn. Other keys of it are for the chat template."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: str
    train: bool | None = None
    """Whether the model learns the turn. None: it does if it is the assistant's."""

    @property
    def is_learned(self) -> bool:
        return self.train if self.train is not None else self.role == _ASSISTANT


_TURNS = TypeAdapter(Annotated[list[Message], Field(min_length=1)])
_MESSAGES = Column("a row", "messages", "nested")


@dataclass(frozen=True)
class Conversation:
    """The messages of one row, and where it stands, for messages."""

    messages: tuple[Message, ...]
    place: str


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens, of shape (tokens,). ``learned`` tells those that the model learns to give."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]

    def cut(self, length: int) -> "EncodedChat":
        """Return the first ``length`` tokens."""
        return EncodedChat(self.tokens[:length], self.learned[:length])


def read_conversations(config: DataConfig) -> Iterator[Conversation]:
    """Yield the conversations of ``data.source``: rows of tables that have a list of ``messages``.

    Raises:
        DataError: the source does not exist, or a row is no conversation with an answer. File and row are named.
    """
    source = Source(config.source)
    if (builtin := find_builtin(source, {"stdlib": _documented_functions})) is not None:
        yield from builtin()
        return
    for rows in read_source(source, Columns("row", (_MESSAGES,))):
        for number, cell in enumerate(rows.cells[_MESSAGES.key].to_pylist()):
            yield _parse(cell or "null", rows.place(number))


def _parse(cell: str, place: str) -> Conversation:
    try:
        messages = _TURNS.validate_json(cell)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, (_MESSAGES.name, *problem["loc"])))
        raise DataError(
            f"{place}: {key}: {problem['msg']}; expected "
            '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
        ) from error
    if not any(message.is_learned for message in messages):
        roles = ", ".join(message.role for message in messages)
        raise DataError(
            f"{place}: no turn to learn (the roles are {roles}): add an assistant's turn, or train: true to a message"
        )
    return Conversation(tuple(messages), place)


def _documented_functions() -> Iterator[Conversation]:
    """Yield a question about each documented function of the standard library, with its docstring as the answer."""
    for content in BUILTIN_DOCUMENTS["stdlib"]():
        try:
            module = ast.parse(content)
        except (SyntaxError, ValueError):  # some files test the parser
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and (answer := ast.get_docstring(node)):
                question = f"What does def {node.name}({ast.unparse(node.args)}) do?"
                turns = (Message(role="user", content=question), Message(role=_ASSISTANT, content=answer))
                yield Conversation(turns, f"builtin:stdlib, {node.name}")


class ChatEncoder:
    """Writes conversations with a tokenizer's chat template, as tokens."""

    def __init__(self, folder: PretrainedFolder, template: str | None) -> None:
        """Read the tokenizer of a pretrained model.

        Args:
            template: file of a template to use instead of the tokenizer's own.

        Raises:
            RecipeError: there is no template.
        """
        from transformers import AutoTokenizer

        self._folder = folder
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder.path)
        if template is not None:
            self._tokenizer.chat_template = _read_template(template)
        if not self._tokenizer.chat_template:
            raise RecipeError(
                f"{folder} has no chat template: add chat_template.jinja to the folder, or name a file in "
                "data.chat.template"
            )

    @property
    def template(self) -> str:
        """The template in use."""
        return str(self._tokenizer.chat_template)

    def encode(self, chat: Conversation) -> EncodedChat:
        """Return the conversation as tokens. Raises DataError if the template does not suit it."""
        text, spans = self._render(chat)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)
        learned = np.zeros(len(starts), bool)
        for first, last in spans:
            learned |= (starts >= first) & (starts < last)
        return EncodedChat(np.array(encoded["input_ids"], np.int32), learned)

    def _render(self, chat: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the places of the turns that are learned: from after the prompt to the next turn."""
        turns = [message.model_dump(exclude={"train"}) for message in chat.messages]
        whole = self._apply(turns, chat)
        spans = []
        for number, message in enumerate(chat.messages):
            if not message.is_learned:
                continue
            before = self._apply(turns[:number], chat, prompt=message.role == _ASSISTANT) if number else ""
            after = self._apply(turns[: number + 1], chat)
            if not whole.startswith(after) or not after.startswith(before):
                raise DataError(
                    f"{chat.place}: the chat template changes earlier turns when turn {number + 1} follows, so the "
                    "place of the answer is not known: name a template without that in data.chat.template"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _apply(self, turns: Sequence[Mapping[str, Any]], chat: Conversation, prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template may raise anything, such as for a role that it does not know
            raise DataError(f"{chat.place}: the chat template refuses it: {error}") from error
        return text


def _read_template(location: str) -> str:
    try:
        text: str = to_path(location).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"data.chat.template {location!r} cannot be read ({error}): check the path") from error
    return text


def fingerprint_of(chat: Conversation) -> str:
    """Return a text that is equal for equal conversations."""
    return json.dumps([message.model_dump() for message in chat.messages], ensure_ascii=False)
