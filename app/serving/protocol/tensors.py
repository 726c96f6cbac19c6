"""Tensors on the wire: lists of elements, or little-endian bytes in row-major order. Datatypes and their numpy dtypes.

A tensor that is read from bytes is a view of them, except for BYTES. It is read-only. Over HTTP it is mostly not
aligned, because the JSON before it has any length. Copy it before writing to it, or if code needs aligned memory.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from app.errors import RequestError, RequestTooLargeError, short_repr
from app.tensors import TensorSpec

AS_BYTES = "ask for it with the parameter 'binary_data' true"
"""The remedy for an output that JSON cannot carry."""
BYTES = "BYTES"
"""The datatype of strings; in numpy an array of ``bytes`` objects."""

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
"""Datatypes without a representation in JSON and in gRPC's typed contents."""


def refuse_binary_only(name: str, datatype: str) -> None:
    """Raise RequestError if JSON cannot carry the output ``name`` of this datatype."""
    if datatype in BINARY_ONLY:
        raise RequestError(f"output {name!r} is {datatype}, which JSON does not carry: {AS_BYTES}").of(
            "output.bytes_only"
        )


def dtype_of(name: str, datatype: object) -> np.dtype[Any]:
    """Return the dtype of the input ``name``. Raises RequestError if the datatype is unknown."""
    dtype = DTYPES.get(datatype) if type(datatype) is str else None
    if dtype is None:
        raise RequestError(
            f"input {short_repr(name)} has datatype {short_repr(datatype)}: expected {', '.join(DTYPES)}"
        ).of("datatype.unknown")
    return dtype


_MAX_AXES = 64
"""numpy's limit."""

# struct.pack converts elements, and checks their types and ranges, in a single C loop.
_FORMATS = {
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}
_LENGTH = struct.Struct("<I")
"""The length before each element of BYTES."""


def check_input(name: str, datatype: object, shape: object, specs: Mapping[str, TensorSpec], max_strings: int) -> None:
    """Check an input's name, datatype and shape before reading its elements, of which there may be many.

    Args:
        specs: the model's inputs by name; empty if they are unknown.

    Raises:
        RequestTooLargeError: it has more than ``max_strings`` elements of BYTES.
        RequestError: the model has no such input, or the datatype or shape is wrong or invalid.
    """
    if specs and name not in specs:
        raise RequestError(f"input {short_repr(name)} is not known: expected {', '.join(specs)}").of("input.unknown")
    dtype = dtype_of(name, datatype)
    if specs:
        specs[name].check_dtype(dtype)
    count = _count(name, shape)
    if datatype == BYTES and count > max_strings:
        raise RequestTooLargeError(
            f"input {short_repr(name)} has {short_repr(count)} elements of BYTES: expected {max_strings} at most, "
            "send fewer rows in a request"
        )


def from_bytes(
    name: str, datatype: object, shape: object, body: bytes | memoryview, start: int, size: int
) -> NDArray[Any]:
    """Return the input in the ``size`` bytes of ``body`` from ``start`` on, as a view except for BYTES.

    The view is read-only if ``body`` is, as with HTTP and gRPC. It is as aligned as ``start``.

    Raises:
        RequestError: the bytes do not fit the datatype and shape; the input is named.
    """
    dtype, count = dtype_of(name, datatype), _count(name, shape)
    if datatype == BYTES:
        return _shaped(name, _objects(_split(name, bytes(memoryview(body)[start : start + size]), count)), shape)
    if size != count * dtype.itemsize:
        raise RequestError(
            f"input {short_repr(name)} has {size} bytes: expected {short_repr(count * dtype.itemsize)}, for "
            f"{datatype} of shape {short_repr(shape)}"
        ).of("bytes.count")
    tensor: NDArray[Any] = np.ndarray((count,), dtype, body, start)
    # numpy does not check the bytes of a bool.
    if datatype == "BOOL" and count and (largest := tensor.view(np.uint8).max()) > 1:
        raise RequestError(
            f"input {short_repr(name)} has the byte {largest}: expected 0 or 1 for each element of BOOL"
        ).of("data.type")
    return _shaped(name, tensor, shape)


def from_elements(
    name: str, datatype: object, shape: object, elements: Sequence[Any], may_have_bools: bool = True
) -> NDArray[Any]:
    """Return the input with these elements: numbers, bools or, for BYTES, ``bytes``. A bool is not a number.

    Args:
        may_have_bools: False skips the search for bools among numbers, which takes as long as reading them.

    Raises:
        RequestError: they do not fit the datatype and shape, or only bytes can carry the datatype; the input is named.
    """
    dtype, count = dtype_of(name, datatype), _count(name, shape)
    if len(elements) != count:
        raise RequestError(
            f"input {short_repr(name)} has {len(elements)} elements, its shape is {short_repr(shape)}"
        ).of("data.count")
    if datatype in BINARY_ONLY:
        raise RequestError(f"input {short_repr(name)} lists elements of {datatype}, which is carried as bytes only").of(
            "contents.bytes_only"
        )
    if datatype == BYTES:
        return _shaped(name, _objects(elements), shape)
    if datatype == "BOOL":
        _check_bools(name, elements)
        return _shaped(name, np.array(elements, dtype), shape)
    return _shaped(name, _packed(name, str(datatype), dtype, elements, may_have_bools), shape)


