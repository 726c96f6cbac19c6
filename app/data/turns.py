"""Turns of a conversation in the form that chat templates expect, for training and the endpoint."""

from collections.abc import Mapping
from typing import Any

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a turn may have its reasoning. Templates read the first or the second."""


def with_reasoning(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn without null values, with its reasoning under both keys that templates read."""
    # Templates would write None as text. They expect the key to be missing.
    given = {key: value for key, value in turn.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING_KEYS if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, _REASONING_KEYS[0]: reasoning}
