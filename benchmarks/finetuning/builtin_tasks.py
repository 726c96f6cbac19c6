"""The built-in tasks, each with a recipe on real data."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.data.builtin import BUILTIN, BUILTIN_PAIRS, BUILTIN_SPANS
from benchmarks.finetuning.material import write_all

ASKED = 32
"""Rows that are sent to ``predict``."""
_NO_DROPOUT = ("model.args.dropout=0.0", "model.args.embedding_dropout=0.0")


@dataclass(frozen=True)
class Case:
    """A task with its recipe."""

    task: str
    recipe: str
    inputs: Sequence[Any] = ()
    """What ``predict`` is asked: texts, images in base64, or rows as objects. Empty: the task is not served."""

    overrides: tuple[str, ...] = ()
    without_dropout: tuple[str, ...] = ()
    """Overrides for the comparison of ranks. Each rank draws dropout of its own."""


def cases(folder: Path) -> list[Case]:
    """Return every built-in task. ``folder`` gets the conversations and the model of ``chat``."""
    return [*_of_texts(), *_of_images_and_tables(), *_of_fields(), *_language_models(folder)]


def _of_texts() -> list[Case]:
    return [
        Case(
            "text-classification",
            "recipes/reviews.yaml",
            _inputs("reviews"),
            ("train.epochs=1", "train.linear_baseline=false"),
            (*_NO_DROPOUT, "model.args.token_dropout=0.0"),
        ),
        Case("text-regression", "recipes/function_lines.yaml", _inputs("function_lines"), ("train.epochs=4",)),
        Case("text-multilabel", "recipes/functions.yaml", _inputs("functions"), ("train.epochs=6",), _NO_DROPOUT),
        Case(
            "sentence-embedding",
            "recipes/docstrings.yaml",
            _spread([text for text, _ in BUILTIN_PAIRS["docstrings"]()]),
            ("train.epochs=2",),
            _NO_DROPOUT,
        ),
        Case(
            "token-classification",
            "recipes/python_tokens.yaml",
            _spread([text for text, _ in BUILTIN_SPANS["python"]()]),
            ("train.epochs=4",),
            _NO_DROPOUT,
        ),
    ]


def _of_images_and_tables() -> list[Case]:
    return [
        Case("image-classification", "recipes/digits.yaml", _inputs("digits")),
        Case("tabular-classification", "recipes/breast_cancer.yaml", _inputs("breast_cancer")),
        Case("tabular-regression", "recipes/diabetes.yaml", _inputs("diabetes")),
        Case("tabular-multilabel", "recipes/tumour_extremes.yaml", _inputs("tumour_extremes")),
    ]


def _of_fields() -> list[Case]:
    """One recipe serves three tasks: a digit is a class, a number, or the only label of a set."""
    words = "model.args.encoders.words.args"
    return [
        Case(
            f"multimodal-{kind}",
            "recipes/digit_halves.yaml",
            _inputs("digit_halves"),
            (
                f"task=multimodal-{kind}",
                f"name=digit_halves_{kind}",
                f"train.epochs={epochs}",
                f"train.early_stopping.metric=val_{metric}",
                f"train.early_stopping.mode={mode}",
                "tune=null",
            ),
            (f"{words}.dropout=0.0", f"{words}.embedding_dropout=0.0", "model.args.dropout=0.0"),
        )
        for kind, metric, mode, epochs in (
            ("classification", "accuracy", "max", 6),
            ("regression", "mae", "min", 6),
            ("multilabel", "f1", "max", 20),
        )
    ]


def _language_models(folder: Path) -> list[Case]:
    write_all(folder)
    chat = (
        f"data.source={folder / 'chats.jsonl'}",
        f"model.pretrained={folder / 'gpt'}",
        "data.block_length=128",
        "train.optimizer.lr=1.0e-3",
        "train.global_batch_size=8",
    )
    return [
        Case("language-modeling", "recipes/stdlib_gpt.yaml"),
        Case("chat", "benchmarks/finetuning/conversations.yaml", overrides=chat),
    ]


def _spread(items: Sequence[Any]) -> list[Any]:
    """Return items from everywhere in a sequence."""
    return list(items[:: max(1, len(items) // ASKED)][:ASKED])


def _inputs(name: str) -> list[Any]:
    """Return inputs of built-in data as requests have them."""
    return list(map(_as_json, _spread(BUILTIN[name]().inputs)))


def _as_json(item: Any) -> Any:
    """Return a text, a file in base64, or a row or record of these and numbers."""
    if isinstance(item, Mapping):
        return {key: _as_json(value) for key, value in item.items()}
    return base64.b64encode(item).decode() if isinstance(item, bytes) else item
