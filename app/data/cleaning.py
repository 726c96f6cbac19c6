"""Cleaning, before the split: what is dropped and why."""

from collections import Counter

from pydantic import BaseModel

from app.config import CleanConfig
from app.data.examples import Examples, Input


class CleaningReport(BaseModel):
    """How many examples came, stayed and went, by the reason why they went."""

    given: int
    empty: int = 0
    unlabelled: int = 0
    duplicate: int = 0
    conflicting: int = 0
    kept: int

    def __str__(self) -> str:
        reasons = [
            f"{count:,} {reason}"
            for count, reason in (
                (self.empty, "empty"),
                (self.unlabelled, "without a label"),
                (self.duplicate, "exact duplicates"),
                (self.conflicting, "under several labels"),
            )
            if count
        ]
        return f"{self.given:,} examples, {self.kept:,} kept; dropped: {', '.join(reasons) or 'none'}"


def clean(examples: Examples, config: CleanConfig) -> tuple[Examples, CleaningReport]:
    """Drop what would teach or measure wrongly; the first of several equal inputs stays.

    An input that stands under several labels has no right answer: all of its copies go. Texts are
    compared without the white space around them. Cleaning comes before the split because a duplicate
    on both sides of it would be a validation example that the model was trained on.
    """
    labels_of: dict[Input, set[str]] = {}
    for given, label in examples:
        if label:
            labels_of.setdefault(_strip(given), set()).add(label)
    seen: set[Input] = set()
    dropped: Counter[str] = Counter()
    inputs, labels = [], []
    for given, label in examples:
        key = _strip(given)
        if reason := _reason_to_drop(key, label, labels_of, seen, config):
            dropped[reason] += 1
        else:
            inputs.append(key)
            labels.append(label)
        if label:
            seen.add(key)
    report = CleaningReport(given=len(examples), kept=len(inputs), **dropped)
    return Examples(examples.modality, inputs, labels), report


def _strip(given: Input) -> Input:
    return given.strip() if isinstance(given, str) else given


def _reason_to_drop(
    key: Input, label: str, labels_of: dict[Input, set[str]], seen: set[Input], config: CleanConfig
) -> str | None:
    if not key and config.drop_empty:
        return "empty"
    if not label:
        return "unlabelled"
    if key in seen and config.deduplicate:
        return "duplicate"
    if len(labels_of[key]) > 1:
        return "conflicting"
    return None
