"""Prepared data in shards, from a recipe."""

import json
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from upath import UPath

from app.best_effort import best_effort
from app.checksums import code_revision, sha256_of, verify_checksums, write_checksums
from app.config import ColumnsConfig, DataConfig, Recipe
from app.data.examples import CleaningReport
from app.data.labelled import LabelledData
from app.data.language import LanguageData
from app.data.origins import Origins
from app.data.pairs import PairData
from app.data.preparation.encoding import COLUMNS_FILE
from app.data.preparation.prepare import SHARDS, Preparer, RunUnits
from app.data.preparation.sample import SAMPLE_FILE, Sample
from app.data.preparation.samples import Pairs, SampleKind, TokenKind
from app.data.prepared import TRAIN, VALIDATION
from app.data.processor import Processor, fit_processor
from app.data.rows import RowColumns
from app.data.sharded import ShardReference
from app.data.shards import ShardIndex
from app.data.tokenizer import LanguageTokenizer
from app.data.vectors import Vectors
from app.errors import StorageError
from app.storage import open_storage

Tokens = TypeVar("Tokens", bound=LanguageData)


def prepare_labelled(
    recipe: Recipe, kind: SampleKind, processor_type: type[Processor], run_units: RunUnits = map
) -> LabelledData:
    """Return labelled examples in shards, which are made unless they are there.

    Args:
        recipe: names the source.
        kind: what the rows of the source are.
        processor_type: reads the inputs.
        run_units: where the work on each unit is done.

    Raises:
        DataError: the source cannot be read, or has too few rows.
    """
    folder, reference, report = _prepare(recipe, kind, run_units)
    assert kind.targets is not None
    processor, targets = _fitted(recipe, kind, processor_type, folder), kind.targets.load(folder)
    return LabelledData.open(reference, processor, targets, report).with_test()


def prepare_pairs(
    recipe: Recipe, processor_type: type[Processor], targets: Vectors, run_units: RunUnits = map
) -> PairData:
    """Return pairs of texts in shards, which are made unless they are there. Raises DataError as above."""
    folder, reference, report = _prepare(recipe, Pairs(), run_units)
    return PairData.open(reference, _fitted(recipe, Pairs(), processor_type, folder), targets, report).with_test()


def _fitted(recipe: Recipe, kind: SampleKind, processor_type: type[Processor], folder: UPath) -> Processor:
    """Return the processor, fitted on the sample of the training split. A built-in one is fitted once and stored."""
    columns = ColumnsConfig.model_validate_json((folder / COLUMNS_FILE).read_bytes())
    config = recipe.data.model_copy(update={"columns": columns})
    if recipe.model.source is not None or not _is_of_library(processor_type, columns):
        return _fit(recipe, kind, processor_type, folder, config)
    type_name = f"{processor_type.__module__}:{processor_type.__qualname__}"
    read = [type_name, code_revision("data"), config.model_dump(mode="json", exclude={"shards"})]
    kept = folder / f"processor-{sha256_of(json.dumps(read, sort_keys=True).encode())[:16]}"
    with suppress(StorageError):  # there is none, or a crash tore it
        verify_checksums(kept)
        return processor_type.load(kept)
    processor = _fit(recipe, kind, processor_type, folder, config)
    best_effort(partial(_keep, processor, kept), f"the processor cannot be kept in {str(kept)!r}", "preparation")
    return processor


def _is_of_library(processor_type: type[Processor], columns: ColumnsConfig) -> bool:
    """Return whether the code that a fitted processor depends on is known: not that of a project."""
    own = [processor_type.__module__, *(field.kind for field in columns.fields.values() if ":" in field.kind)]
    return all(name.startswith("app.") for name in own)


def _keep(processor: Processor, folder: UPath) -> None:
    folder.mkdir(exist_ok=True)
    processor.save(folder)
    write_checksums(folder)


def _fit(
    recipe: Recipe, kind: SampleKind, processor_type: type[Processor], folder: UPath, config: DataConfig
) -> Processor:
    inputs = Sample.load(folder / SAMPLE_FILE).inputs
    parts: list[Any] = [part for item in inputs for part in kind.parts(item)]
    columns = ShardIndex.load(folder).columns
    if columns:
        parts = list(map(json.loads, parts))
    if isinstance(columns, RowColumns):
        parts = [{name: row[name] for name in columns.names} for row in parts]
    return fit_processor(processor_type, parts, config, recipe.model.source)


def prepare_tokens(recipe: Recipe, kind: TokenKind, data_type: type[Tokens], run_units: RunUnits = map) -> Tokens:
    """Return blocks of tokens in shards, which are made unless they are there. Raises DataError as above."""
    folder, reference, report = _prepare(recipe, kind, run_units)
    return data_type.open(reference, LanguageTokenizer.load(folder), report).with_test()


def _prepare(recipe: Recipe, kind: SampleKind, run_units: RunUnits) -> tuple[UPath, ShardReference, CleaningReport]:
    storage = open_storage(recipe.storage)
    if recipe.data.stream:
        from app.data.streaming.prepare import prepare_stream  # other recipes need no broker's client

        folder = prepare_stream(recipe, kind, storage / SHARDS)
    else:
        folder = Preparer(recipe, kind, storage, run_units).prepare()
    index = ShardIndex.load(folder)
    if recipe.data.sources:
        Origins.of_shards(index.splits[TRAIN], index.splits[VALIDATION]).require_all(recipe.data)
    reference = ShardReference(location=str(folder), sha256=index.sha256, config=recipe.data.shards)
    return folder, reference, CleaningReport.load(folder)
