"""One compile run of a language model: make its variants, check the gates of each, time them, and choose one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from app.compile.files import Log
from app.compile.generation.agreement import ReferenceModel, first_difference, greedy
from app.compile.generation.architectures import CacheShape, context_length_of
from app.compile.generation.exporter import EXPORTERS
from app.compile.generation.perplexity import Losses
from app.compile.generation.records import GenerationRecord
from app.compile.generation.source import GenerationSource
from app.compile.generation.texts import MIN_PROMPT, documents_in, prompts_of, random_prompts
from app.compile.generation.timing import STREAMS, GenerationPoint, TimedWork, time_in_turns
from app.compile.generation.variants import GenerationVariant, RequestedPrecisions, speculations_of
from app.compile.records import PublishedScore
from app.compile.timing import Concurrency, concurrencies
from app.compile.variants import Skipped
from app.config import CompileConfig, ComputePrecision, ObjectiveConfig
from app.data.language import Passage
from app.engines.architecture import Device
from app.engines.generation.base import GenerationEngine, GenerationSettings, PromptLookup
from app.engines.generation.registry import open_generation
from app.errors import CompileError, EngineError
from app.repository.manifest import GENERATION_FILES, GreedyAgreement, Perplexity, ServingDefaults
from app.repository.score import Score

_PROMPTS, _TOKENS = 32, 32
"""The number of prompts whose greedy tokens are compared, and the number of tokens for each."""
_TIMED_PROMPT, _TIMED_TOKENS = 64, 64
_SETTINGS: dict[Device, int] = {"cpu": 2, "gpu": 1}
"""The number of measured ways to divide the cores between replicas. A GPU has one replica."""
_CACHE_BYTES = 2**26
_MAX_OPEN_BYTES = 2**31
"""Maximum size of the weights for which all variants are in memory at once."""


@dataclass(frozen=True)
class Published:
    """The perplexity of the chosen variant, and the perplexity of its float32 form on the same texts."""

    perplexity: Perplexity
    baseline: Perplexity
    score: PublishedScore
    greedy: GreedyAgreement


@dataclass(frozen=True)
class GenerationChoice:
    """The variant to publish, and how to serve it."""

    record: GenerationRecord
    point: GenerationPoint
    serving: ServingDefaults
    published: Published | None
    """None: there are no texts."""

    @property
    def greedy(self) -> GreedyAgreement:
        """The agreement of the greedy tokens, on the texts of the published perplexity if there are any."""
        return self.published.greedy if self.published else self.record.greedy


class GenerationCompilation:
    """Makes and compares the variants of a language model. Partial results can be reported at any time."""

    def __init__(
        self, source: GenerationSource, config: CompileConfig, requested: RequestedPrecisions, folder: Path, log: Log
    ) -> None:
        self.source, self.config = source, config
        self.records: list[GenerationRecord] = []
        self.skipped: list[Skipped] = []
        self.points: list[GenerationPoint] = []
        self._requested, self._folder, self._log = requested, folder, log
        self._reference = ReferenceModel(source.model)
        self._exporter = EXPORTERS[requested.engine](source, requested.device)
        self._engine_version = ""
        self._kept: dict[ComputePrecision, Losses] = {}
        """The losses of each precision on the compared texts."""
        self._answers: dict[ComputePrecision, list[list[int]]] = {}
        """The greedy tokens of each precision on the compared prompts."""
        self._length = context_length_of(source.model.config)

    @property
    def documents(self) -> int:
        """Documents that the variants are compared on."""
        return documents_in(self.source.texts) if self.source.texts else 0

    def folder_of(self, precision: ComputePrecision) -> Path:
        """Return the folder of a variant, which an engine can open."""
        return self._folder / precision

    def evaluate(self) -> None:
        """Make every variant, and compare it with transformers and with its float32 form.

        Raises:
            CompileError: the model cannot be exported, or its float32 form differs from the model of transformers.
        """
        self._skip(self._requested.skipped)
        weights, texts = self._export("fp32"), self.source.texts
        baseline = self._losses("fp32", texts) if texts else None
        if baseline:
            self._kept["fp32"] = baseline
        record = self._compared("fp32", weights, texts)
        if record.reasons:
            kind = self.source.model.config.model_type
            raise CompileError(
                f"the exported {kind} is not the model of transformers: {record.reasons[0]}; nothing was published, "
                "and no other precision was made"
            ).of("generation.differs")
        if "fp32" in self._requested.precisions:
            self._add_all(self._scored(record, baseline, None))
        for precision in self._requested.precisions:
            if precision != "fp32":
                try:
                    self._add_all(self._small(precision, baseline))
                except (CompileError, EngineError) as error:
                    self._skip([Skipped(engine=self._requested.engine, precision=precision, reason=str(error))])

    def choose(self) -> GenerationChoice:
        """Time the variants that pass, choose one, and measure it on the test split, once.

        Raises:
            CompileError: no variant passes the gates, no setting meets the objective, or the perplexity misses a gate.
        """
        passing = [record.variant for record in self.records if record.passed]
        if not passing:
            reasons = [f"{record.title}: {'; '.join(record.reasons)}" for record in self.records]
            raise CompileError(
                "no variant passes the gates, and nothing was published: "
                + " | ".join([*reasons, *map(str, self.skipped)])
            ).of("variants.none_pass")
        self.points = asyncio.run(self._timed(passing))
        point = best_point(self.points, self.config.objective)
        record = next(record for record in self.records if record.variant == point.variant)
        serving = ServingDefaults(
            max_batch_size=max(STREAMS),
            timeout_us=0,
            replicas=point.concurrency.streams,
            threads=point.concurrency.threads,
        )
        published = self._published(record)
        self._require_perplexity(record, published)
        return GenerationChoice(record, point, serving, published)

    def _small(self, precision: ComputePrecision, baseline: Losses | None) -> GenerationRecord:
        if baseline is None:
            raise CompileError("its gate is perplexity, which needs texts: give them with --samples").of(
                "samples.missing", "--samples"
            )
        told = self._export(precision)
        losses = self._kept[precision] = self._losses(precision, self.source.texts)
        return self._scored(self._compared(precision, told, self.source.texts), losses, baseline)

    def _scored(self, record: GenerationRecord, losses: Losses | None, baseline: Losses | None) -> GenerationRecord:
        """Add the perplexity to a record, and check its gate."""
        if losses is None:
            return record
        update: dict[str, object] = {"perplexity": losses.perplexity, "score": _score(losses.perplexity)}
        if baseline is not None:
            rise = losses.rise_over(baseline)
            failure = rise.failure(self.config.gates.max_perplexity_rise)
            update |= {"rise": str(rise), "reasons": (*record.reasons, *([failure] if failure else []))}
        return record.model_copy(update=update)

    def _compared(self, precision: ComputePrecision, weights: str, texts: Sequence[Passage]) -> GenerationRecord:
        """Compare the tokens and the logits of a variant with those of transformers. Only float32 must be equal."""
        prompts = self._prompts(texts)
        answers = self._answers[precision] = self._greedy(GenerationVariant(precision=precision), prompts)
        agreement = self._reference.compare(prompts, answers)
        whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        folder, engine = self.folder_of(precision), self._requested.engine
        parity = self._exporter.parity(precision, folder, self._reference, whole)
        failure = (agreement.failure or parity.failure) if precision == "fp32" else None
        return GenerationRecord(
            engine=engine,
            precision=precision,
            device=self._requested.device,
            engine_version=self._engine_version,
            size_bytes=sum(file.stat().st_size for file in folder.glob(f"{Path(GENERATION_FILES[engine]).stem}.*")),
            weights=weights,
            greedy=agreement.greedy,
            max_difference=parity.max_difference,
            scaled_difference=parity.scaled_difference,
            cosine=parity.cosine,
            reasons=(failure,) if failure else (),
        )

    def _speculated(self, plain: GenerationRecord, speculation: PromptLookup) -> GenerationRecord:
        """Compare the tokens of a variant that speculates with those of the same weights without speculation."""
        variant = GenerationVariant(precision=plain.precision, speculation=speculation)
        expected = self._answers[plain.precision]
        difference = first_difference(expected, self._greedy(variant, self._prompts(self.source.texts)))
        reasons = (f"its greedy tokens differ from those without speculation ({difference})",) if difference else ()
        return plain.model_copy(update={"speculation": speculation, "reasons": reasons})

    def _prompts(
        self, texts: Sequence[Passage], count: int = _PROMPTS, length: int | None = None
    ) -> list[tuple[int, ...]]:
        """Return prompts of different lengths, or all of one ``length``."""
        longest = length or max(1, self._length - self._num_tokens)
        if texts:
            return prompts_of(texts, count, longest, length or MIN_PROMPT)
        return random_prompts(int(self.source.model.config.vocab_size), count, longest, length or MIN_PROMPT)

    @property
    def _num_tokens(self) -> int:
        return min(_TOKENS, self._length // 2)

    def _greedy(self, variant: GenerationVariant, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the greedy tokens of a variant, with all prompts in one batch."""

        async def answers() -> list[list[int]]:
            async with self._opened(variant, Concurrency(self.source.threads, 1)) as (engine,):
                return await greedy(engine, prompts, self._num_tokens)

        return asyncio.run(answers())

    def _losses(self, precision: ComputePrecision, texts: Sequence[Passage]) -> Losses:
        return self._exporter.losses(precision, self.folder_of(precision), texts)

    def _export(self, precision: ComputePrecision) -> str:
        return self._exporter.export(precision, self.folder_of(precision), self.folder_of("fp32"))

    @asynccontextmanager
    async def _opened(
        self, variant: GenerationVariant, concurrency: Concurrency
    ) -> AsyncIterator[Sequence[GenerationEngine]]:
        """Start the replicas of a setting."""
        per_token = CacheShape.of(self.source.model.config).bytes_per_token
        settings = GenerationSettings(
            precision=variant.precision,
            threads=concurrency.threads,
            cache_bytes=max(_CACHE_BYTES, 2 * max(STREAMS) * (_TIMED_PROMPT + _TIMED_TOKENS) * per_token),
            # With the cache, a repeated prompt would not be read again.
            prefix_cache=False,
            speculation=variant.speculation,
            device=self._requested.device,
        )
        name, folder = self._requested.engine, self.folder_of(variant.precision)
        engines = [open_generation(name, folder, settings) for _ in range(concurrency.streams)]
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            self._engine_version = engines[0].version
            yield engines
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))

    async def _timed(self, variants: Sequence[GenerationVariant]) -> list[GenerationPoint]:
        """Time each variant in each setting, on prompts of the texts."""
        prompts = self._prompts(self.source.texts, max(STREAMS), max(1, min(_TIMED_PROMPT, self._length // 2)))
        work = TimedWork(prompts, max(1, min(_TIMED_TOKENS, self._length - max(map(len, prompts)))))
        points: list[GenerationPoint] = []
        device = self._requested.device
        for concurrency in concurrencies(device, self.source.threads)[: _SETTINGS[device]]:
            sizes = [record.size_bytes for record in self.records if record.variant in variants]
            # vLLM's engines do not share a GPU.
            fit = device == "cpu" and concurrency.streams * sum(sizes) <= _MAX_OPEN_BYTES
            for group in [variants] if fit else [[variant] for variant in variants]:
                async with AsyncExitStack() as stack:
                    opened = {name: await stack.enter_async_context(self._opened(name, concurrency)) for name in group}
                    points += await time_in_turns(opened, concurrency, work)
        for point in points:
            self._log(str(point))
        return points

    def _published(self, record: GenerationRecord) -> Published | None:
        """Measure the chosen variant on the test split, or return its measurements on the compared texts.

        Raises:
            CompileError: it misses its gate on the test split.
        """
        # Read only now, so that the choice cannot depend on these texts.
        if test := self.source.load_test():
            return self._tested(record, test)
        if not self._kept:
            return None
        ours, baseline = self._kept[record.precision].perplexity, self._kept["fp32"].perplexity
        score = PublishedScore(split=self.source.split, rows=self.documents, what="documents", score=_score(ours))
        return Published(ours, baseline, score, record.greedy)

    def _tested(self, record: GenerationRecord, test: Sequence[Passage]) -> Published:
        baseline, losses = self._losses("fp32", test), self._losses(record.precision, test)
        prompts = self._prompts(test)
        agreement = self._reference.compare(prompts, self._greedy(record.variant, prompts))
        if record.precision == "fp32":
            failure = agreement.failure
        else:
            failure = losses.rise_over(baseline).failure(self.config.gates.max_perplexity_rise)
        if failure:
            raise CompileError(
                f"{record.precision} was chosen by the {self.source.split} split, and on the test split {failure}: "
                f"nothing was published; leave {record.precision} out of compile.precisions, or change the gate"
            ).of("gate.test_split", "compile.gates")
        score = PublishedScore(split="test", rows=documents_in(test), what="documents", score=_score(losses.perplexity))
        return Published(losses.perplexity, baseline.perplexity, score, agreement.greedy)

    def _require_perplexity(self, record: GenerationRecord, published: Published | None) -> None:
        """Raise CompileError if the published perplexity is above ``compile.gates.min_score``."""
        limit = self.config.gates.min_score
        if limit is not None and not (published and published.perplexity.value <= limit):
            raise CompileError(
                f"compile.gates.min_score is {limit:g}, and {record.precision} has "
                f"{published.score if published else 'no perplexity, because there are no texts'}: nothing was "
                "published; train longer, use more data or another model, or change the gate"
            ).of("gate.min_score", "compile.gates.min_score")

    def _add_all(self, record: GenerationRecord) -> None:
        """Add a variant, and if it passes, those that speculate with the same weights."""
        self._add(record)
        for speculation in speculations_of(self.config) if record.passed else []:
            try:
                self._add(self._speculated(record, speculation))
            except EngineError as error:
                reason = f"{speculation}: {error}"
                self._skip([Skipped(engine=record.engine, precision=record.precision, reason=reason)])

    def _add(self, record: GenerationRecord) -> None:
        self.records.append(record)
        self._log(str(record))

    def _skip(self, skipped: Sequence[Skipped]) -> None:
        for variant in skipped:
            self.skipped.append(variant)
            self._log(str(variant))


def best_point(points: Sequence[GenerationPoint], objective: ObjectiveConfig) -> GenerationPoint:
    """Return the best setting: for latency the fastest single answer, for throughput the most tokens of 16 streams.

    Raises:
        CompileError: no setting keeps ``objective.latency_ms`` per token.
    """
    streams = min(STREAMS) if objective.goal == "min_latency" else max(STREAMS)
    candidates = [point for point in points if point.streams == streams]
    limit = objective.latency_ms
    within = [point for point in candidates if limit is None or point.token_p95_ms <= limit]
    if not within:
        nearest = min(candidates, key=lambda point: point.token_p95_ms)
        raise CompileError(
            f"compile.objective.latency_ms is {limit:g}, and the fastest setting takes {nearest.token_p95_ms:.2f} ms "
            f"a token ({nearest}): allow more, or give a smaller model"
        ).of("objective.unreachable", "compile.objective.latency_ms")
    return max(within, key=lambda point: point.tokens_per_s)


def _score(perplexity: Perplexity) -> Score:
    return Score(metric="perplexity", value=perplexity.value, mode="min")
