"""The data of a run on a stream: the first micro-epoch, the processor or tokenizer, and the validation split."""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from datetime import UTC, datetime
from functools import partial

import numpy as np
from upath import UPath

from app.checksums import sha256_of
from app.config import DataConfig, Recipe
from app.data.examples import REASONS, CleaningReport, Input
from app.data.labelled import LabelledData
from app.data.language import LanguageData
from app.data.preparation.prepare import SHARDS
from app.data.preparation.samples import SampleKind
from app.data.preparation.survey import KEPT, Cleaner, digest_of, drop_equal
from app.data.prepared import TRAIN, VALIDATION
from app.data.processor import Processor, fit_processor
from app.data.sharded import ShardReference
from app.data.shards import ShardIndex
from app.data.sources.source import Source
from app.data.sources.units import read_source
from app.data.streaming.collector import Collector
from app.data.streaming.documents import Blocks, DocumentRows
from app.data.streaming.micro_epochs import SHARDS_CONFIG, MicroEpochStore
from app.data.streaming.rows import ChosenRows, LabelledRows, LabelledTexts, RowsFactory, Samples, sample_of
from app.data.targets import Classes
from app.data.tokenizer import LanguageTokenizer
from app.errors import DataError, RecipeError
from app.pretrained import open_pretrained
from app.storage import open_storage

_KEY = "data.validation_source"


def prepare_labelled_stream(
    recipe: Recipe, processor_type: type[Processor], clock: Callable[[], float] = time.monotonic
) -> LabelledData:
    """Collect the first micro-epoch of labelled texts, and fit the processor on it.

    Raises:
        RecipeError: the recipe does not name the labels.
        DataError: the stream cannot be read, has too many bad messages, or is idle before there is a batch; or
            ``data.validation_source`` cannot be read.
    """
    config = recipe.data
    assert config.stream is not None
    if config.stream.labels is None:
        raise RecipeError(
            "data.stream.labels is missing: name all labels that messages may have; part of a stream may lack some"
        )
    given = _validation_texts(config, config.stream.labels) if config.validation_source else None
    in_validation = _digests(given.inputs if given else ())
    chosen = _collect(recipe, partial(LabelledRows, config, in_validation), clock)
    assert isinstance(chosen.train, LabelledTexts)
    processor = fit_processor(processor_type, sample_of(chosen.train.inputs), config, recipe.model.source)
    targets = Classes(config.stream.labels)
    reference = _write(recipe, chosen, given or chosen.validation, in_validation, targets.save)
    return LabelledData.open(reference, processor, targets, chosen.report)


def prepare_document_stream(recipe: Recipe, clock: Callable[[], float] = time.monotonic) -> LanguageData:
    """Collect the first micro-epoch of documents. Its tokenizer is that of ``model.pretrained``, or learned from it.

    Raises:
        RecipeError: the tokenizer of ``model.pretrained`` cannot be used.
        DataError: as in ``prepare_labelled_stream``.
    """
    config = recipe.data
    given = recipe.model.source
    tokenizer = LanguageTokenizer.from_pretrained(open_pretrained(given), config) if given is not None else None
    documents = _validation_documents(config) if config.validation_source else []
    in_validation = _digests(documents)
    chosen = _collect(recipe, partial(DocumentRows, config, tokenizer, in_validation), clock)
    assert isinstance(chosen.train, Blocks)
    tokenizer = chosen.train.tokenizer
    validation = chosen.validation
    if documents and not len(validation := Blocks(tokenizer.join(documents), tokenizer)):
        raise DataError(
            f"{_KEY} {config.validation_source!r} has too few tokens for one block: give more text, or lower "
            f"data.block_length, which is {config.block_length}"
        )
    reference = _write(recipe, chosen, validation, in_validation, tokenizer.save)
    return LanguageData.open(reference, tokenizer, chosen.report)


