"""An engine alone, called in a loop: what no server around it can exceed."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

from app.compile.source import resized
from app.tensors import Tensors
from benchmarks.compile.contenders import EngineProcess, open_file
from benchmarks.compile.models import Setting
from benchmarks.serving.models import THREADS, ServedModel, length_of

_SIZES = (1, 4, 8, 16, 32)


def best_rate(model: ServedModel, rows: Sequence[Tensors]) -> float:
    """Return rows a second, from arrays to arrays, with the batch size that gives most at each length."""
    key = model.manifest.engine_key
    opened = partial(open_file, key.engine, model.onnx, key.precision)
    lengths = Counter(length_of(row) for row in rows)
    by_length = {length_of(row): row for row in rows}
    settings = {Setting(size, length): resized(row, size) for length, row in by_length.items() for size in _SIZES}
    with EngineProcess(opened, THREADS, settings) as engine:
        row_ms = {at: engine.latency_ms(at, batch) / at.batch_size for at, batch in settings.items()}
    best_ms = {length: min(ms for at, ms in row_ms.items() if at.length == length) for length in lengths}
    return 1e3 * lengths.total() / sum(count * best_ms[length] for length, count in lengths.items())
