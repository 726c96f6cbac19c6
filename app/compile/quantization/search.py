"""Find how to quantize a model: the calibration that passes the gates, and the layers that have to stay in float."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from app.compile.quantization.finetune import Finetune, roundings_of
from app.compile.quantization.observe import observe, values_of, with_range
from app.compile.quantization.qdq import FP8, int8, write_quantized
from app.compile.quantization.ranges import Histogram, threshold
from app.compile.quantization.scheme import Layer, find_layers, fold_weights, load_model
from app.compile.quantization.smoothing import STRENGTH, Factors, find_factors, smooth
from app.config import MAX_SHARD_MB, CalibrationConfig, CalibrationMethod
from app.engines.onnxruntime import open_oracle
from app.errors import CompileError
from app.repository.manifest import Quantization
from app.tasks.judgement import spread
from app.tensors import Tensors, slice_rows

_AUTO: tuple[CalibrationMethod, ...] = ("percentile", "minmax", "entropy")
"""The methods that ``auto`` tries, most promising first: clip only the rarest values, then none, then more."""

_MIN_ROWS = 16
"""Minimum number of samples. Recipes cannot ask for fewer, but a training split may have fewer."""

_RANKING_ROWS, _RANKING_BATCHES = 16, 4
"""Number of samples by which layers are ranked, and of the batches that they are from."""


@dataclass(frozen=True)
class Verdict:
    """The evaluation of a quantized file."""

    failures: tuple[str, ...]
    """A sentence for each failed gate, or the reason why the file cannot run."""

    loss: float
    """Distance from PyTorch, by which failed files are ranked. Infinite if an engine cannot run the file."""

    @property
    def passed(self) -> bool:
        """Whether the file passes every gate."""
        return not self.failures

    def __str__(self) -> str:
        reasons = f" ({'; '.join(self.failures)})" if self.failures else ""
        return f"{'passes' if self.passed else 'fails'}, {self.loss:.4g} from PyTorch{reasons}"


EvaluateFile = Callable[[Path], Verdict]


def find_quantization(
    source: Path,
    samples: Iterable[Tensors],
    config: CalibrationConfig,
    evaluate: EvaluateFile,
    target: Path,
    log: Callable[[str], None],
    finetune: Finetune | None = None,
    shard_mb: int = MAX_SHARD_MB,
) -> Quantization:
    """Write ``source`` in int8 to ``target``: an attempt that passes, or if none does, the closest one.

    The calibration methods are tried in turn. If none passes with all layers in int8, the closest one is fine-tuned, if
    ``finetune`` is given. If that does not pass either, the most sensitive layers stay in float with the closest
    attempt, at most half of all layers. If this also passes with their weights in int8, these are quantized.

    Args:
        source: a float32 file, as ``export_onnx`` writes it.
        samples: batches of inputs of the training split. They are iterated several times.
        evaluate: compares a file with PyTorch. Calls may be slow, so there are few.
        log: called with a line for each attempt.
        finetune: writes the float model trained with the rounding of an attempt.
        shard_mb: the weights above which they are in shards beside ``target``.

    Raises:
        CompileError: there are too few samples, the model has nothing to quantize, a value is not finite, or all are
            always 0. Then there is no file at ``target``.
    """
    with _prepared(source, samples, target, log, shard_mb) as prepared:
        search = _Search(prepared, evaluate, log)
        # In this order, because only the last step gives up layers in int8.
        methods = _AUTO if config.method == "auto" else (config.method,)
        attempt = (
            search.by_method(methods)
            or (search.by_finetuning(finetune) if finetune else None)
            or search.by_exemption(_ranking_rows(samples))
        )
        attempt.write(target)
    return Quantization(
        method=attempt.method,
        smoothing=prepared.smoothing,
        exempt=tuple(layer.name for layer in attempt.exempt),
        weights_only=attempt.weights_only,
        finetuned=attempt.is_finetuned,
    )


def quantize_fp8(
    source: Path,
    samples: Iterable[Tensors],
    target: Path,
    log: Callable[[str], None],
    shard_mb: int = MAX_SHARD_MB,
) -> Quantization:
    """Write ``source`` in float8 (e4m3) for TensorRT, without clipping.

    Clipping gains nothing in a floating-point type: small values have as many bits of mantissa as large ones.

    Raises:
        CompileError: as for ``find_quantization``.
    """
    with _prepared(source, samples, target, log, shard_mb) as prepared:
        write_quantized(prepared.file, prepared.layers, prepared.thresholds("minmax"), FP8, target, shard_mb)
    return Quantization(method="minmax", smoothing=prepared.smoothing, exempt=())


@dataclass(frozen=True)
class _Prepared:
    """A float model in a temporary folder, smoothed if possible, and the histograms of its values."""

    file: Path
    layers: tuple[Layer, ...]
    histograms: Mapping[str, Histogram]
    factors: Factors
    """Of smoothing."""
    shard_mb: int
    """The weights above which a file has them in shards."""

    @property
    def smoothing(self) -> float:
        """The degree of smoothing; 0 if there is nothing to smooth."""
        return STRENGTH if self.factors else 0.0

    def thresholds(self, method: CalibrationMethod) -> dict[str, float]:
        """Return the clipping threshold of each quantized value, by name."""
        return {name: threshold(histogram, method) for name, histogram in self.histograms.items()}


@contextmanager
def _prepared(
    source: Path, samples: Iterable[Tensors], target: Path, log: Callable[[str], None], shard_mb: int
) -> Iterator[_Prepared]:
    """Smooth and observe the model, in a folder beside ``target``. All files there share their shards."""
    _check_samples(samples)
    with TemporaryDirectory(prefix=".quantization-", dir=target.parent) as folder:
        file, folded = Path(folder) / "float.onnx", Path(folder) / "folded.onnx"
        fold_weights(source, folded, shard_mb)
        if not find_layers(load_model(folded)):
            raise CompileError(
                "the model has no Conv, Gemm or MatMul with constant weights in float32, so nothing can be quantized: "
                "leave int8 and fp8 out of compile.precisions"
            ).of("layers.none", "compile.precisions")
        factors = find_factors(folded, samples)
        smooth(folded, factors, file, shard_mb)
        # Smoothing renames weights, so the layers are found anew.
        layers = tuple(find_layers(load_model(file)))
        histograms = observe(file, layers, samples)
        alive = with_range(file, layers, histograms)
        if lost := [layer.name for layer in layers if layer not in alive]:
            log(
                f"{len(lost)} of {len(layers)} layers stay in float, {_shortened(lost)}: their inputs are 0 in all "
                "calibration samples"
            )
        yield _Prepared(file, alive, histograms, factors, shard_mb)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _check_samples(samples: Iterable[Tensors]) -> None:
    rows = 0
    for batch in samples:  # stop early, because each iteration encodes a batch
        rows += len(next(iter(batch.values())))
        if rows >= _MIN_ROWS:
            return
    raise CompileError(
        f"{rows} samples are too few to find int8's ranges: expected {_MIN_ROWS} or more; see "
        "compile.calibration.samples, and the size of the training split"
    ).of("calibration.too_few", "compile.calibration.samples")


@dataclass(frozen=True)
class _Attempt:
    """One way to quantize the prepared model."""

    prepared: _Prepared
    method: CalibrationMethod
    thresholds: Mapping[str, float]
    is_finetuned: bool = False
    exempt: tuple[Layer, ...] = ()
    weights_only: bool = False
    """Whether exempt layers still have int8 weights, which are most of a file's size."""

    def __str__(self) -> str:
        trained = ", fine-tuned" if self.is_finetuned else ""
        left = f", {len(self.exempt)} of {len(self.prepared.layers)} layers in float" if self.exempt else ""
        return f"{self.method}{trained}{left}{' except for weights' if self.weights_only else ''}"

    def finetuned(self, finetune: Finetune) -> "_Attempt":
        """Train with the rounding of this attempt, and return one with the trained weights and the same scales."""
        before, smoothed = self.prepared, self.prepared.file.with_name("finetuned.onnx")
        trained, folded = smoothed.with_name("trained.onnx"), smoothed.with_name("trained_folded.onnx")
        finetune(roundings_of(before.file, before.layers, self.thresholds), trained)
        fold_weights(trained, folded, before.shard_mb)
        # Training began from the unsmoothed model, and the thresholds are those of the smoothed one.
        smooth(folded, before.factors, smoothed, before.shard_mb)
        pairs = zip(find_layers(load_model(before.file)), find_layers(load_model(smoothed)), strict=True)
        layers = tuple(new for old, new in pairs if old in before.layers)
        # Another export of the model has other names in the same order.
        names = [list(values_of(file, found)) for file, found in ((before.file, before.layers), (smoothed, layers))]
        thresholds = {new: self.thresholds[old] for old, new in zip(*names, strict=True)}
        return replace(
            self, prepared=replace(before, file=smoothed, layers=layers), thresholds=thresholds, is_finetuned=True
        )

    def write(self, target: Path) -> Path:
        layers = [layer for layer in self.prepared.layers if layer not in self.exempt]
        if self.weights_only:
            # Without activations a layer computes in float, and its weights alone are stored in int8.
            layers += [replace(layer, activations=()) for layer in self.exempt if layer.activations]
        write_quantized(self.prepared.file, layers, self.thresholds, int8(), target, self.prepared.shard_mb)
        return target


