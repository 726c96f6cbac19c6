"""Find how to quantise a model: the calibration that holds the gates, with layers in float where that takes some."""

import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from app.compile.quantization.observe import observe
from app.compile.quantization.qdq import FP8, INT8, write_quantized
from app.compile.quantization.ranges import Histogram, threshold
from app.compile.quantization.scheme import Layer, find_layers, load_model
from app.compile.quantization.sensitivity import most_sensitive_first
from app.compile.quantization.smoothing import STRENGTH, smooth
from app.config import CalibrationConfig, CalibrationMethod
from app.errors import CompileError
from app.repository.manifest import Quantization
from app.tensors import Tensors

_AUTO: tuple[CalibrationMethod, ...] = ("percentile", "minmax", "entropy")
"""What ``auto`` tries, most promising first: it clips the rarest values alone, then none, then more."""

_FEWEST_ROWS = 16
"""Of samples; a recipe cannot ask for fewer, but a training split may have fewer."""


@dataclass(frozen=True)
class Verdict:
    """What a judge says of a quantised file.

    ``loss`` is how far it is from PyTorch, and ranks files that failed; infinite of one that an engine cannot run.
    """

    failures: tuple[str, ...]
    """A sentence for each gate that it does not hold, or why it cannot be run."""

    loss: float

    @property
    def passed(self) -> bool:
        """Whether every gate holds."""
        return not self.failures

    def __str__(self) -> str:
        reasons = f" ({'; '.join(self.failures)})" if self.failures else ""
        return f"{'passes' if self.passed else 'fails'}, {self.loss:.4g} from PyTorch{reasons}"


JudgeFile = Callable[[Path], Verdict]


def find_quantization(
    source: Path,
    samples: Iterable[Tensors],
    config: CalibrationConfig,
    judge: JudgeFile,
    target: Path,
    tell: Callable[[str], None],
) -> Quantization:
    """Write ``source`` in int8 to ``target``, such that it passes; if no try does, the one that came closest.

    The calibrations are tried in turn. If none passes with all layers in int8, the layers that hurt most are left in
    float, half of all at most, with the calibration that came closest; and if that passes too, their weights in int8.

    Args:
        source: in float32, as ``export_onnx`` writes it.
        samples: batches of inputs of the training split; iterated several times.
        judge: compares a file with PyTorch; each call may take a while, so there are few.
        tell: takes a line on each try.

    Raises:
        CompileError: too few samples, a model with nothing to quantise, or a value that is not finite or always 0;
            nothing is at ``target`` then.
    """
    with _prepared(source, samples, target) as prepared:
        search = _Search(prepared, judge, tell)
        methods = _AUTO if config.method == "auto" else (config.method,)
        attempt = search.by_method(methods) or search.by_exemption(next(iter(samples)))
        attempt.write(prepared.file.with_name("passed.onnx")).replace(target)
    return Quantization(
        method=attempt.method,
        smoothing=prepared.smoothing,
        exempt=tuple(layer.name for layer in attempt.exempt),
        weights_only=attempt.weights_only,
    )


def quantize_fp8(source: Path, samples: Iterable[Tensors], target: Path) -> Quantization:
    """Write ``source`` in float8 (e4m3) for TensorRT, with every range up to the largest value that was seen.

    Clipping gains nothing there: small values have as many bits of mantissa as large ones.

    Raises:
        CompileError: as ``find_quantization``.
    """
    with _prepared(source, samples, target) as prepared:
        whole = prepared.file.with_name("whole.onnx")
        write_quantized(prepared.file, prepared.layers, prepared.thresholds("minmax"), FP8, whole)
        whole.replace(target)
    return Quantization(method="minmax", smoothing=prepared.smoothing, exempt=())


@dataclass(frozen=True)
class _Prepared:
    """A model in float, smoothed where that can be, in a folder of its own; and what was seen of it."""

    file: Path
    layers: tuple[Layer, ...]
    histograms: Mapping[str, Histogram]
    smoothing: float

    def thresholds(self, method: CalibrationMethod) -> dict[str, float]:
        """By name of each value that is quantised."""
        return {name: threshold(histogram, method) for name, histogram in self.histograms.items()}


