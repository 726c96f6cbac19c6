"""The data of a run on a stream: the first micro-epoch, what is learned from it, and the validation split."""

import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import numpy as np
from numpy.typing import NDArray
from upath import UPath

from app.checksums import sha256_of
from app.config import ColumnsConfig, DataConfig, Recipe
from app.data.examples import REASONS, CleaningReport
from app.data.preparation.encoding import Encoding
from app.data.preparation.held_out import AlonePairs
from app.data.preparation.prepare import require_known
from app.data.preparation.sample import SAMPLE_FILE, SampleBuilder
from app.data.preparation.samples import SampleKind, TokenKind
from app.data.preparation.survey import ALL_TRAIN, KEPT, Cleaner, Survey, Surveyor, compared_parts, digest_of
from app.data.prepared import TRAIN, VALIDATION
from app.data.shards import Shard, ShardIndex
from app.data.sources.cells import Rows
from app.data.sources.formats.base import PAIRS
from app.data.sources.source import Source
from app.data.sources.units import read_source
from app.data.streaming.collector import Collector
from app.data.streaming.micro_epochs import MicroEpochStore
from app.data.streaming.rows import ChosenRows, StreamRows, decide
from app.data.targets import LabelError
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError, RecipeError
from app.pretrained import open_pretrained

_KEY = "data.validation_source"


def prepare_stream(recipe: Recipe, kind: SampleKind, root: UPath) -> UPath:
    """Collect the first micro-epoch, and return the folder in ``root`` that it is written to, with an index.

    Raises:
        RecipeError: the recipe does not name the labels, or names some for a task that has none; or the tokenizer of
            ``model.pretrained`` cannot be used.
        DataError: the stream cannot be read, has too many bad messages, or is idle before there is a batch; or
            ``data.validation_source`` cannot be read.
    """
    config, encoding = recipe.data, initial_encoding(recipe, kind)
    given = _Validation.read(encoding) if config.validation_source else None
    in_validation = given.digests if given else frozenset[bytes]()
    chosen = _collect(recipe, encoding, in_validation)
    # No two runs share micro-epochs: each begins with the message that is the oldest at its start.
    fingerprint = sha256_of(f"{config.source} {chosen.start} {uuid.uuid4().hex}".encode())
    store = MicroEpochStore(root / fingerprint[:16])
    store.folder.mkdir(parents=True, exist_ok=True)
    chosen = replace(chosen, encoding=_fitted(chosen, store.folder))
    chosen.report.save(store.folder)
    if kind.contents == PAIRS and given is None:
        # Other rows are held out by their hash, so equal ones are, too.
        in_validation = _digests(chosen.encoding, list(chosen.format.batches(chosen.validation)))
    store.save_in_validation(in_validation)
    index = ShardIndex(
        fingerprint=fingerprint,
        created=datetime.now(UTC),
        task=recipe.task,
        source=config.source,
        settings=config.model_dump(mode="json"),
        columns=chosen.encoding.columns,
        splits={TRAIN: store.write(1, chosen).shards, VALIDATION: _write_validation(chosen, given, store.folder)},
    )
    index.save(store.folder)
    return store.folder


def initial_encoding(recipe: Recipe, kind: SampleKind) -> Encoding:
    """Return the encoding before the first message. Raises RecipeError, or DataError for columns without names."""
    config = recipe.data
    config = config.model_copy(update={"columns": _columns_of(kind, config)})
    tokenizer = None
    if isinstance(kind, TokenKind):
        if recipe.model.source is not None:
            tokenizer = LanguageTokenizer.from_pretrained(open_pretrained(recipe.model.source), config)
        elif config.tokenizer.kind == "bytes":
            tokenizer = LanguageTokenizer.fit((), config)
    assert config.stream is not None
    labels, named = config.stream.labels, kind.rule.named if kind.rule else None
    if kind.targets is None or named is None:
        if labels is not None:
            raise RecipeError(
                f"data.stream.labels is {labels}, and task {recipe.task} has no named labels: leave it out"
            ).of("stream.labels", "data.stream.labels")
        return Encoding(kind, config, tokenizer=tokenizer)
    if labels is None:
        raise RecipeError(
            "data.stream.labels is missing: name all labels that messages may have; part of a stream may lack some"
        ).of("stream.labels", "data.stream.labels")
    return Encoding(kind, config, kind.targets.fit({named(label): 1 for label in labels}, config))


def _columns_of(kind: SampleKind, config: DataConfig) -> ColumnsConfig:
    """Return the columns with their kinds. Part of a stream does not show them, so the default is numbers."""
    columns = kind.resolve([], config.columns, config.group_column)
    named = config.model_copy(update={"columns": columns})
    values = [column.name for column in kind.columns(named).values]
    require_known(columns, values)
    return columns.model_copy(update={"numbers": [name for name in values if name not in columns.categories]})


def _collect(recipe: Recipe, encoding: Encoding, in_validation: frozenset[bytes]) -> ChosenRows:
    """Return the first micro-epoch."""
    config = recipe.data
    print(f"data.source {config.source}: collecting the first micro-epoch", flush=True)
    make_rows = partial(StreamRows, encoding, in_validation)
    with closing(Collector(recipe, make_rows, {}, is_first=True)) as collector:
        while not collector.has_ended:
            if (chosen := collector.poll()) is not None:
                return chosen
        assert config.stream is not None
        idle, count = config.stream.idle_seconds, collector.collected
        if not count:
            raise DataError(
                f"data.source {config.source!r} has had no message for {idle:g} s: publish some, correct the address, "
                "or raise data.stream.idle_seconds"
            ).of("stream.silent", "data.source")
        sample = f"block of {config.block_length} tokens" if isinstance(encoding.kind, TokenKind) else "row"
        held_out = "" if config.validation_source else f" and a {sample} for validation"
        raise DataError(
            f"data.source {config.source!r} has had no new message for {idle:g} s, and its {count:,} messages give no "
            f"batch of {recipe.train.batch_size} {sample}s{held_out}: publish more, lower train.global_batch_size, or "
            "raise data.stream.idle_seconds"
        ).of("stream.too_few", "data.source")


