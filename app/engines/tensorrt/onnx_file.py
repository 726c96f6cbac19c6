"""Which ONNX file a plan came from."""

from pathlib import Path

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from app.checksums import checksums_of, sha256_of


def sha256_of_onnx(path: Path) -> str:
    """The sha256 of an ONNX file; where it keeps weights in files beside it, of the sums of all of them."""
    model = onnx.load(path, load_external_data=False)
    tensors = [tensor for tensor in model.graph.initializer if uses_external_data(tensor)]
    files = {path, *(path.parent / ExternalDataInfo(tensor).location for tensor in tensors)}
    sums = checksums_of(files)
    return sums[path.name] if len(files) == 1 else sha256_of("".join(sums.values()).encode())
