"""Training rows with a suspect label: found after duplicates are dropped, and before the kept rows are counted."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from app.data.examples import MAX_EXAMPLES
from app.data.label_noise import FINE, LEARNED_CHARACTERS, READ_CHARACTERS, LabelJudge, in_words, require_kept
from app.data.preparation.sample import Sample, SampleBuilder
from app.data.preparation.survey import KEPT, SPLITS, code_of
from app.data.preparation.surveys import Surveys
from app.data.preparation.work import UnitWork
from app.data.written import same_names
from app.storage import write_atomically

_MAX_SHOWN = 100
"""Maximum suspect rows of a unit that are kept for the report: some of them may be duplicates."""
_TRAIN = SPLITS.index("train")


class UnitDoubts(BaseModel):
    """The training rows of a unit with a suspect label, whether they are kept or not."""

    rows: list[int]
    shown: list[str]
    """Report lines of the first of them."""


def find_noise(
    work: UnitWork, surveys: Surveys, codes: NDArray[np.uint8], judge_units: Callable[[], None]
) -> tuple[int, list[str]]:
    """Return the number of kept training rows with a suspect label, and a few of them.

    The rows are dropped if the recipe says so. ``judge_units`` calls ``judge_unit`` for each unit. Raises DataError if
    no training text of a label would be left.
    """
    if not work.judge_file.exists():
        _learn(work, surveys, codes).save(work.judge_file)
    judge_units()
    count, examples, drops = 0, list[str](), work.encoding.config.clean.label_noise == "drop"
    before = _labels_in_training(surveys, codes) if drops else set[str]()
    for unit, start in zip(work.units, surveys.starts[:-1].tolist(), strict=True):
        doubts = UnitDoubts.model_validate_json(work.file("doubts", unit.number).read_bytes())
        rows = start + np.array(doubts.rows, np.int64)
        is_kept = codes[rows] == KEPT
        count += int(is_kept.sum())
        examples += [text for text, is_used in zip(doubts.shown, is_kept, strict=False) if is_used]
        if drops:
            codes[rows[is_kept]] = code_of("label_noise")
    if drops:
        require_kept(before, _labels_in_training(surveys, codes))
    return count, examples[:MAX_EXAMPLES]


def _labels_in_training(surveys: Surveys, codes: NDArray[np.uint8]) -> set[str]:
    found = set[str]()
    for start, survey in surveys:
        is_used = (codes[start : start + len(survey.codes)] == KEPT) & (survey.splits == _TRAIN)
        found |= {surveys.labels[label] for label in np.unique(surveys.classes[survey.labels[is_used]]).tolist()}
    return found


def _learn(work: UnitWork, surveys: Surveys, codes: NDArray[np.uint8]) -> LabelJudge:
    """Fit the models to the kept training rows in the samples of all units."""
    builder = SampleBuilder(1.0, LEARNED_CHARACTERS)
    for unit, start in zip(work.units, surveys.starts[:-1].tolist(), strict=True):
        sample = Sample.load(work.file("sample", unit.number))
        is_used = (codes[start:][sample.rows] == KEPT) & (work.unmoved_splits(unit.number)[sample.rows] == _TRAIN)
        builder.limit(sample.fraction)
        for place in np.flatnonzero(is_used).tolist():
            text = str(sample.inputs[place])[:READ_CHARACTERS]
            builder.keep(start + int(sample.rows[place]), text, float(sample.fractions[place]))
    learned = builder.build()
    labels, keys = np.empty(len(learned.rows), np.int64), np.empty(len(learned.rows), np.uint64)
    for start, survey in surveys:
        mine = slice(*np.searchsorted(learned.rows, [start, start + len(survey.codes)]))
        rows = learned.rows[mine] - start
        labels[mine], keys[mine] = surveys.classes[survey.labels[rows]], survey.low[rows]
    return LabelJudge.fit([str(item) for item in learned.inputs], labels, keys, surveys.labels)


def judge_unit(work: UnitWork, number: int) -> int:
    """Write the ``UnitDoubts`` of a unit, and return its number. Raises DataError if the source changed."""
    judge, surveys = LabelJudge.load(work.judge_file), list(work.survey_of(number))
    names = judge.labels.tolist()
    class_of = dict(zip(names, same_names(names), strict=True))
    # -1 means no label.
    table = np.array([*(class_of[label] for label in work.facts(number).label_names), FINE])
    classes = np.concatenate([table[:0], *(table[survey.labels] for survey in surveys)])
    keys = np.concatenate([np.empty(0, np.uint64), *(survey.low for survey in surveys)])
    is_judged = (work.unmoved_splits(number) == _TRAIN) & (classes != FINE)
    doubts = UnitDoubts(rows=[], shown=[])
    for start, inputs, _ in work.converted(number):
        rows = start + np.flatnonzero(is_judged[start : start + len(inputs)])
        texts = [str(inputs[row - start]) for row in rows.tolist()]
        suggested = judge.suggest(texts, classes[rows], keys[rows])
        for place in np.flatnonzero(suggested != FINE).tolist():
            doubts.rows.append(int(rows[place]))
            if len(doubts.shown) < _MAX_SHOWN:
                label, other = (judge.labels[index] for index in (classes[rows[place]], suggested[place]))
                doubts.shown.append(in_words(texts[place], label, other))
    write_atomically(work.file("doubts", number), doubts.model_dump_json().encode())
    return number
