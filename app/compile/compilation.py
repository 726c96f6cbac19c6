"""One compile run: compare and time every variant, measure the best ones in every setting, and choose one."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from app.best_effort import attempt
from app.compile.choice import Choice, best_at_length, best_point, ranked, serving_defaults
from app.compile.files import Log, ModelFile, ModelFiles
from app.compile.parity import check_signature, compare
from app.compile.records import BuiltPlan, PublishedScore, VariantRecord
from app.compile.reference import Reference
from app.compile.source import Source
from app.compile.timing import (
    Concurrency,
    OperatingPoint,
    Point,
    combine_lengths,
    concurrencies,
    measure,
    operating_points,
    race,
)
from app.compile.variants import BUILT_AHEAD, RequestedVariants, Skipped, Variant
from app.config import CompileConfig, ComputePrecision
from app.engines.base import Engine
from app.errors import CompileError, EngineError
from app.repository.score import Score

_FINALISTS = 2
"""Number of variants that are measured in every setting. The others are measured with all cores for one batch."""

_MIN_ROWS = 100
"""Rows below which the gates say little."""

_MIN_CALLS, _MIN_CALLS_FOR_PERCENTILE = 3, 20
"""Minimum number of calls of each stream in each setting, for a median alone and for a 95th percentile."""


class Compilation:
    """Makes the files of a source model and measures its variants. Results so far can be reported at any time."""

    def __init__(
        self, source_model: Source, config: CompileConfig, requested: RequestedVariants, folder: Path, log: Log
    ) -> None:
        self.source_model = source_model
        self.config = config
        self.records: list[VariantRecord] = []
        self.skipped: list[Skipped] = []
        self.plans: list[BuiltPlan] = []
        self.points: list[OperatingPoint] = []
        self._requested = requested
        self._folder = folder
        self._log = log
        self._files_by_sparsity = {False: ModelFiles(source_model, config, requested.int8_engines, folder, log)}

    @property
    def files(self) -> list[ModelFile]:
        """Every ONNX file that was made."""
        return [file for files in self._files_by_sparsity.values() for file in files.made]

    def evaluate(self) -> None:
        """Compare every variant with PyTorch, and time it. Skip those that cannot be run here.

        Raises:
            CompileError: the model cannot be exported, or the file has other inputs than the model.
        """
        reference = self.source_model.reference
        if reference.score and (rows := len(reference.rows)) < _MIN_ROWS:
            self._log(
                f"warning: {rows} rows are few for gates: one of them is {1 / rows:.1%} of the "
                f"{reference.score.metric.replace('_', ' ')}; give {_MIN_ROWS} or more"
            )
        # A model that cannot be exported fails here, instead of once for each variant.
        if self._requested.exported:
            self._files_of(sparse=False).get("fp32")
        self._skip(self._requested.skipped)
        for number, variant in enumerate(self._requested.variants, start=1):
            self._log(f"variant {number}/{len(self._requested.variants)}  {variant}")
            try:
                record = self._evaluated(variant)
            except (CompileError, EngineError) as error:
                self._skip([Skipped(engine=variant.engine, precision=variant.precision, reason=str(error))])
            else:
                self.records.append(record)
                self._log(str(record))

    def build_ahead(self) -> Iterator[tuple[ComputePrecision, Path]]:
        """Build a TensorRT plan in each precision whose file passes the gates, and yield its folder."""
        for precision in self._requested.built_ahead:
            try:
                files = self._files_of(sparse=self.config.sparsity != "none")
                if not (file := files.get(precision)).passes:
                    raise CompileError(f"its file: {file.verdict}").of("file.fails_gates")
                folder = files.build_ahead(precision)
            except (CompileError, EngineError) as error:
                self._skip([Skipped(engine=BUILT_AHEAD, precision=precision, reason=str(error))])
            else:
                self.plans.append(BuiltPlan(precision=precision, targets=self.config.targets))
                self._log(str(self.plans[-1]))
                yield precision, folder

    def choose(self) -> Choice:
        """Measure the best variants in every setting, and choose between the best setting of each.

        Then measure the score of the chosen variant on the test split, once.

        Raises:
            CompileError: no variant passes the gates, no setting meets the objective, or the score misses a gate.
        """
        finalists = self._finalists()
        for record in finalists:
            self.points += self._measure_other_settings(record)
        point = best_point(self._timed_in_turns([self._best_of(record) for record in finalists]), self.config.objective)
        record, serving = self.record_of(point), serving_defaults(point, self.points, self.config.objective)
        published = self._published_score(record, point)
        self._require_score(published)
        return Choice(record, point, serving, published)

    def baseline_of(self, point: OperatingPoint) -> OperatingPoint | None:
        """Return PyTorch's best point on the same device, if it was measured."""
        device = point.variant.device
        baselines = [other for other in self.points if other.variant.baseline and other.variant.device == device]
        return ranked(baselines, self.config.objective)[0] if baselines else None

    def record_of(self, point: OperatingPoint) -> VariantRecord:
        """Return the record of the point's variant."""
        return next(record for record in self.records if record.variant == point.variant)

    def onnx_of(self, record: VariantRecord) -> Path:
        """Return the ONNX file that a variant runs, or that its TensorRT plan was built from."""
        return self._files_of(record.sparse).onnx_path(record.file)

    def path_of(self, record: VariantRecord) -> Path:
        """Return the path of what the variant's engine opens."""
        return self._files_of(record.sparse).engine_path(record.variant)

    def _files_of(self, sparse: bool) -> ModelFiles:
        """Return the files of the whole model, or of the pruned one, which is made when it is first needed."""
        if sparse not in self._files_by_sparsity:
            model = self.source_model.pruned()
            self._log(f"pruned, two of four weights: {model.reference.score}")
            self._files_by_sparsity[sparse] = ModelFiles(model, self.config, (), self._folder / "sparse", self._log)
        return self._files_by_sparsity[sparse]

    def _evaluated(self, variant: Variant) -> VariantRecord:
        """Compare a variant with PyTorch, and time it. A variant inherits the failures of its ONNX file."""
        files = self._files_of(variant.sparse)
        # One batch on all cores: enough to rank variants before the costly measurements.
        all_cores = concurrencies(variant.device, self.source_model.threads)[0]
        with closing(files.open(variant, all_cores)) as engine:
            if not variant.runs_module:
                check_signature(engine.signature, self.source_model.signature, files.engine_path(variant))
            # A TensorRT plan takes no more rows than it was built for.
            parity = compare(engine, files.source_model.reference, max(self.config.batch_sizes))
            # A list, because the engine is closed before the points are used.
            measured = list(self._measure(engine, all_cores))

        file = None if variant.runs_module else files.get(variant.file)
        inherited = [f"in its file {failure}" for failure in file.failures] if file else []
        size_bytes = files.size_bytes(variant)

        points = self._operating_points(variant, parity.score, size_bytes, measured)
        self.points += points
        by_size = [point for point in points if point.is_uniform]
        return VariantRecord(
            **dict(variant),
            **dict(parity),
            engine_version=engine.version,
            size_bytes=size_bytes,
            reasons=(*inherited, *files.evaluator.failures(parity, variant.precision)),
            quantization=file.quantization if file else None,
            latency_ms={point.batch_size: round(point.latency_ms, 3) for point in by_size},
            throughput={point.batch_size: round(point.throughput, 1) for point in by_size},
        )

    def _finalists(self) -> list[VariantRecord]:
        """Return the best variants by the objective, as measured with all cores for one batch."""
        publishable = [record for record in self.records if record.publishable]
        if not publishable:
            reasons = [f"{record.variant}: {'; '.join(record.reasons)}" for record in self.records if record.reasons]
            raise CompileError(
                "no variant passes the gates, and nothing was published: "
                + " | ".join([*reasons, *map(str, self.skipped)])
            ).of("variants.none_pass")
        points = [point for point in self.points if self.record_of(point).publishable]
        # A variant's best point decides, so only its first place counts.
        best_first = dict.fromkeys(point.variant for point in ranked(points, self.config.objective))
        finalists = list(best_first)[:_FINALISTS]
        return [record for record in publishable if record.variant in finalists]

    def _measure_other_settings(self, record: VariantRecord) -> list[OperatingPoint]:
        """Measure a variant with the cores shared between several streams."""
        measured: list[Point] = []
        for concurrency in concurrencies(record.device, self.source_model.threads)[1:]:
            try:
                with closing(self._open(record.variant, concurrency)) as engine:
                    measured += self._measure(engine, concurrency)
            except EngineError as error:  # too many streams for the memory
                self._log(f"{record.variant}, {concurrency}: not measured: {error}")
        return self._operating_points(record.variant, record.score, record.size_bytes, measured)

    def _operating_points(
        self, variant: Variant, score: Score | None, size_bytes: int, measured: Iterable[Point]
    ) -> list[OperatingPoint]:
        choose = partial(best_at_length, objective=self.config.objective)
        return list(operating_points(variant, score, size_bytes, measured, self.source_model.shares, choose))

    def _best_of(self, record: VariantRecord) -> OperatingPoint:
        """Return a variant's best setting."""
        points = [point for point in self.points if point.variant == record.variant]
        return ranked(points, self.config.objective)[0]

    def _timed_in_turns(self, points: list[OperatingPoint]) -> list[OperatingPoint]:
        """Time the points again, in turns. Keep their 95th percentiles, for which a round has too few calls."""
        if len(points) < 2:
            return points
        if (largest := max(point.size_bytes for point in points)) > self.config.shard_mb * 2**20:
            # Each of them may take most of the memory.
            self._log(
                f"not timed in turns, but chosen by the earlier measurements: {largest / 2**20:,.0f} MiB is more than "
                f"compile.shard_mb, {self.config.shard_mb}"
            )
            return points
        with ExitStack() as engines:
            try:
                # All stay open, because opening an engine takes longer than its turn.
                opened = [
                    engines.enter_context(closing(self._open(point.variant, point.concurrency))) for point in points
                ]
                timed = race([partial(self._time_again, *pair) for pair in zip(opened, points, strict=True)])
            except EngineError as error:  # not all of them fit in memory at once
                self._log(f"not timed in turns, but chosen by the earlier measurements: {error}")
                return points
        self._log("in turns: " + "; ".join(map(str, timed)))
        self.points = [point for point in self.points if point not in points] + timed
        return timed

    def _time_again(self, engine: Engine, point: OperatingPoint) -> OperatingPoint:
        measured: list[Point] = []
        for length, rows in self.source_model.rows_by_length.items():
            sizes = [point.batch_sizes.get(length or 0, point.batch_size)]
            measured += measure(engine, point.concurrency, sizes, {length: rows}, _MIN_CALLS)
        again = combine_lengths(point.variant, point.score, point.size_bytes, measured, self.source_model.shares)
        return again.model_copy(update={"batch_sizes": point.batch_sizes, "latency_p95_ms": point.latency_p95_ms})

    def _open(self, variant: Variant, concurrency: Concurrency) -> Engine:
        return self._files_of(variant.sparse).open(variant, concurrency)

    def _measure(self, engine: Engine, concurrency: Concurrency) -> Iterator[Point]:
        calls = _MIN_CALLS_FOR_PERCENTILE if self.config.objective.latency_ms is not None else _MIN_CALLS
        return measure(engine, concurrency, sorted(self.config.batch_sizes), self.source_model.rows_by_length, calls)

    def _published_score(self, record: VariantRecord, point: OperatingPoint) -> PublishedScore | None:
        """Measure the score on the test split, or return that on the compared rows. None: they have no labels."""
        if record.score is None:
            return None
        source = self.source_model
        name, answers = source.split, replace(source.reference, score=record.score)
        # Read only now: rows that chose nothing show how the version does on new ones.
        if test := source.load_test():
            with closing(self._open(record.variant, point.concurrency)) as engine:
                answers = Reference.of(engine, test, source.reference.judge, max(self.config.batch_sizes))
            name = "test"
        judgement = attempt(partial(source.judge, name, answers), "the score has no verdict", "the job")
        return PublishedScore(split=name, rows=len(answers.rows), score=answers.score, judgement=judgement)

    def _require_score(self, published: PublishedScore | None) -> None:
        """Raise CompileError if the score misses a gate of the recipe."""
        gates, score = self.config.gates, published.score if published else None
        if gates.min_score is not None:
            limit = Score(value=gates.min_score, mode=score.mode if score else "max")
            if score is None or not score.quality >= limit.quality:
                raise CompileError(
                    f"compile.gates.min_score is {gates.min_score:g}, and the version has {published or 'no score'}: "
                    "nothing was published; use more data or another model, or change the gate"
                ).of("gate.min_score", "compile.gates.min_score")
        judgement = published.judgement if published else None
        if gates.above_baseline and (reason := judgement.shortfall if judgement else "the score has no baseline"):
            raise CompileError(f"compile.gates.above_baseline is true: nothing was published, because of {reason}").of(
                "gate.above_baseline", "compile.gates.above_baseline"
            )

    def _skip(self, skipped: Iterable[Skipped]) -> None:
        for variant in skipped:
            self.skipped.append(variant)
            self._log(str(variant))