def to_buffer(tensor: NDArray[Any]) -> NDArray[Any]:
    """Return an array whose memory has the tensor's bytes. It is the tensor itself if contiguous and not of BYTES."""
    if not tensor.dtype.hasobject:
        return np.ascontiguousarray(tensor)
    data = b"".join(part for element in byte_strings(tensor) for part in (_LENGTH.pack(len(element)), element))
    return np.ndarray((len(data),), np.uint8, data)


def byte_strings(tensor: NDArray[Any]) -> list[bytes]:
    """Return the elements of an array of ``bytes`` or ``str`` objects, in row-major order."""
    return [element.encode() if isinstance(element, str) else element for element in tensor.ravel().tolist()]


def _count(name: str, shape: object) -> int:
    """Return the number of elements of a shape. Raises RequestError if it is not a shape."""
    if type(shape) is not list or len(shape) > _MAX_AXES:
        raise RequestError(
            f"input {short_repr(name)} has shape {short_repr(shape)}: expected a list of {_MAX_AXES} sizes at most"
        ).of("shape.invalid")
    for size in shape:
        if type(size) is not int or size < 0:
            raise RequestError(
                f"input {short_repr(name)} has shape {short_repr(shape)}: expected whole sizes from 0 on"
            ).of("shape.invalid")
    return math.prod(shape)


def _shaped(name: str, tensor: NDArray[Any], shape: Any) -> NDArray[Any]:
    try:
        return tensor.reshape(shape)
    except ValueError:  # with a size of 0, the others may exceed numpy's limits
        raise RequestError(f"input {short_repr(name)} has shape {short_repr(shape)}, which is too large").of(
            "shape.invalid"
        ) from None


def _objects(elements: Sequence[bytes]) -> NDArray[Any]:
    # ``np.array`` would make a fixed-width dtype of bytes, and strip zeros at their ends.
    tensor = np.empty(len(elements), np.object_)
    tensor[:] = elements
    return tensor


def _split(name: str, data: bytes, count: int) -> list[bytes]:
    """Return the elements of BYTES. Raises RequestError unless ``data`` has exactly ``count``."""
    elements: list[bytes] = []
    offset, size = 0, len(data)
    # ``len(elements) < count`` bounds the loop for a body of many empty strings.
    while offset + _LENGTH.size <= size and len(elements) < count:
        start = offset + _LENGTH.size
        offset = start + _LENGTH.unpack_from(data, offset)[0]
        elements.append(data[start:offset])
    if len(elements) != count or offset != size:
        raise RequestError(
            f"input {short_repr(name)} has {size} bytes: expected {short_repr(count)} elements of BYTES, "
            "after 4 bytes of length each"
        ).of("bytes.count")
    return elements


def _check_bools(name: str, elements: Sequence[object]) -> None:
    for index, element in enumerate(elements):
        if type(element) is not bool:
            raise RequestError(
                f"input {short_repr(name)} has {short_repr(element)} at {index}: expected true or false, for BOOL"
            ).of("data.type")


def _packed(
    name: str, datatype: str, dtype: np.dtype[Any], elements: Sequence[Any], may_have_bools: bool
) -> NDArray[Any]:
    """Return an array of numbers. Raises RequestError if one is of another type or out of range."""
    try:
        packed = struct.pack(f"{len(elements)}{_FORMATS[datatype]}", *elements)
    except (struct.error, OverflowError):
        raise _misfit(name, datatype, dtype, elements) from None
    tensor: NDArray[Any] = np.ndarray((len(elements),), dtype, packed)
    # With native sizes, numbers beyond the range of a C float silently become infinite. Standard sizes are slower.
    infinite = np.isinf(tensor).nonzero()[0].tolist() if datatype == "FP32" else []
    # A bool packs as 0 or 1. Without these values no type has to be checked. With them, checking all is fastest.
    may_have_bools = may_have_bools and bool(((tensor == 0) | (tensor == 1)).any())
    is_too_large = bool(infinite) and not _fit(datatype, [elements[index] for index in infinite])
    if is_too_large or (may_have_bools and _has_bools(elements)):
        raise _misfit(name, datatype, dtype, elements)
    return tensor


def _misfit(name: str, datatype: str, dtype: np.dtype[Any], elements: Sequence[object]) -> RequestError:
    """Return the error for the first element that does not fit. Bisection packs each element about once."""
    index, end = 0, len(elements)
    while end - index > 1:
        middle = (index + end) // 2
        if _fit(datatype, elements[index:middle]):
            index = middle
        else:
            end = middle
    limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    kind = "a whole number" if dtype.kind in "iu" else "a number"
    return RequestError(
        f"input {short_repr(name)} has {short_repr(elements[index])} at {index}: expected {kind} from {limits.min} to "
        f"{limits.max}, for {datatype}"
    ).of("data.type")


def _fit(datatype: str, elements: Sequence[object]) -> bool:
    try:
        # Standard sizes refuse a number beyond the range of FP32, which native sizes do not.
        struct.pack(f"<{len(elements)}{_FORMATS[datatype]}", *elements)
    except (struct.error, OverflowError):
        return False
    return not _has_bools(elements)


def _has_bools(elements: Sequence[object]) -> bool:
    return bool in set(map(type, elements))
