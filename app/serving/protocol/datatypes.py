"""The protocol's datatypes and numpy's."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from app.errors import RequestError
from app.serving.protocol.wording import AS_BYTES, shown

BYTES = "BYTES"
"""Elements of any length; in numpy an array of ``bytes`` objects."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    BYTES: np.dtype(np.object_),
}
DATATYPES: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}

BINARY_ONLY = frozenset({"FP16", "BF16"})
"""They have no form in JSON, and none in gRPC's typed contents."""


def refuse_binary_only(name: str, datatype: str) -> None:
    """Raises RequestError if JSON cannot carry the output ``name`` of this datatype."""
    if datatype in BINARY_ONLY:
        raise RequestError(f"output {name!r} is {datatype}, which JSON does not carry: {AS_BYTES}")


def dtype_of(name: str, datatype: object) -> np.dtype[Any]:
    """Of the input ``name``. Raises RequestError."""
    dtype = DTYPES.get(datatype) if type(datatype) is str else None
    if dtype is None:
        raise RequestError(f"input {shown(name)} has datatype {shown(datatype)}: expected {', '.join(DTYPES)}")
    return dtype