def _fitted(chosen: ChosenRows, folder: UPath) -> Encoding:
    """Return the encoding, fitted to the first micro-epoch. Write it, and the sample to fit a processor on."""
    encoding, kind, config = chosen.encoding, chosen.encoding.kind, chosen.encoding.config
    sample, count = SampleBuilder(1.0, cuts=not kind.strips), 0
    cleaner = Surveyor(Cleaner(config.clean, kind), ALL_TRAIN)
    trained, learned = Counter[str](), Counter[str]()
    for rows in chosen.format.batches(chosen.train):
        labels = kind.labels(rows, config)
        inputs, low, _ = cleaner.survey(kind.inputs(rows, config, verify=False), labels, None)
        sample.add(count, inputs, low)
        count += len(rows)
        trained.update(map(kind.counted, labels or ()))
    for rows in chosen.format.batches(chosen.validation):
        learned.update(map(kind.counted, kind.labels(rows, config) or ()))
    if encoding.tokenizer is None:
        sample.build().save(folder / SAMPLE_FILE)
    else:
        encoding.tokenizer.save(folder)
    return encoding.fitted(folder, learned + trained, trained)


@dataclass(frozen=True)
class _Validation:
    """The rows of ``data.validation_source``."""

    batches: list[Rows]
    kept: NDArray[np.bool_]
    """Whether each row is kept."""
    digests: frozenset[bytes]

    @classmethod
    def read(cls, encoding: Encoding) -> "_Validation":
        """Return the rows, cleaned. Raises DataError for a label that ``data.stream.labels`` lacks."""
        kind, config = encoding.kind, encoding.config
        assert config.validation_source is not None
        batches = list(read_source(Source(config.validation_source, _KEY), kind.columns(config)))
        surveyor = Surveyor(Cleaner(config.clean, kind), ALL_TRAIN)
        surveys = [
            surveyor.survey(kind.inputs(rows, config, verify=True), kind.labels(rows, config), None)[2]
            for rows in batches
        ]
        survey = Survey.join(surveys)
        codes, found = decide(encoding, survey, surveyor.label_names)
        if kind.contents == PAIRS:
            AlonePairs(config, found, codes, 0, len(codes)).draw_all()
        dropped = Counter(REASONS[code - 1] for code in codes[codes != KEPT].tolist())
        kept = codes == KEPT
        report = CleaningReport(what=kind.what, given=len(codes), kept=int(kept.sum()), dropped=dropped)
        print(f"{_KEY} {config.validation_source}: {report}", flush=True)
        if kept.sum() < kind.min_held_out:
            raise DataError(f"{_KEY} {config.validation_source!r} has no row after cleaning: give more rows").of(
                "source.nothing_left", _KEY
            )
        _check_labels(encoding, batches, kept)
        return cls(batches, kept, _digests(encoding, batches, kept))


def _check_labels(encoding: Encoding, batches: Sequence[Rows], kept: NDArray[np.bool_]) -> None:
    """Raise LabelError for a label that cannot be read, with its file and row."""
    places = ((rows, row) for rows in batches for row in range(len(rows)))
    labels = [label for rows in batches for label in encoding.kind.labels(rows, encoding.config) or ()]
    for (rows, row), label, is_kept in zip(places, labels, kept, strict=False):
        try:
            if is_kept:
                encoding.check_label(label, "validation_source")
        except LabelError as error:
            raise LabelError(f"{rows.place(row)}: {error}", label).of(error.rule, error.key) from error


def _digests(encoding: Encoding, batches: Sequence[Rows], kept: NDArray[np.bool_] | None = None) -> frozenset[bytes]:
    """Return the digests of rows, by which messages are compared with them."""
    kind, config, cleaner = encoding.kind, encoding.config, Cleaner(encoding.config.clean, encoding.kind)
    found, first = set[bytes](), 0
    for rows in batches:
        labels = kind.labels(rows, config)
        for row, item in enumerate(kind.inputs(rows, config, verify=False)):
            if kept is None or kept[first + row]:
                parts = compared_parts(kind, cleaner.convert(item), labels[row] if labels else None)
                found.update(map(digest_of, parts))
        first += len(rows)
    return frozenset(found)


def _write_validation(chosen: ChosenRows, given: _Validation | None, folder: UPath) -> list[Shard]:
    """Write the validation split as shards. Raises DataError if the documents of ``given`` are too short."""
    encoding, place = chosen.encoding, chosen.place(folder, VALIDATION)
    if given is None:
        return encoding.write(place, chosen.format.batches(chosen.validation))
    if not (shards := encoding.write(place, given.batches, given.kept, "validation_source")):
        config = encoding.config
        raise DataError(
            f"{_KEY} {config.validation_source!r} has too few tokens for one block: give more text, or lower "
            f"data.block_length, which is {config.block_length}"
        ).of("text.too_short", "data.validation_source")
    return shards