@contextmanager
def _prepared(source: Path, samples: Iterable[Tensors], target: Path) -> Iterator[_Prepared]:
    """What is quantised; its folder lies beside ``target``, so that a file moves there in one step."""
    _check_samples(samples)
    if not find_layers(load_model(source)):
        raise CompileError(
            f"{str(source)!r} has no Conv, Gemm or MatMul with constant weights, so nothing to quantise: leave int8 "
            "and fp8 out of compile.precisions"
        )
    with TemporaryDirectory(prefix=".quantization-", dir=target.parent) as folder:
        smoothed = Path(folder) / "smoothed.onnx"
        smoothing = STRENGTH if smooth(source, samples, smoothed) else 0.0
        file = smoothed if smoothing else Path(shutil.copy(source, Path(folder) / "float.onnx"))
        layers = tuple(find_layers(load_model(file)))
        yield _Prepared(file, layers, observe(file, layers, samples), smoothing)


def _check_samples(samples: Iterable[Tensors]) -> None:
    rows = 0
    for batch in samples:  # iterating encodes a batch, so stop early
        rows += len(next(iter(batch.values())))
        if rows >= _FEWEST_ROWS:
            return
    raise CompileError(
        f"{rows} samples are too few to find int8's ranges: expected {_FEWEST_ROWS} or more; see "
        "compile.calibration.samples, and the size of the training split"
    )


@dataclass(frozen=True)
class _Attempt:
    """One way to quantise what was prepared."""

    prepared: _Prepared
    method: CalibrationMethod
    thresholds: Mapping[str, float]
    exempt: tuple[Layer, ...] = ()
    weights_only: bool = False
    """Whether the weights of exempt layers are in int8 all the same: they are most of a file."""

    def __str__(self) -> str:
        left = f", {len(self.exempt)} of {len(self.prepared.layers)} layers in float" if self.exempt else ""
        return f"{self.method}{left}{' but for weights' if self.weights_only else ''}"

    def write(self, target: Path) -> Path:
        layers = [layer for layer in self.prepared.layers if layer not in self.exempt]
        if self.weights_only:
            layers += [replace(layer, activations=()) for layer in self.exempt if layer.activations]
        write_quantized(self.prepared.file, layers, self.thresholds, INT8, target)
        return target


class _Search:
    """Tries attempts, and keeps the one that came closest."""

    def __init__(self, prepared: _Prepared, judge: JudgeFile, tell: Callable[[str], None]) -> None:
        self._prepared = prepared
        self._judge = judge
        self._tell = tell
        self._verdicts: list[tuple[_Attempt, Verdict]] = []

    def by_method(self, methods: Sequence[CalibrationMethod]) -> _Attempt | None:
        """The first calibration that passes with every layer in int8."""
        attempts = (_Attempt(self._prepared, method, self._prepared.thresholds(method)) for method in methods)
        return next((attempt for attempt in attempts if self._passes(attempt)), None)

    def by_exemption(self, samples: Tensors) -> _Attempt:
        """The closest calibration with the first layers of one ranking in float, as few of them as pass.

        Their number doubles until it passes, and is then found by bisection: other layers may be fewer. If it does not
        pass with half of all, the closest attempt.
        """
        closest, _ = self._closest
        self._tell(f"int8: no calibration passes with every layer in int8; {closest} came closest: ranking its layers")
        ranked = most_sensitive_first(self._prepared.file, self._prepared.layers, closest.thresholds, samples)
        most = len(ranked) // 2

        def exempting(count: int) -> _Attempt:
            return replace(closest, exempt=tuple(ranked[:count]))

        failed, count = 0, 1
        while count <= most and not self._passes(exempting(count)):
            failed, count = count, max(min(2 * count, most), count + 1)
        if count > most:
            attempt, _ = self._closest
            self._tell(
                f"int8 fails the gates after {len(self._verdicts)} tries, the last with {most} of {len(ranked)} layers "
                f"in float; the closest, {attempt}, is kept out: allow more in compile.gates, give more or better "
                "samples (compile.calibration.samples), or leave int8 out of compile.precisions"
            )
            return attempt
        fewest = bisect_left(range(count), True, lo=failed + 1, key=lambda fewer: self._passes(exempting(fewer)))
        lightest = replace(exempting(fewest), weights_only=True)
        has_weights = any(layer.activations for layer in lightest.exempt)  # a table that is exempt stays in float
        return lightest if has_weights and self._passes(lightest) else exempting(fewest)

    @property
    def _closest(self) -> tuple[_Attempt, Verdict]:
        return min(self._verdicts, key=lambda each: each[1].loss)

    def _passes(self, attempt: _Attempt) -> bool:
        verdict = self._judge(attempt.write(self._prepared.file.with_name("attempt.onnx")))
        self._verdicts.append((attempt, verdict))
        self._tell(f"int8, {attempt}: {verdict}")
        return verdict.passed