def _collect(recipe: Recipe, make_rows: RowsFactory, clock: Callable[[], float]) -> ChosenRows:
    """Return the first micro-epoch."""
    open_storage(recipe.storage)  # before waiting for messages
    config = recipe.data
    print(f"data.source {config.source}: collecting the first micro-epoch", flush=True)
    with closing(Collector(recipe, make_rows, {}, is_first=True, clock=clock)) as collector:
        while not collector.has_ended:
            if (chosen := collector.poll()) is not None:
                return chosen
        assert config.stream is not None
        idle, count = config.stream.idle_seconds, collector.collected
        if not count:
            raise DataError(
                f"data.source {config.source!r} has had no message for {idle:g} s: publish some, correct the address, "
                "or raise data.stream.idle_seconds"
            )
        is_labelled = config.stream.labels is not None
        sample = "row" if is_labelled else f"block of {config.block_length} tokens"
        held_out = "" if config.validation_source else f" and a {sample} for validation"
        raise DataError(
            f"data.source {config.source!r} has had no new message for {idle:g} s, and its {count:,} messages give no "
            f"batch of {recipe.train.batch_size} {sample}s{held_out}: publish more, lower train.global_batch_size, or "
            "raise data.stream.idle_seconds"
        )


def _write(
    recipe: Recipe,
    chosen: ChosenRows,
    validation: Samples,
    in_validation: Collection[bytes],
    save_codec: Callable[[UPath], None],
) -> ShardReference:
    """Write the first micro-epoch and the validation split into a new folder, and the index last."""
    # No two runs share micro-epochs: each begins with the message that is the oldest at its start.
    fingerprint = sha256_of(f"{recipe.data.source} {chosen.start} {uuid.uuid4().hex}".encode())
    store = MicroEpochStore(open_storage(recipe.storage) / SHARDS / fingerprint[:16])
    store.folder.mkdir(parents=True, exist_ok=True)
    save_codec(store.folder)
    chosen.report.save(store.folder)
    store.save_in_validation(in_validation)
    index = ShardIndex(
        fingerprint=fingerprint,
        created=datetime.now(UTC),
        task=recipe.task,
        source=recipe.data.source,
        settings=recipe.data.model_dump(mode="json"),
        splits={
            TRAIN: store.write(1, chosen).shards,
            VALIDATION: store.write_shards(VALIDATION, chosen, validation),
        },
    )
    index.save(store.folder)
    return ShardReference(location=str(store.folder), sha256=index.sha256, config=SHARDS_CONFIG)


def _validation_texts(config: DataConfig, labels: list[str]) -> LabelledTexts:
    """Return the cleaned rows of ``data.validation_source``. Raises DataError for a label that ``labels`` lacks."""
    rows = _validation_rows(config, LabelledRows.kind)
    for _, label, place in rows:
        if label not in labels:
            raise DataError(
                f"{place}: {_KEY} {config.validation_source!r} has the label {label!r}, and data.stream.labels has "
                f"only {', '.join(labels)}: correct one of them"
            )
    return LabelledTexts([text for text, *_ in rows], [label for _, label, _ in rows], labels)


def _validation_documents(config: DataConfig) -> list[str]:
    """Return the cleaned documents of ``data.validation_source``."""
    return [text for text, *_ in _validation_rows(config, DocumentRows.kind)]


def _validation_rows(config: DataConfig, kind: SampleKind) -> list[tuple[str, str, str]]:
    """Return the texts of ``data.validation_source`` that are kept, with their labels if they have any, and places."""
    assert config.validation_source is not None
    cleaner = Cleaner(config.clean, kind)
    texts: list[Input | None] = []
    labels: list[str | None] = []
    places: list[str] = []
    for rows in read_source(Source(config.validation_source, _KEY), kind.columns(config)):
        texts += [cleaner.convert(item) for item in kind.inputs(rows, config, verify=True)]
        labels += kind.labels(rows, config) or [None] * len(rows)
        places += map(rows.place, range(len(rows)))
    codes = np.array([cleaner.code(text, label) for text, label in zip(texts, labels, strict=True)], np.uint8)
    drop_equal(codes, list(map(digest_of, texts)), labels, config.clean.deduplicate is not False)
    dropped = Counter(REASONS[code - 1] for code in codes[codes != KEPT].tolist())
    kept = np.flatnonzero(codes == KEPT).tolist()
    report = CleaningReport(what=kind.what, given=len(codes), kept=len(kept), dropped=dropped)
    print(f"{_KEY} {config.validation_source}: {report}", flush=True)
    if not kept:
        raise DataError(f"{_KEY} {config.validation_source!r} has no row after cleaning: give more rows")
    return [(str(texts[row]), labels[row] or "", places[row]) for row in kept]


def _digests(texts: Iterable[str]) -> frozenset[bytes]:
    return frozenset(map(digest_of, texts))
