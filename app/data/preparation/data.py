"""Prepared data in shards, from a recipe."""

from app.config import Recipe
from app.data.examples import CleaningReport
from app.data.labelled import LabelledDataset, fit_processor
from app.data.origins import Origins
from app.data.preparation.prepare import SAMPLE_FILE, Preparer, RunUnits
from app.data.preparation.survey import Sample
from app.data.prepared import TEST, TRAIN, VALIDATION, PreparedData
from app.data.processor import Processor
from app.data.sharded import ShardedBlocks, ShardedSplit, ShardReference
from app.data.sharded_data import ShardedLabelledData, ShardedLanguageData
from app.data.shards import ShardIndex
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
    modality = processor_type.modality if processor_type else "text"
    folder = Preparer(recipe, modality, open_storage(recipe.storage), run_units).prepare()
    assert recipe.data.shards is not None
    index = ShardIndex.load(folder)
    reference = ShardReference(location=str(folder), sha256=index.sha256, config=recipe.data.shards)
    report = CleaningReport.load(folder)
    if recipe.data.sources:
        Origins.of_shards(index.splits[TRAIN], index.splits[VALIDATION]).require_all(recipe.data)
    if processor_type is None:
        tokenizer = LanguageTokenizer.load(folder)
        length = recipe.data.block_length
        train, validation = (ShardedBlocks(reference.open(split), length) for split in (TRAIN, VALIDATION))
        return ShardedLanguageData(train, validation, tokenizer, report, reference)
    sample = Sample.load(folder / SAMPLE_FILE)
    processor = fit_processor(processor_type, sample.inputs, recipe.data, recipe.model.source)
    targets, test = Classes.load(folder), reference.open(TEST)
    return ShardedLabelledData(
        train=LabelledDataset(ShardedSplit(reference.open(TRAIN)), processor, targets),
        validation=LabelledDataset(ShardedSplit(reference.open(VALIDATION)), processor, targets),
        targets=targets,
        processor=processor,
        report=report,
        test=LabelledDataset(ShardedSplit(test), processor, targets) if len(test) else None,
        origins=reference.origins,
        reference=reference,
    )
