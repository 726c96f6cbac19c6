"""Comparison of a shadow's answers with those that the client got."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.data.targets import Answer
from app.published.loaded import LoadedModel
from app.serving.protocol.infer import InferResponse
from app.serving.protocol.predict import PredictResponse
from app.tasks.agreement import near, same_answer
from app.tensors import Tensors

Response = TypeVar("Response", InferResponse, PredictResponse)


def agreeing_rows(copy: Response, copied: LoadedModel, answer: Response, answering: LoadedModel) -> tuple[int, int]:
    """Return the number of rows on which two answers agree, and the number of rows. The task decides what agrees.

    Tensors that the task does not interpret are compared directly: floats within 1 % by norm, others by equality.

    Args:
        copied: the version that answered the copy.
        answering: the version that answered the client. Its answer defines the rows and outputs.
    """
    theirs = _answers(answer, answering)
    if theirs is None:
        assert isinstance(copy, InferResponse)
        assert isinstance(answer, InferResponse)
        return _agreeing_tensors(copy.outputs, answer.outputs)
    ours, targets, task = _answers(copy, copied), answering.targets, answering.task
    if ours is None or len(ours) != len(theirs):
        return 0, len(theirs)
    agree = [
        task.agrees(one, other, targets) if task and targets else same_answer(one, other)
        for one, other in zip(ours, theirs, strict=True)
    ]
    return sum(agree), len(agree)


def _answers(response: InferResponse | PredictResponse, model: LoadedModel) -> Sequence[Answer] | None:
    """Return the answer of each row. None if no tensors have a meaning, or the client did not ask for those that do."""
    if isinstance(response, PredictResponse):
        # Which stage of a cascade answered says nothing about the input.
        return [item.model_dump(exclude={"stage"}, exclude_unset=True) for item in response.predictions]
    scores = model.manifest.scores
    if model.targets is None or scores is None or scores not in response.outputs:
        return None
    scored = response.outputs[scores]
    if scored.dtype.hasobject:
        scored = _unsorted(scored, model.targets.num_outputs)
    return model.task.answer(scored, model.targets) if model.task else model.targets.decode(scored)


def _unsorted(classes: NDArray[Any], columns: int) -> NDArray[np.float32]:
    """Return scores by column from classes written as ``score:column:label``. Unrequested classes score lower."""
    rows = np.atleast_2d(classes)
    parts = [[bytes(item).split(b":", 2) for item in row] for row in rows]
    listed = np.array([[float(part[0]) for part in row] for row in parts], np.float32)
    scores = np.repeat(listed.min(axis=1, keepdims=True) - 1.0, columns, axis=1)
    np.put_along_axis(scores, np.array([[int(part[1]) for part in row] for row in parts]), listed, axis=1)
    return scores


def _agreeing_tensors(ours: Tensors, theirs: Tensors) -> tuple[int, int]:
    rows = len(next(iter(theirs.values())))
    agree = np.ones(rows, np.bool_)
    for name, right in theirs.items():
        # A missing output or a different shape counts as a difference in every row.
        if name not in ours or ours[name].shape != right.shape:
            return 0, rows
        agree &= _same_rows(ours[name].reshape(rows, -1), right.reshape(rows, -1))
    return int(agree.sum()), rows


def _same_rows(ours: NDArray[Any], theirs: NDArray[Any]) -> NDArray[np.bool_]:
    if theirs.dtype.kind == "f":
        return near(ours, theirs)
    equal: NDArray[np.bool_] = (ours == theirs).all(axis=1)
    return equal
