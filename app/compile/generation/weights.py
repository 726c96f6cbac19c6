"""Compression of a language model's weights to 8 or 4 bits, by NNCF."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import openvino

from app.compile.generation.export import quiet
from app.errors import CompileError, first_line
from app.repository.manifest import GENERATION_FILE

_GROUPS = (32, 16, 8)
"""Possible group sizes of int4 weights that share a scale. The size must divide the rows of every matrix."""

SmallPrecision = Literal["int8", "int4"]


def compress_weights(graph: Path, folder: Path, precision: SmallPrecision) -> str:
    """Write a graph with compressed weights, and return a description of them.

    In int8, each row of a matrix has a scale. In int4, each group of weights has one, and NNCF keeps embeddings and the
    output layer in int8.

    Raises:
        CompileError: NNCF cannot compress the model, or no group divides its matrices.
    """
    import nncf  # takes seconds, and only these precisions need it

    logging.getLogger("nncf").setLevel(logging.ERROR)
    model = openvino.Core().read_model(graph)
    group = _group_of(model) if precision == "int4" else None
    mode = nncf.CompressWeightsMode.INT4_SYM if group else nncf.CompressWeightsMode.INT8_ASYM
    try:
        with quiet():
            model = nncf.compress_weights(model, mode=mode, **({"group_size": group} if group else {}))
    except Exception as error:  # the library raises any error
        raise CompileError(
            f"NNCF cannot make {precision} weights ({first_line(error)}): leave {precision} out of compile.precisions"
        ).of("generation.weights", "compile.precisions") from error
    folder.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, folder / GENERATION_FILE, compress_to_fp16=False)
    if not group:
        return "a scale for each row of a matrix"
    return f"a scale for each {group} weights; {_share_in_int8(model):.0%} of the weights are in int8, by NNCF's choice"


def _group_of(model: openvino.Model) -> int:
    sizes = {size for size in _row_sizes(model) if size > 1}
    for group in _GROUPS:
        if not any(size % group for size in sizes):
            return group
    raise CompileError(
        f"int4 needs matrices whose rows are multiples of {_GROUPS[-1]}, and the model has rows of "
        f"{', '.join(map(str, sorted(sizes)))}: leave int4 out of compile.precisions"
    ).of("generation.weights", "compile.precisions")


def _row_sizes(model: openvino.Model) -> Iterator[int]:
    """Yield the number of weights in a row of each matrix that is multiplied."""
    for operation in model.get_ops():
        if operation.get_type_name() == "MatMul":
            weight = operation.input_value(1).get_node()
            if weight.get_type_name() == "Constant":
                shape = weight.get_output_shape(0)
                yield int(shape[-1 if operation.get_attributes()["transpose_b"] else 0])


def _share_in_int8(model: openvino.Model) -> float:
    """Return the share of the compressed weights that are in int8."""
    counts = {"u8": 0, "i8": 0, "i4": 0}
    for operation in model.get_ops():
        if operation.get_type_name() == "Constant" and "zero_point" not in operation.get_friendly_name():
            kind = operation.get_element_type().get_type_name()
            if kind in counts:
                size = 1
                for length in operation.get_output_shape(0):
                    size *= int(length)
                counts[kind] += size
    return (counts["u8"] + counts["i8"]) / max(1, sum(counts.values()))
