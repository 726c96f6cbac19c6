"""The answer to a request: the outputs that it asks for, and classes in their place where it asks for those.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import RequestError
from app.serving.protocol.datatypes import BYTES, DATATYPES, refuse_binary_only
from app.serving.protocol.infer import InferRequest, InferResponse, Parameter
from app.serving.protocol.wording import shown
from app.tensors import Tensors, TensorSpec

_UNORDERED = frozenset({"BOOL", BYTES})
_MOST_CLASSIFIED = 1_000_000
"""Elements of an output, as in Triton."""


def check_outputs(request: InferRequest, specs: Sequence[TensorSpec]) -> None:
    """Refuse before the model runs what is asked of its outputs in vain.

    Args:
        specs: of the model's outputs.

    Raises:
        RequestError: an output is not known, cannot be put in order to classify it, or is wanted as JSON, which does
            not carry it; it is named.
    """
    datatypes = {spec.name: DATATYPES[spec.dtype] for spec in specs}
    tensors = dict(datatypes) if not request.outputs else {}
    for wanted in request.outputs:
        if (datatype := datatypes.get(wanted.name)) is None:
            raise RequestError(f"output {shown(wanted.name)} is not known: expected {', '.join(datatypes)}")
        if not wanted.classification:
            tensors[wanted.name] = datatype
        elif datatype in _UNORDERED:
            raise RequestError(
                f"output {wanted.name!r} is {datatype}, which has no order: leave its classification out"
            )
    for name, datatype in tensors.items():
        if not request.wants_bytes(name):
            refuse_binary_only(name, datatype)


def answer(
    request: InferRequest,
    version: str,
    outputs: Tensors,
    labels: Mapping[str, Sequence[str]] | None = None,
    parameters: Mapping[str, Parameter] | None = None,
) -> InferResponse:
    """What the client gets of what the model gave.

    Args:
        request: one that ``check_outputs`` takes.
        labels: of the classes of an output, by its name.

    Raises:
        RequestError: an output is too large to classify it; it is named.
    """
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
    if scores.size > _MOST_CLASSIFIED:
        raise RequestError(
            f"output {name!r} has {scores.size} elements: expected {_MOST_CLASSIFIED} at most to classify it, send "
            "fewer rows in a request"
        )
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
