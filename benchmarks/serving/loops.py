"""An engine alone, called in a loop: what no server around it can exceed."""

from collections.abc import Sequence
from functools import partial

from app.compile.source_model import resized
from app.tensors import Tensors
from benchmarks.compile.contenders import EngineProcess, open_file
from benchmarks.compile.models import Setting
from benchmarks.serving.models import THREADS, ServedModel

_SIZES = (1, 4, 8, 16, 32)


def best_rate(model: ServedModel, rows: Sequence[Tensors]) -> float:
    """Rows a second at the batch size that gives most, each call from arrays to arrays."""
    key = model.manifest.engine_key
    opened = partial(open_file, key.engine, model.onnx, key.precision)
    by_setting = {Setting(size): resized(rows[0], size) for size in _SIZES}
    with EngineProcess(opened, THREADS, by_setting) as engine:
        return max(1e3 * setting.batch_size / engine.latency_ms(setting, some) for setting, some in by_setting.items())
