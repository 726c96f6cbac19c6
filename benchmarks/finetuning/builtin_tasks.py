"""The built-in tasks, each with a recipe on real data."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.data.builtin import BUILTIN, BUILTIN_PAIRS, BUILTIN_SPANS
from benchmarks.finetuning.material import write_all

ASKED = 32
"""Rows that are sent to ``predict``."""
_MAX_LINES = 40
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
    """Return every built-in task. Data that no recipe has are written to ``folder``."""
    write_all(folder)
    lines, worst = _write_lines(folder / "lines.jsonl"), _write_worst(folder / "worst.jsonl")
    functions = _inputs("functions")
    return [
        Case(
            "text-classification",
            "recipes/reviews.yaml",
            _inputs("reviews"),
            ("train.epochs=1", "train.linear_baseline=false"),
            (*_NO_DROPOUT, "model.args.token_dropout=0.0"),
        ),
        Case("image-classification", "recipes/digits.yaml", _inputs("digits")),
        Case("tabular-classification", "recipes/breast_cancer.yaml", _inputs("breast_cancer")),
        Case("text-regression", "recipes/functions.yaml", functions, (*lines, "train.epochs=4"), _NO_DROPOUT),
        Case("tabular-regression", "recipes/diabetes.yaml", _inputs("diabetes")),
        Case("text-multilabel", "recipes/functions.yaml", functions, ("train.epochs=6",), _NO_DROPOUT),
        Case(
            "tabular-multilabel",
            "recipes/breast_cancer.yaml",
            list(map(_without_worst, _inputs("breast_cancer"))),
            worst,
        ),
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
        Case("language-modeling", "recipes/stdlib_gpt.yaml"),
        _chat(folder),
    ]


def _chat(folder: Path) -> Case:
    return Case(
        "chat",
        "benchmarks/finetuning/conversations.yaml",
        overrides=(
            f"data.source={folder / 'chats.jsonl'}",
            f"model.pretrained={folder / 'gpt'}",
            "data.block_length=128",
            "train.optimizer.lr=1.0e-3",
            "train.global_batch_size=8",
        ),
    )


def _spread(items: Sequence[Any]) -> list[Any]:
    """Return items from everywhere in a sequence."""
    return list(items[:: max(1, len(items) // ASKED)][:ASKED])


def _inputs(name: str) -> list[Any]:
    """Return inputs of built-in data as requests have them."""
    examples = BUILTIN[name]()
    chosen = _spread(examples.inputs)
    if examples.modality == "image":
        return [base64.b64encode(image).decode() for image in chosen]
    return [json.loads(row) for row in chosen] if examples.modality == "row" else chosen


def _write_lines(path: Path) -> tuple[str, ...]:
    """Write functions of the standard library with their numbers of lines, and return the keys of the recipe."""
    functions = ((code, len(code.strip().splitlines())) for code in map(str, BUILTIN["functions"]().inputs))
    rows = [json.dumps({"text": code, "label": lines}) for code, lines in functions if lines <= _MAX_LINES]
    path.write_text("\n".join(rows), encoding="utf-8")
    return (
        *("name=lines", "task=text-regression", f"data.source={path}"),
        *("train.early_stopping={metric: val_mae, mode: min}", "tune=null"),
    )


def _write_worst(path: Path) -> tuple[str, ...]:
    """Write tumours by their means and errors, and return the keys of the recipe.

    The labels are those of three worst values that are above the median.
    """
    examples = [json.loads(row) for row in BUILTIN["breast_cancer"]().inputs]
    names = [f"worst {name}" for name in ("radius", "texture", "concavity")]
    medians = {name: sorted(row[name] for row in examples)[len(examples) // 2] for name in names}
    with path.open("w", encoding="utf-8") as file:
        for row in examples:
            above = [name for name in names if row[name] > medians[name]]
            file.write(json.dumps({**_without_worst(row), "label": above}) + "\n")
    return (
        *("name=worst", "task=tabular-multilabel", f"data.source={path}"),
        *("train.early_stopping={metric: val_f1, mode: max}", "tune=null"),
    )


def _without_worst(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith("worst ")}
