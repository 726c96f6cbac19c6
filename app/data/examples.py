"""Raw examples, as a source gives them, and their cleaning before the split."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel
from upath import UPath

from app.config import CleanConfig
from app.storage import write_atomically

Modality = Literal["text", "image", "audio", "row", "record"]
Input = str | bytes
"""A text; an image or a recording, as the content of a file; or, until they are written to shards, a row of a table or
a record as a JSON object, with files in base64.
"""

Natural = Input | Mapping[str, Any]
"""An input as a request has it, where a file may be in base64, and a row or record is an object; or a row of shards."""


_REPORT_FILE = "cleaning.json"
MAX_EXAMPLES = 10
"""Dropped items of each reason that are shown."""
Reason = Literal[
    "not_text", "empty", "unlabelled", "duplicate", "conflicting", "in_test", "no_answer",
    "too_short", "too_long", "near_duplicate", "unreadable", "malformed", "unknown_label", "held_out", "symbols",
    "language", "in_validation", "label_noise", "untested",
]  # fmt: skip
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True)
class Examples:
    """Inputs with the label of each, in the order of the source."""

    modality: Modality
    inputs: list[Any]
    """Texts, contents of files, rows or records."""
    labels: list[str]

    def __len__(self) -> int:
        return len(self.inputs)

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        return zip(self.inputs, self.labels, strict=True)


_WORDS: dict[Reason, str] = {
    "not_text": "not text in UTF-8",
    "empty": "empty",
    "unlabelled": "without a label",
    "duplicate": "exact duplicates",
    "conflicting": "under several labels",
    "in_test": "also in data.test_source",
    "in_validation": "also in data.validation_source",
    "no_answer": "without an answer in the first data.block_length tokens",
    "too_short": "shorter than data.clean.min_length",
    "too_long": "longer than data.clean.max_length",
    "near_duplicate": "near duplicates",
    "unreadable": "not a picture that can be decoded",
    "malformed": "not a JSON object with the columns",
    "unknown_label": "with a label that data.stream.labels does not name",
    "held_out": "held out after the first micro-epoch",
    "symbols": "over data.clean.max_symbol_share",
    "language": "in other languages than data.clean.languages",
    "label_noise": "with a label that is likely wrong",
    "untested": "more in data.test_source than are tested, or with a text of another pair",
}


def in_words(reason: Reason) -> str:
    """Return what a dropped item is."""
    return _WORDS[reason]


class CleaningReport(BaseModel):
    """The number of items given, kept, and dropped for each reason."""

    what: Literal["examples", "documents", "conversations", "pairs", "texts", "messages"]
    given: int
    kept: int
    dropped: dict[Reason, int]
    cut: int = 0
    """Conversations that are kept in part."""
    suspected: int = 0
    """Number of training examples that are kept although their label is likely wrong."""
    columns: dict[str, str] = {}
    """Of a table: what each column is, and why."""
    examples: dict[Reason, list[str]] = {}
    """A few of those dropped for each reason, or suspected, shortened."""

    def __add__(self, later: "CleaningReport") -> "CleaningReport":
        """Return the report of both, with the examples of the earlier one first."""
        examples = {
            reason: [*self.examples.get(reason, ()), *later.examples.get(reason, ())][:MAX_EXAMPLES]
            for reason in REASONS
            if reason in self.examples or reason in later.examples
        }
        dropped = dict(Counter(self.dropped) + Counter(later.dropped))
        given, kept, cut = self.given + later.given, self.kept + later.kept, self.cut + later.cut
        suspected = self.suspected + later.suspected
        return CleaningReport(
            what=self.what, given=given, kept=kept, dropped=dropped, cut=cut, suspected=suspected, examples=examples
        )

    @property
    def reasons(self) -> dict[str, int]:
        """How many were dropped, by the reason in words."""
        return {words: self.dropped[reason] for reason, words in _WORDS.items() if reason in self.dropped}

    @property
    def shown(self) -> list[tuple[str, str]]:
        """The examples, each after its reason in words."""
        return [(words, text) for reason, words in _WORDS.items() for text in self.examples.get(reason, ())]

    def __str__(self) -> str:
        reasons = [f"{count:,} {words}" for words, count in self.reasons.items()]
        cut = f"; cut at data.block_length tokens: {self.cut:,}" if self.cut else ""
        columns = "".join(f"\ncolumn {name}: {kind}" for name, kind in self.columns.items() if kind != "numbers")
        suspected = f"; kept with a label that is likely wrong: {self.suspected:,}" if self.suspected else ""
        return (
            f"{self.given:,} {self.what}, {self.kept:,} kept; dropped: {', '.join(reasons) or 'none'}{cut}{suspected}"
            f"{columns}"
        )

    def save(self, folder: UPath) -> None:
        """Write the report for ``load``."""
        write_atomically(folder / _REPORT_FILE, self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        """Return the report that ``save`` wrote."""
        return cls.model_validate_json((folder / _REPORT_FILE).read_bytes())


def refuse(item: Input, config: CleanConfig) -> Reason | None:
    """Return why a text is dropped by itself; None if it is not. Pictures never are.

    Raises:
        RecipeError: ``config`` has languages that cannot be detected.
    """
    if isinstance(item, bytes):
        return None
    if config.min_length is not None and len(item) < config.min_length:
        return "too_short"
    if config.max_length is not None and len(item) > config.max_length:
        return "too_long"
    if config.max_symbol_share is not None or config.languages is not None:
        from app.data.text_filters import has_many_symbols, language_of  # most recipes need neither

        if config.max_symbol_share is not None and has_many_symbols(item, config.max_symbol_share):
            return "symbols"
        if config.languages is not None and language_of(item, tuple(config.languages)) not in config.languages:
            return "language"
    return None
