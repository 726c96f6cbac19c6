"""How much each layer's int8 changes the answers."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from app.compile.quantization.qdq import INT8, write_quantized
from app.compile.quantization.scheme import Layer
from app.engines.onnxruntime import open_oracle
from app.tensors import OUTPUT, Tensors

_ROWS = 16


def most_sensitive_first(
    source: Path, layers: Sequence[Layer], thresholds: Mapping[str, float], samples: Tensors
) -> list[Layer]:
    """The layers, by the mean square error of the logits when one alone is quantised.

    Errors of layers add up nearly, since each is small; so those in front are the ones to leave in float. A few rows
    are enough to rank by.
    """
    samples = {name: array[:_ROWS] for name, array in samples.items()}
    expected = _logits(source, samples)
    with TemporaryDirectory(prefix="rayloom-") as folder:
        one = Path(folder) / "one.onnx"

        def error(layer: Layer) -> float:
            write_quantized(source, [layer], thresholds, INT8, one)
            return float(np.square(_logits(one, samples) - expected).mean())

        return sorted(layers, key=error, reverse=True)


def _logits(path: Path, samples: Tensors) -> NDArray[np.float32]:
    with closing(open_oracle(path)) as engine:
        return engine.infer(samples)[OUTPUT]
