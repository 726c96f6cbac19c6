"""Preparation of labelled examples in memory: loaded, cleaned and split."""

import math
from dataclasses import replace
from functools import reduce

from app.config import DataConfig
from app.data.examples import MAX_EXAMPLES, CleaningReport, Examples, Input, clean
from app.data.labelled import LabelledData, LabelledDataset, Split
from app.data.origins import Origins
from app.data.processor import Processor, fit_processor
from app.data.sources.labelled import load_examples
from app.data.targets import Classes, Targets
from app.errors import DataError


def prepare(
    config: DataConfig,
    processor_type: type[Processor],
    pretrained: str | None = None,
    targets_type: type[Targets] = Classes,
) -> LabelledData:
    """Load, clean and split the examples, and fit the processor and the targets. Equal configurations give equal data.

    ``pretrained`` is the location of a model whose processor is used instead, if the processor's type can read it.

    Raises:
        DataError: the source cannot be read, has inputs or labels of a kind that the task does not take, or has too few
            examples.
    """
    examples, origin_of = _load_sources(config, processor_type, targets_type)
    # The test inputs come first, because cleaning drops the examples that are among them.
    test_examples = _load_test_source(config, processor_type, targets_type) if config.test_source else None
    data = prepare_examples(examples, config, processor_type, targets_type, pretrained, test_examples)
    origins = ([origin_of.get(item, 0) for item in part.split.inputs] for part in (data.train, data.validation))
    return replace(data, origins=Origins.of(config, *origins))


def prepare_examples(
    examples: Examples,
    config: DataConfig,
    processor_type: type[Processor],
    targets_type: type[Targets] = Classes,
    pretrained: str | None = None,
    test_examples: Examples | None = None,
) -> LabelledData:
    """Clean and split examples, and fit the processor and the targets. For tasks that read sources of their own.

    Args:
        examples: those of ``data.source``.
        config: how they are cleaned and split.
        processor_type: reads the inputs.
        targets_type: reads the labels.
        pretrained: as in ``prepare``.
        test_examples: the cleaned examples of ``data.test_source``.

    Raises:
        DataError: there are too few examples, or labels of a kind that the targets do not take.
    """
    in_test = frozenset(test_examples.inputs if test_examples else ())
    config, columns = _with_kinds(config, examples, test_examples)
    examples, report = clean(examples, config.clean, in_test, _labels_agree(processor_type, targets_type))
    report = report.model_copy(update={"columns": columns})
    targets = targets_type.fit(examples.labels, config)
    train, validation = split(examples, targets, config)
    if test_examples:
        test: Split | None = Split(test_examples.inputs, targets.read(test_examples.labels, config, "test_source"))
    else:
        train, test = _hold_out(train, len(examples), targets, config)
    if config.clean.label_noise:
        train, report = _judge_labels(train, targets, config, report)

    processor = fit_processor(processor_type, train.inputs, config, pretrained)
    targets = targets.fitted(train.classes)
    return LabelledData(
        LabelledDataset(train, processor, targets),
        LabelledDataset(validation, processor, targets),
        targets,
        processor,
        report,
        LabelledDataset(test, processor, targets) if test else None,
    )


def _with_kinds(config: DataConfig, *parts: Examples | None) -> tuple[DataConfig, dict[str, str]]:
    """Return the recipe with the kinds of all columns of a table, and what each column is."""
    if not any(part.kinds for part in parts if part):
        return config, {}
    from app.data.kinds import in_words, merge_kinds, resolve_categories  # other data do not need pyarrow

    kinds = reduce(merge_kinds, (part.kinds for part in parts if part))
    columns = resolve_categories(kinds, config.columns)
    return config.model_copy(update={"columns": columns}), in_words(kinds, config.columns)


