"""Prepared data in shards, from a recipe."""

from dataclasses import replace

from upath import UPath

from app.config import ColumnsConfig, Recipe
from app.data.examples import CleaningReport
from app.data.labelled import LabelledData, test_split
from app.data.language import LanguageData
from app.data.origins import Origins
from app.data.preparation.prepare import COLUMNS_FILE, Preparer, RunUnits
from app.data.preparation.sample import SAMPLE_FILE, Sample
from app.data.preparation.samples import Documents, SampleKind
from app.data.prepared import TRAIN, VALIDATION
from app.data.processor import Processor, fit_processor
from app.data.sharded import ShardReference
from app.data.shards import ShardIndex
from app.data.tokenizer import LanguageTokenizer
from app.storage import open_storage


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
    columns = ColumnsConfig.model_validate_json((folder / COLUMNS_FILE).read_bytes())
    config = recipe.data.model_copy(update={"columns": columns})
    sample = Sample.load(folder / SAMPLE_FILE)
    processor = fit_processor(processor_type, sample.inputs, config, recipe.model.source)
    assert kind.targets is not None
    targets = kind.targets.load(folder)
    data = LabelledData.open(reference, processor, targets, report)
    return replace(data, test=test_split(reference, processor, targets))


def prepare_documents(recipe: Recipe, run_units: RunUnits = map) -> LanguageData:
    """Return blocks of tokens in shards, which are made unless they are there. Raises DataError as above."""
    folder, reference, report = _prepare(recipe, Documents(), run_units)
    return LanguageData.open(reference, LanguageTokenizer.load(folder), report)


def _prepare(recipe: Recipe, kind: SampleKind, run_units: RunUnits) -> tuple[UPath, ShardReference, CleaningReport]:
    folder = Preparer(recipe, kind, open_storage(recipe.storage), run_units).prepare()
    index = ShardIndex.load(folder)
    if recipe.data.sources:
        Origins.of_shards(index.splits[TRAIN], index.splits[VALIDATION]).require_all(recipe.data)
    reference = ShardReference(location=str(folder), sha256=index.sha256, config=recipe.data.shards)
    return folder, reference, CleaningReport.load(folder)
