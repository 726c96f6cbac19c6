"""Turns of a conversation, as chat templates read them, in training and behind an endpoint."""

from collections.abc import Mapping
from typing import Any

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a turn's reasoning. Templates read the first one or the second."""


def with_reasoning(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn without null, with its reasoning under the keys that templates read."""
    # Templates would write None as text. They expect the key to be missing.
    given = {key: value for key, value in turn.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING_KEYS if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, _REASONING_KEYS[0]: reasoning}