def _judge_labels(
    train: Split, targets: Targets, config: DataConfig, report: CleaningReport
) -> tuple[Split, CleaningReport]:
    """Look for training texts whose label is likely wrong, and drop them if the recipe says so.

    Raises:
        DataError: the inputs are not texts with one label each, or no training text of a label is left.
    """
    from app.data.label_noise import judge_texts, require_kept  # scikit-learn takes a second to import

    texts = [item for item in train.inputs if isinstance(item, str)]
    if not targets.labels or not all(isinstance(value, int) for value in train.classes) or len(texts) < len(train):
        raise DataError("data.clean.label_noise is for texts with one label each: leave it out")
    doubts = judge_texts(texts, train.classes, targets.labels)
    report = report.model_copy(update={"examples": {"label_noise": list(doubts.values())[:MAX_EXAMPLES]}})
    if config.clean.label_noise == "report":
        return train, report.model_copy(update={"suspected": len(doubts)})
    left = Split(*train.take([row for row in range(len(train)) if row not in doubts]))
    require_kept(*([targets.labels[value] for value in set(split.classes)] for split in (train, left)))
    dropped = report.dropped | ({"label_noise": len(doubts)} if doubts else {})
    return left, report.model_copy(update={"kept": report.kept - len(doubts), "dropped": dropped})


def _load_sources(
    config: DataConfig, processor_type: type[Processor], targets_type: type[Targets]
) -> tuple[Examples, dict[Input, int]]:
    """Return the examples of all sources, and the index of each input's source if there are several."""
    whole = Examples(processor_type.modality, [], [])
    origin_of: dict[Input, int] = {}
    for place, one in enumerate(config.each_source()):
        examples = load_examples(one, processor_type.modality, label_kind=targets_type.label_kind)
        _require_modality(examples, processor_type, f"data.source {one.source!r}")
        whole.extend(examples)
        if config.sources:
            for item in examples.inputs:
                # Cleaning keeps the first of equal inputs, without the white space around texts.
                origin_of.setdefault(item.strip() if isinstance(item, str) else item, place)
    return whole, origin_of


def split(examples: Examples, targets: Targets, config: DataConfig) -> tuple[Split, Split]:
    """Return a seeded split, stratified if the targets are classes."""
    classes = f" of {len(targets.labels)} classes" if targets.labels else ""
    return _split_off(
        Split(examples.inputs, targets.read(examples.labels, config)),
        config.validation_fraction,
        targets,
        config.seed,
        f"{len(examples)} examples{classes} cannot be split with data.validation_fraction "
        f"{config.validation_fraction}: give more examples or another fraction",
    )


def _hold_out(train: Split, num_examples: int, targets: Targets, config: DataConfig) -> tuple[Split, Split | None]:
    """Hold out ``data.test_fraction`` of all examples from the training split; the validation split is unchanged."""
    if config.test_fraction is None:
        return train, None
    size = math.ceil(config.test_fraction * num_examples)
    return _split_off(
        train,
        size,
        targets,
        config.seed,
        f"{len(train)} examples remain outside the validation split, and {size} of them cannot be held out with "
        f"data.test_fraction {config.test_fraction}: each class needs at least one in every split; give more "
        "examples or another fraction",
    )


def _split_off(whole: Split, size: float, targets: Targets, seed: int, failure: str) -> tuple[Split, Split]:
    """Split off a share or a number of the examples, stratified if the targets are classes.

    Raises:
        DataError: there are too few examples. Its message is ``failure``.
    """
    # The import takes a second, and other tasks do not need it.
    from sklearn.model_selection import train_test_split

    strata = targets.strata(whole.classes)
    try:
        parts = train_test_split(whole.inputs, whole.classes, test_size=size, random_state=seed, stratify=strata)
    except ValueError as error:
        raise DataError(failure) from error
    return Split(parts[0], parts[2]), Split(parts[1], parts[3])


def _load_test_source(config: DataConfig, processor_type: type[Processor], targets_type: type[Targets]) -> Examples:
    """Load the examples of ``data.test_source``, cleaned on their own."""
    examples = load_examples(config, processor_type.modality, "data.test_source", targets_type.label_kind)
    _require_modality(examples, processor_type, f"data.test_source {config.test_source!r}")
    return clean(examples, config.clean, labels_agree=_labels_agree(processor_type, targets_type))[0]


def _labels_agree(processor_type: type[Processor], targets_type: type[Targets]) -> bool:
    """Return whether equal inputs with several labels are errors. A record may lack the field that tells them apart."""
    return targets_type.labels_agree and processor_type.modality != "record"


def _require_modality(examples: Examples, processor_type: type[Processor], source: str) -> None:
    if examples.modality != processor_type.modality:
        raise DataError(
            f"{source} holds {examples.modality}s, the task takes {processor_type.modality}s: change one of them"
        )
