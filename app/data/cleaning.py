"""Cleaning, before the split: what is dropped and why."""

from collections import Counter
from collections.abc import Collection
from typing import Literal, Self

from pydantic import BaseModel
from upath import UPath

from app.config import CleanConfig
from app.data.examples import Examples, Input
from app.storage import write_atomically

_REPORT_FILE = "cleaning.json"
Reason = Literal["not_text", "empty", "unlabelled", "duplicate", "conflicting", "in_test"]
_WORDS: dict[Reason, str] = {
    "not_text": "not text in UTF-8",
    "empty": "empty",
    "unlabelled": "without a label",
    "duplicate": "exact duplicates",
    "conflicting": "under several labels",
    "in_test": "also in data.test_source",
}


class CleaningReport(BaseModel):
    """How many came, stayed and went, by the reason why they went."""

    what: Literal["examples", "documents"]
    given: int
    kept: int
    dropped: dict[Reason, int]

    def __str__(self) -> str:
        reasons = [f"{self.dropped[reason]:,} {words}" for reason, words in _WORDS.items() if reason in self.dropped]
        return f"{self.given:,} {self.what}, {self.kept:,} kept; dropped: {', '.join(reasons) or 'none'}"

    def save(self, folder: UPath) -> None:
        """Write it for ``load``."""
        write_atomically(folder / _REPORT_FILE, self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """The report that ``save`` wrote."""
        return cls.model_validate_json((folder / _REPORT_FILE).read_bytes())


def clean(
    examples: Examples, config: CleanConfig, in_test: Collection[Input] = frozenset()
) -> tuple[Examples, CleaningReport]:
    """Drop what would teach or measure wrongly; the first of several equal inputs stays.

    An input that stands under several labels has no right answer: all of its copies go. Texts are
    compared without the white space around them. Cleaning comes before the split because a duplicate
    on both sides of it would be a validation example that the model was trained on. For the same reason
    examples whose input is in ``in_test``, the cleaned test inputs, are dropped, whatever their label.
    """
    labels_of: dict[Input, set[str]] = {}
    for given, label in examples:
        if label:
            labels_of.setdefault(_strip(given), set()).add(label)
    seen: set[Input] = set()
    dropped: Counter[Reason] = Counter()
    inputs, labels = [], []
    for given, label in examples:
        key = _strip(given)
        if reason := "in_test" if key in in_test else _reason_to_drop(key, label, labels_of, seen, config):
            dropped[reason] += 1
        else:
            inputs.append(key)
            labels.append(label)
        if label:
            seen.add(key)
    report = CleaningReport(what="examples", given=len(examples), kept=len(inputs), dropped=dropped)
    return Examples(examples.modality, inputs, labels), report


def _strip(given: Input) -> Input:
    return given.strip() if isinstance(given, str) else given


def _reason_to_drop(
    key: Input, label: str, labels_of: dict[Input, set[str]], seen: set[Input], config: CleanConfig
) -> Reason | None:
    if not key and config.drop_empty:
        return "empty"
    if not label:
        return "unlabelled"
    if key in seen and config.deduplicate:
        return "duplicate"
    if len(labels_of[key]) > 1:
        return "conflicting"
    return None
