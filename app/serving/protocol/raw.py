"""A request that is the bytes of one tensor and nothing else.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md#raw-binary-request
"""

import math
from collections.abc import Sequence

import numpy as np

from app.errors import RequestError
from app.serving.protocol.datatypes import DATATYPES
from app.serving.protocol.tensors import from_bytes
from app.tensors import Tensors, TensorSpec


def read_raw(body: bytes | memoryview, inputs: Sequence[TensorSpec]) -> Tensors:
    """The one row that ``body`` is of the model's one input; of strings it is one, without its length.

    Raises:
        RequestError: the model has other inputs than one, or what the body's size is does not tell its shape.
    """
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs) or "none"
        raise RequestError(
            f"the body is bytes alone, for a model with one input: this one has {names}, send JSON first"
        )
    (spec,) = inputs
    if spec.dtype == np.object_:
        tensor = np.empty([1] * len(spec.shape), np.object_)
        tensor[...] = bytes(body)
        return {spec.name: tensor}
    return {spec.name: from_bytes(spec.name, DATATYPES[spec.dtype], _shape(spec, len(body)), body, 0, len(body))}


def _shape(spec: TensorSpec, size: int) -> list[int]:
    """Of one row: the first size that varies is the batch's, and the bytes tell one more."""
    shape = [1 if axis == 0 and length == -1 else length for axis, length in enumerate(spec.shape)]
    if (unknown := shape.count(-1)) > 1:
        raise RequestError(
            f"input {spec.name!r} has {unknown} sizes beside its batch that vary: send JSON with its shape"
        )
    known = math.prod(length for length in shape if length != -1) * spec.dtype.itemsize
    return [size // known if length == -1 else length for length in shape]
