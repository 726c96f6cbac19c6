"""A tensor of every datatype of the protocol, with what lies at the ends of its range."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from app.serving.protocol.tensors import DTYPES


def _example(datatype: str) -> NDArray[Any]:
    dtype = DTYPES[datatype]
    if datatype == "BOOL":
        return np.array([[True, False, True]])
    if datatype == "BYTES":
        return np.array([["文字".encode(), b"", b"a\0\n\0"]], np.object_)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else ml_dtypes.finfo(dtype)
    return np.array([[limits.min, 1, limits.max]], dtype)


EXAMPLES = {datatype: _example(datatype) for datatype in DTYPES}


def in_client(tensor: NDArray[Any]) -> NDArray[Any]:
    """As Triton's client has it, which knows no bfloat16 and takes float32 in its place."""
    return tensor.astype(np.float32) if tensor.dtype == ml_dtypes.bfloat16 else tensor
