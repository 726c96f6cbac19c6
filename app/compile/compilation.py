"""One compile run: compare and time every variant, measure the best ones in every setting, and choose one."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from app.compile.choice import Choice, best_at_length, best_point, ranked, serving_defaults
from app.compile.family import Families
from app.compile.files import ModelFile, Tell
from app.compile.operating_points import OperatingPoint, joined, operating_points
from app.compile.parity import check_signature, compare
from app.compile.race import race
from app.compile.records import BuiltPlan, PublishedAccuracy, VariantRecord
from app.compile.reference import accuracy_on
from app.compile.subject import Subject
from app.compile.sweep import Concurrency, Point, concurrencies, measure
from app.compile.variants import BUILT_AHEAD, Skipped, Variant, Wanted
from app.config import CompileConfig, ComputePrecision
from app.engines.base import Engine
from app.errors import CompileError, EngineError

_FINALISTS = 2
"""So many variants are measured with cores shared in every way; the others with all cores for one batch."""

_CALLS_FOR_A_MEDIAN, _CALLS_FOR_A_PERCENTILE = 3, 20
"""Of each stream in each setting, at least."""


class Compilation:
    """Makes files and measures variants of a subject; what there is so far can be reported at any time."""

    def __init__(self, subject: Subject, config: CompileConfig, wanted: Wanted, folder: Path, tell: Tell) -> None:
        self.subject = subject
        self.config = config
        self.records: list[VariantRecord] = []
        self.skipped: list[Skipped] = []
        self.plans: list[BuiltPlan] = []
        self.points: list[OperatingPoint] = []
        self._wanted = wanted
        self._families = Families(subject, config, wanted.int8_engines, folder, tell)
        self._tell = tell

    @property
    def files(self) -> list[ModelFile]:
        """Every ONNX file that was made."""
        return self._families.files

    def prove(self) -> None:
        """Compare every variant with PyTorch, and time it; one that cannot be run here is skipped.

        Raises:
            CompileError: the model cannot be exported, or the file takes other inputs.
        """
        if self._wanted.exported:
            self._families.of(sparse=False).files.get("fp32")
        self._skip(self._wanted.skipped)
        for variant in self._wanted.variants:
            try:
                record = self._proven(variant)
            except (CompileError, EngineError) as error:
                self._skip([Skipped(engine=variant.engine, precision=variant.precision, reason=str(error))])
            else:
                self.records.append(record)
                self._tell(str(record))

    def build_ahead(self) -> Iterator[tuple[ComputePrecision, Path]]:
        """The folder of a plan in each precision whose file holds the gates; nothing here runs them."""
        for precision in self._wanted.built_ahead:
            try:
                family = self._families.of(sparse=self.config.sparsity != "none")
                if not (file := family.files.get(precision)).holds:
                    raise CompileError(f"its file: {file.verdict}")
                folder = family.opener.build_ahead(precision)
            except (CompileError, EngineError) as error:
                self._skip([Skipped(engine=BUILT_AHEAD, precision=precision, reason=str(error))])
            else:
                self.plans.append(BuiltPlan(precision=precision, targets=self.config.targets))
                self._tell(str(self.plans[-1]))
                yield precision, folder

    def choose(self) -> Choice:
        """Measure the best variants in every setting, and choose by the objective between the best setting of each.

        Then measure the accuracy of the chosen variant on the test split, once.

        Raises:
            CompileError: no variant holds the gates, or no setting the objective.
        """
        finalists = self._finalists()
        for record in finalists:
            self.points += self._measure_other_settings(record)
        point = best_point(self._raced([self._best_of(each) for each in finalists]), self.config.objective)
        record, serving = self.record_of(point), serving_defaults(point, self.points, self.config.objective)
        return Choice(record, point, serving, self._published_accuracy(record, point))

    def baseline_of(self, point: OperatingPoint) -> OperatingPoint | None:
        """Return PyTorch's best point on the same device, if it was measured."""
        baselines = [each for each in self.points if each.variant.baseline]
        alike = [each for each in baselines if each.variant.device == point.variant.device]
        return ranked(alike, self.config.objective)[0] if alike else None

    def record_of(self, point: OperatingPoint) -> VariantRecord:
        """The record of the variant that a point is of."""
        return next(each for each in self.records if each.variant == point.variant)

    def onnx_of(self, record: VariantRecord) -> Path:
        """The ONNX file that a variant runs, or that its plan was built from."""
        return self._families.of(record.sparse).files.path(record.file)

    def path_of(self, record: VariantRecord) -> Path:
        """What its engine opens."""
        return self._families.of(record.sparse).opener.path(record.variant)

    def _proven(self, variant: Variant) -> VariantRecord:
        """Compare a variant with PyTorch, and time it; what fails in its file fails in the variant."""
        family, whole = self._families.of(variant.sparse), concurrencies(variant.device, self.subject.threads)[0]
        with closing(family.opener.open(variant, whole)) as engine:
            if not variant.runs_module:
                check_signature(engine.signature, self.subject.signature, family.opener.path(variant))
            parity = compare(engine, family.subject.reference, max(self.config.batch_sizes))
            measured = list(self._measure(engine, whole))
        file = None if variant.runs_module else family.files.get(variant.file)
        inherited = [f"in its file {each}" for each in file.failures] if file else []
        size_bytes = family.opener.path(variant).stat().st_size if file else self.subject.size_bytes
        points = self._joined(variant, parity.accuracy, size_bytes, measured)
        self.points += points
        by_size = [point for point in points if point.is_uniform]
        return VariantRecord(
            **dict(variant),
            **dict(parity),
            engine_version=engine.version,
            size_bytes=size_bytes,
            reasons=(*inherited, *family.judge.failures(parity, variant.precision)),
            quantization=file.quantization if file else None,
            latency_ms={point.batch_size: round(point.latency_ms, 3) for point in by_size},
            throughput={point.batch_size: round(point.throughput, 1) for point in by_size},
        )

    def _finalists(self) -> list[VariantRecord]:
        """The variants that the objective puts first."""
        publishable = [each for each in self.records if each.publishable]
        if not publishable:
            reasons = [f"{each.variant}: {'; '.join(each.reasons)}" for each in self.records if each.reasons]
            raise CompileError(
                "no variant holds the gates, and nothing was published: "
                + " | ".join([*reasons, *map(str, self.skipped)])
            )
        order = ranked([each for each in self.points if self.record_of(each).publishable], self.config.objective)
        variants = list(dict.fromkeys(each.variant for each in order))[:_FINALISTS]
        return [each for each in publishable if each.variant in variants]

    def _measure_other_settings(self, record: VariantRecord) -> list[OperatingPoint]:
        """With the cores shared between several batches at once."""
        measured: list[Point] = []
        for concurrency in concurrencies(record.device, self.subject.threads)[1:]:
            try:
                with closing(self._open(record.variant, concurrency)) as engine:
                    measured += self._measure(engine, concurrency)
            except EngineError as error:  # so many do not fit in memory
                self._tell(f"{record.variant}, {concurrency}: not measured: {error}")
        return self._joined(record.variant, record.accuracy, record.size_bytes, measured)

    def _joined(
        self, variant: Variant, accuracy: float, size_bytes: int, measured: Iterable[Point]
    ) -> list[OperatingPoint]:
        choose = partial(best_at_length, objective=self.config.objective)
        return list(operating_points(variant, accuracy, size_bytes, measured, self.subject.shares, choose))

    def _best_of(self, record: VariantRecord) -> OperatingPoint:
        """What the objective puts first of a variant."""
        return ranked([each for each in self.points if each.variant == record.variant], self.config.objective)[0]

    def _raced(self, points: list[OperatingPoint]) -> list[OperatingPoint]:
        """The points, timed once more, in turns. Their 95 of 100 stay: a round has too few calls to tell."""
        if len(points) < 2:
            return points
        with ExitStack() as engines:
            try:
                opened = [engines.enter_context(closing(self._open(each.variant, each.concurrency))) for each in points]
                raced = race([partial(self._time_again, *each) for each in zip(opened, points, strict=True)])
            except EngineError as error:  # so many do not fit in memory at once
                self._tell(f"not timed in turns, and chosen by what each took alone: {error}")
                return points
        self._tell("in turns: " + "; ".join(map(str, raced)))
        self.points = [each for each in self.points if each not in points] + raced
        return raced

    def _time_again(self, engine: Engine, point: OperatingPoint) -> OperatingPoint:
        measured: list[Point] = []
        for length, rows in self.subject.rows_by_length.items():
            sizes = [point.batch_sizes.get(length or 0, point.batch_size)]
            measured += measure(engine, point.concurrency, sizes, {length: rows}, _CALLS_FOR_A_MEDIAN)
        again = joined(point.variant, point.accuracy, point.size_bytes, measured, self.subject.shares)
        return again.model_copy(update={"batch_sizes": point.batch_sizes, "latency_p95_ms": point.latency_p95_ms})

    def _open(self, variant: Variant, concurrency: Concurrency) -> Engine:
        return self._families.of(variant.sparse).opener.open(variant, concurrency)

    def _measure(self, engine: Engine, concurrency: Concurrency) -> Iterator[Point]:
        calls = _CALLS_FOR_A_PERCENTILE if self.config.objective.latency_ms is not None else _CALLS_FOR_A_MEDIAN
        return measure(engine, concurrency, sorted(self.config.batch_sizes), self.subject.rows_by_length, calls)

    def _published_accuracy(self, record: VariantRecord, point: OperatingPoint) -> PublishedAccuracy:
        """Measure accuracy on the test split, which chooses nothing; without one, return the validation accuracy."""
        if (test := self.subject.load_test()) is None:
            rows = len(self.subject.reference.classes)
            return PublishedAccuracy(split="validation", rows=rows, accuracy=record.accuracy)
        with closing(self._open(record.variant, point.concurrency)) as engine:
            accuracy = accuracy_on(engine, test, max(self.config.batch_sizes))
        return PublishedAccuracy(split="test", rows=len(test), accuracy=accuracy)

    def _skip(self, skipped: Iterable[Skipped]) -> None:
        for each in skipped:
            self.skipped.append(each)
            self._tell(str(each))
