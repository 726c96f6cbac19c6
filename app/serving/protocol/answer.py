"""The answer to a request: the outputs that it asks for, and classes in their place where it asks for those.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import RequestError
from app.serving.protocol.datatypes import DATATYPES
from app.serving.protocol.infer import InferRequest, InferResponse, Parameter
from app.serving.protocol.wording import shown
from app.tensors import Tensors

_UNORDERED = frozenset({"BOOL", "BYTES"})


def check_outputs(request: InferRequest, names: Collection[str]) -> None:
    """Raises RequestError if the client asks for an output that the model has not."""
    for output in request.outputs:
        if output.name not in names:
            raise RequestError(f"output {shown(output.name)} is not known: expected {', '.join(names)}")


def answer(
    request: InferRequest,
    version: str,
    outputs: Tensors,
    labels: Mapping[str, Sequence[str]] | None = None,
    parameters: Mapping[str, Parameter] | None = None,
) -> InferResponse:
    """What the client gets of what the model gave.

    Args:
        labels: of the classes of an output, by its name.

    Raises:
        RequestError: an output is not known, or cannot be put in order to classify it.
    """
    check_outputs(request, outputs)
    chosen: dict[str, NDArray[Any]] = dict(outputs) if not request.outputs else {}
    for wanted in request.outputs:
        tensor = outputs[wanted.name]
        if wanted.classification:
            tensor = _classes(wanted.name, tensor, wanted.classification, (labels or {}).get(wanted.name, ()))
        chosen[wanted.name] = tensor
    return InferResponse(request.model, version, request.id, chosen, parameters or {})


def _classes(name: str, scores: NDArray[Any], count: int, labels: Sequence[str]) -> NDArray[Any]:
    """The highest scores of each row as ``score:index:label``, of shape (rows, count); the first of equal ones first.

    The first of two axes or more counts rows. A tensor of one axis is a row, and gives the shape (count,).
    """
    if (datatype := DATATYPES[scores.dtype]) in _UNORDERED:
        raise RequestError(f"output {name!r} is {datatype}, which has no order: leave its classification out")
    rows = np.atleast_2d(scores)
    rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    # Of scores in reverse, since a stable sort in ascending order has the last of equals last.
    order = rows.shape[1] - 1 - np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :count]
    words = np.empty(order.shape, np.object_)
    for row, place in np.ndindex(order.shape):
        index = int(order[row, place])
        label = f":{labels[index]}" if index < len(labels) else ""
        words[row, place] = f"{rows[row, index]!s}:{index}{label}".encode()
    return words if scores.ndim > 1 else words[0]
