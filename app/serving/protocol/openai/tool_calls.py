"""Tool calls in the text of an answer, in the format of Hermes: JSON between <tool_call> and </tool_call>."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

START, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call of a function, with its arguments as JSON."""

    id: str
    name: str
    arguments: str


class ToolCallReader:
    """Separates the calls of an answer from its other text. Text that is not a valid call stays text."""

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self.count = 0
        """Calls so far."""

    def add(self, text: str) -> tuple[str, Sequence[ToolCall]]:
        """Return the text outside of calls, and the complete calls."""
        self._held += text
        content, calls = "", []
        while True:
            inside, found, rest = self._held.partition(END if self._is_inside else START)
            if not found:
                break
            self._held = rest
            if not self._is_inside:
                content += inside
            elif call := _parse(inside):
                calls.append(call)
            else:
                content += f"{START}{inside}{END}"
            self._is_inside = not self._is_inside
        if not self._is_inside:
            held = _beginning(self._held)
            content, self._held = content + self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        self.count += len(calls)
        # Models write line ends around calls.
        return ("" if self.count and content.isspace() else content), calls

    def end(self) -> str:
        """Return the text that was held back."""
        rest = f"{START}{self._held}" if self._is_inside else self._held
        self._held, self._is_inside = "", False
        return rest


def _beginning(text: str) -> int:
    """Return the length of the longest suffix of a text that may begin a call."""
    return next((length for length in range(len(START) - 1, 0, -1) if text.endswith(START[:length])), 0)


def _parse(text: str) -> ToolCall | None:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match given:
        case {"name": str(name), "arguments": dict(arguments)}:
            written = json.dumps(arguments, ensure_ascii=False)
            return ToolCall(f"call_{secrets.token_hex(12)}", name, written)
    return None
