"""Comparison of two answers of ``predict``."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from app.data.targets import Answer

_NEAR = 0.01
"""Maximum difference of two numbers or vectors, as a share of the second."""
SCORES = ("scores",)
"""The key of an answer that says how sure the model is."""


def same_answer(ours: Answer, theirs: Answer, unit: float = 0.0, ignored: Collection[str] = SCORES) -> bool:
    """Return whether two answers agree.

    Numbers and vectors may differ by 1 %, or by 1 % of ``unit`` if that is more. Keys in ``ignored`` count only where
    an answer, or an object in it, has no others.
    """

    def same(left: Any, right: Any) -> bool:
        match left, right:
            case Mapping(), Mapping():
                left, right = counted(left), counted(right)
                return left.keys() == right.keys() and all(same(left[key], right[key]) for key in right)
            case list(), list() if all(isinstance(item, int | float) for item in (*left, *right)):
                return len(left) == len(right) and bool(near(left, right, unit))
            case list(), list():
                return len(left) == len(right) and all(map(same, left, right))
            case (int() | float(), float()) | (float(), int()):
                return bool(near([left], [right], unit))
            case _:
                return bool(left == right)

    def counted(answer: Mapping[str, Any]) -> Mapping[str, Any]:
        return {key: value for key, value in answer.items() if key not in ignored} or answer

    return same(ours, theirs)


def near(ours: ArrayLike, theirs: ArrayLike, unit: float = 0.0) -> NDArray[np.bool_]:
    """Return whether vectors along the last axis are near each other, for each pair."""
    right = np.asarray(theirs, np.float64)
    # By norm and not by element: elements near 0 can differ relatively even between good answers.
    differences = np.linalg.norm(np.asarray(ours, np.float64) - right, axis=-1)
    found: NDArray[np.bool_] = differences <= _NEAR * np.maximum(np.linalg.norm(right, axis=-1), unit)
    return found
