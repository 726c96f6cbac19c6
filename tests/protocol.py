"""Tensors and bodies of the protocol: one of each datatype, with the limits of its range."""

import json
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tritonclient.http import InferenceServerClient, InferInput

from app.serving.protocol.infer import (
    InferRequest,
)
from app.serving.protocol.rest import JSON_LENGTH, read_infer
from app.serving.protocol.tensors import DATATYPES, DTYPES
from app.tensors import TensorSpec


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


SPEC = TensorSpec("x", np.dtype(np.float32), (-1, 2, -1))


def given(name: str, tensor: NDArray[Any], binary: bool = True) -> InferInput:
    asked = InferInput(name, list(tensor.shape), DATATYPES[tensor.dtype])
    return asked.set_data_from_numpy(in_client(tensor), binary_data=binary)


def sent(inputs: list[InferInput], **fields: Any) -> tuple[bytes, dict[str, str]]:
    body, length = InferenceServerClient.generate_request_body(inputs, **fields)
    return body, {} if length is None else {JSON_LENGTH: str(length)}


def asked(*tensors: dict[str, object], **fields: object) -> InferRequest:
    return read_infer(json.dumps({"inputs": tensors, **fields}).encode(), {}, "m")


def x(**changed: object) -> dict[str, object]:
    return {"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2], **changed}