class _Search:
    """Evaluates attempts, and remembers the closest one."""

    def __init__(self, prepared: _Prepared, evaluate: EvaluateFile, log: Callable[[str], None]) -> None:
        self._prepared = prepared
        self._evaluate = evaluate
        self._log = log
        self._verdicts: list[tuple[_Attempt, Verdict]] = []

    def by_method(self, methods: Sequence[CalibrationMethod]) -> _Attempt | None:
        """Return the first method that passes with every layer in int8; None if there is none."""
        attempts = (_Attempt(self._prepared, method, self._prepared.thresholds(method)) for method in methods)
        return next((attempt for attempt in attempts if self._passes(attempt)), None)

    def by_finetuning(self, finetune: Finetune) -> _Attempt | None:
        """Train the closest attempt with its own rounding. Return it with the trained weights, or None if it fails."""
        closest, _ = self._closest
        attempt = closest.finetuned(finetune)
        return attempt if self._passes(attempt) else None

    def by_exemption(self, samples: Sequence[Tensors]) -> _Attempt:
        """Return the closest method with as few of the most sensitive layers in float as pass.

        Double their number until the file passes, then bisect. This finds the fewest layers of one ranking. If half of
        all layers are not enough, return the closest attempt.
        """
        closest, _ = self._closest
        self._log(f"int8: no calibration passes with every layer in int8; ranking the layers of the closest, {closest}")
        prepared = closest.prepared
        ranked = _most_sensitive_first(prepared.file, prepared.layers, closest.thresholds, samples)
        max_exempt = len(ranked) // 2

        def exempting(count: int) -> _Attempt:
            return replace(closest, exempt=tuple(ranked[:count]))

        failed, count = 0, 1
        while count <= max_exempt and not self._passes(exempting(count)):
            # The last number to try is ``max_exempt`` itself. One more ends the loop.
            failed, count = count, max(min(2 * count, max_exempt), count + 1)
        if count > max_exempt:
            attempt, _ = self._closest
            self._log(
                f"int8 fails the gates after {len(self._verdicts)} attempts, the last with {max_exempt} of "
                f"{len(ranked)} layers in float; the closest, {attempt}, is not published: allow more in "
                "compile.gates, give more or better samples (compile.calibration.samples), or leave int8 out of "
                "compile.precisions"
            )
            return attempt
        count = bisect_left(range(count), True, lo=failed + 1, key=lambda fewer: self._passes(exempting(fewer)))
        smallest = replace(exempting(count), weights_only=True)
        # An exempt embedding table stays in float.
        has_weights = any(layer.activations for layer in smallest.exempt)
        return smallest if has_weights and self._passes(smallest) else exempting(count)

    @property
    def _closest(self) -> tuple[_Attempt, Verdict]:
        return min(self._verdicts, key=lambda evaluated: evaluated[1].loss)

    def _passes(self, attempt: _Attempt) -> bool:
        verdict = self._evaluate(attempt.write(self._prepared.file.with_name("attempt.onnx")))
        self._verdicts.append((attempt, verdict))
        self._log(f"int8, {attempt}: {verdict}")
        return verdict.passed


