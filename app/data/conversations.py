"""Conversations: lists of messages, and the tokens of each with those that the model learns to answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from app.data.sources.cells import Column
from app.data.tokenizer import LanguageTokenizer
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

    @property
    def is_learned(self) -> bool:
        return self.train if self.train is not None else self.role == _ASSISTANT


_TURNS = TypeAdapter(Annotated[list[Message], Field(min_length=1)])
MESSAGES = Column("a row", "messages", "nested")
"""The column of a table that has a conversation in each row."""


def read_messages(cell: str | None) -> list[Message]:
    """Return the messages of a cell. Raises DataError if they are no conversation with a turn to learn."""
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


def write_messages(messages: list[Message]) -> str:
    """Return a cell for ``read_messages``. It is the same for equal conversations."""
    return _TURNS.dump_json(messages, exclude_defaults=True).decode()


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

    def encode(self, messages: Sequence[Message]) -> EncodedChat:
        """Return a conversation as the first tokens of it. Raises DataError if the template does not suit it."""
        text, spans = self._render(messages)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens, length = encoded["input_ids"], self._max_tokens
        starts = np.array([start for start, _ in encoded["offset_mapping"][:length]], np.int64)
        learned = np.zeros(len(starts), bool)
        for first, last in spans:
            learned |= (starts >= first) & (starts < last)
        learned[:1] = False  # nothing comes before the first token
        return EncodedChat(np.array(tokens[:length], np.int32), learned, len(tokens) > length)

    def _render(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the places of the turns that are learned: from after the prompt to the next turn."""
        turns = [message.model_dump(exclude={"train"}) for message in messages]
        whole = self._apply(turns)
        spans = []
        for number, message in enumerate(messages):
            if not message.is_learned:
                continue
            before = self._apply(turns[:number], prompt=message.role == _ASSISTANT) if number else ""
            after = self._apply(turns[: number + 1]) if number + 1 < len(turns) else whole
            if not whole.startswith(after) or not after.startswith(before):
                raise DataError(
                    f"the chat template changes earlier turns when turn {number + 1} follows, so the place of the "
                    "answer is not known: name a template without that in data.chat.template"
                ).of("chat.template")
            spans.append((len(before), len(after)))
        return whole, spans

    def _apply(self, turns: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template may raise anything, such as for a role that it does not know
            raise DataError(f"the chat template refuses it: {error}").of("chat.template") from error
        return text
