"""Comparison of two answers of ``predict``."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from app.data.targets import Answer

_NEAR = 0.01
"""Maximum difference of two numbers or vectors, as a share of the second."""
_SCORES = "scores"
"""The reserved key of an answer that says how sure the model is."""


def same_answer(ours: Answer, theirs: Answer, unit: float = 0.0) -> bool:
    """Return whether two answers agree, however sure the models are.

    Numbers and vectors may differ by 1 %, or by 1 % of ``unit`` if that is more.
    """
    return _same(_without_scores(ours), _without_scores(theirs), unit)


def near(ours: ArrayLike, theirs: ArrayLike, unit: float = 0.0) -> NDArray[np.bool_]:
    """Return whether vectors along the last axis are near each other, for each pair."""
    right = np.asarray(theirs, np.float64)
    # By norm and not by element: elements near 0 can differ relatively even between good answers.
    differences = np.linalg.norm(np.asarray(ours, np.float64) - right, axis=-1)
    found: NDArray[np.bool_] = differences <= _NEAR * np.maximum(np.linalg.norm(right, axis=-1), unit)
    return found


def _without_scores(answer: Answer) -> Answer:
    # If an answer has only scores, compare them.
    return {key: value for key, value in answer.items() if key != _SCORES} or answer


def _same(ours: Any, theirs: Any, unit: float) -> bool:
    """Compare two JSON values."""
    match ours, theirs:
        case Mapping(), Mapping():
            return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key], unit) for key in theirs)
        case list(), list() if all(isinstance(item, int | float) for item in (*ours, *theirs)):
            return len(ours) == len(theirs) and bool(near(ours, theirs, unit))
        case list(), list():
            return len(ours) == len(theirs) and all(map(_same, ours, theirs, [unit] * len(ours)))
        case (int() | float(), float()) | (float(), int()):
            return bool(near([ours], [theirs], unit))
        case _:
            return bool(ours == theirs)
