"""Real texts and pictures for models that no recipe trains: what calibrates them, and what they are compared on."""

import ast
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from app.data.builtin import BUILTIN, BUILTIN_DOCUMENTS

_DOCSTRINGS, _REVIEWS = 500, 250
_CUTS_A_PHOTOGRAPH, _SIDE = 64, 224


def write_sentences(path: Path) -> None:
    """English and Chinese, from a few words to a few hundred, as a table of texts and languages."""
    documented = sorted(set(_docstrings()))
    reviews = sorted(set(map(str, BUILTIN["reviews"]().inputs)))
    rows = [(text, "en") for text in _spread_out(documented, _DOCSTRINGS)]
    rows += [(text, "zh") for text in _spread_out(reviews, _REVIEWS)]
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows), "utf-8")


def write_pictures(folder: Path) -> None:
    """Cuts of the two photographs that scikit-learn carries, a folder each, of the size that ResNet-50 takes."""
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images()
    random = np.random.default_rng(0)
    for name, photograph in zip(photographs.filenames, photographs.images, strict=True):
        target = folder / Path(name).stem
        target.mkdir(parents=True)
        height, width, _ = photograph.shape
        for number in range(_CUTS_A_PHOTOGRAPH):
            top, left = random.integers(height - _SIDE), random.integers(width - _SIDE)
            cut = photograph[top : top + _SIDE, left : left + _SIDE]
            Image.fromarray(cut).save(target / f"{number:03}.png")


def _docstrings() -> Iterator[str]:
    """Yield the docstrings in every fourth file of the standard library, without the white space of the source."""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for source in islice(BUILTIN_DOCUMENTS["stdlib"](), 0, None, 4):
        try:
            module = ast.parse(source)
        except (SyntaxError, ValueError):
            continue  # templates and samples of old syntax
        for node in ast.walk(module):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield " ".join(text.split())


def _spread_out(texts: list[str], count: int) -> list[str]:
    """Every so many of them, the same each time."""
    return texts[:: max(1, len(texts) // count)][:count]
