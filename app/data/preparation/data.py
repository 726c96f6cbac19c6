"""Prepared data in shards, from a recipe."""

from dataclasses import replace

from app.config import Recipe
from app.data.examples import CleaningReport
from app.data.origins import Origins
from app.data.preparation.prepare import Preparer, RunUnits
from app.data.preparation.sample import SAMPLE_FILE, Sample
from app.data.prepared import TRAIN, VALIDATION, PreparedData
from app.data.processor import Processor, fit_processor
from app.data.sharded import ShardReference
from app.data.sharded_data import ShardedLabelledData, ShardedLanguageData, test_split
from app.data.shards import ShardIndex
from app.data.sources.units import Contents
from app.data.targets import Classes
from app.data.tokenizer import LanguageTokenizer
from app.storage import open_storage


def prepare_sharded(recipe: Recipe, processor_type: type[Processor] | None, run_units: RunUnits = map) -> PreparedData:
    """Return the recipe's data in shards, which are made unless they are there.

    Args:
        recipe: with ``data.shards``.
        processor_type: of labelled examples. None: language modelling.
        run_units: where the work on each unit is done.

    Raises:
        DataError: the source cannot be read, or has too few rows.
    """
    contents: Contents = processor_type.modality if processor_type else "language-modeling"
    folder = Preparer(recipe, contents, open_storage(recipe.storage), run_units).prepare()
    assert recipe.data.shards is not None
    index = ShardIndex.load(folder)
    reference = ShardReference(location=str(folder), sha256=index.sha256, config=recipe.data.shards)
    report = CleaningReport.load(folder)
    if recipe.data.sources:
        Origins.of_shards(index.splits[TRAIN], index.splits[VALIDATION]).require_all(recipe.data)
    if processor_type is None:
        return ShardedLanguageData.open(reference, LanguageTokenizer.load(folder), report)
    sample = Sample.load(folder / SAMPLE_FILE)
    processor = fit_processor(processor_type, sample.inputs, recipe.data, recipe.model.source)
    targets = Classes.load(folder)
    data = ShardedLabelledData.open(reference, processor, targets, report)
    return replace(data, test=test_split(reference, processor, targets))