def _ranking_rows(samples: Iterable[Tensors]) -> list[Tensors]:
    """Return a few rows of several lengths, by which layers are ranked. Batches are sorted by length."""
    available = sum(1 for _ in samples)
    places = set(spread(available, _RANKING_BATCHES))
    rows = -(-_RANKING_ROWS // len(places))
    return [slice_rows(batch, 0, rows) for place, batch in enumerate(samples) if place in places]


def _most_sensitive_first(
    source: Path, layers: Sequence[Layer], thresholds: Mapping[str, float], samples: Sequence[Tensors]
) -> list[Layer]:
    """Sort layers by the mean squared error of the outputs when only this layer is quantized, largest first.

    The errors of layers are small and nearly additive. So the first ones are those to leave in float. A few rows are
    enough for a ranking.
    """
    expected, file = _answers(source, samples), source.with_name("one_layer.onnx")

    def error(layer: Layer) -> float:
        write_quantized(source, [layer], thresholds, int8(), file)
        given = _answers(file, samples)
        return sum(float(np.square(one - right).mean()) for one, right in zip(given, expected, strict=True))

    return sorted(layers, key=error, reverse=True)


def _answers(path: Path, samples: Sequence[Tensors]) -> list[NDArray[np.floating]]:
    """Return each float output of each batch."""
    with closing(open_oracle(path)) as engine:
        outputs = (output for batch in samples for output in engine.run(batch).values())
        return [output for output in outputs if output.dtype.kind == "f"]
