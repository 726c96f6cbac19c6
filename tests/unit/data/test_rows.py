"""Rows of tables: equal cells have equal bits, in every format, in training and at the endpoint."""

import json
import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.config import Recipe
from app.data.rows import RowColumns, TableRows
from app.data.written import name_of
from app.serving.protocol.predict import PredictRequest
from app.tasks import prepare
from tests.preparing import write_table
from tests.wording import refused

COUNT, LARGE = 60, 2**53 + 1
AMOUNTS = [34.0, None, 0.1, -0.0, 1.25e3, 3e-310, 7.0, 0.1 + 0.2]
IDS = [LARGE, LARGE + 2, None, LARGE, 3]
SIZES = [1, 2, LARGE]
FLAGS = [True, False, None]
DAYS = [date(2020, 1, 2), None, date(2021, 12, 31)]
CODES = ["1.0", "1", " x ", "n/a", "007", "1_000"]
NAMES = ["amount", "id", "size", "flag", "day", "code", "price"]
KNOWN = {
    0: ("17bd94be72443abf", [2, 6, 8, 12]),
    1: ("0000000072443abf", [3, 5, 7, 12]),
    2: ("2bbbc0be4febaf3f", [0, 4, 9, 14]),
    3: ("64dcc0be72443abf", [2, 6, 8, 10]),
    5: ("64dcc0be4febaf3f", [2, 4, 9, 13]),
    6: ("e3c6b7be72443abf", [3, 6, 8, 12]),
    7: ("b978c0be72443abf", [0, 5, 7, 12]),
    9: ("0000000072443abf", [1, 6, 8, 10]),
    10: ("2bbbc0be72443abf", [2, 5, 7, 11]),
}
"""Some rows of the training split, as the bits of their numbers and the places of their categories."""


def cells(number: int) -> tuple[Any, ...]:
    """A row, whose label is its number."""
    return (*(kind[number % len(kind)] for kind in (AMOUNTS, IDS, SIZES, FLAGS, DAYS, CODES)), number)


def asked(number: int) -> Any:
    """The same row, as the endpoint gets it."""
    row = dict(zip(NAMES[:-1], cells(number)[:-1], strict=True))
    (given,) = PredictRequest.model_validate_json(json.dumps({"inputs": [row]}, default=str)).listed
    return given


def prepared(source: Path, **data: Any) -> Any:
    columns = {"label": "price", "categories": ["id"]} | data.pop("columns", {})
    tree = {"name": "rows", "task": "tabular-regression", "data": {"source": str(source), "columns": columns, **data}}
    return prepare(Recipe.model_validate(tree | {"model": {"factory": "a:b"}}))


def table(folder: Path, suffix: str = "csv") -> Path:
    path, rows = folder / f"rows.{suffix}", [cells(number) for number in range(COUNT)]
    if suffix == "jsonl":
        rows = json.loads(json.dumps(rows, default=str))
    write_table(path, rows, NAMES)
    return path


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow", "jsonl"])
def test_a_row_has_the_bits_of_its_cells_in_training_and_at_the_endpoint(tmp_path: Path, suffix: str) -> None:
    data = prepared(table(tmp_path, suffix), shards={"size": "5KB", "window": "20KB"})
    given = [int(value) for value in data.train.split.classes]
    amounts, sizes = ([float(kind[row % len(kind)] or 0) for row in given] for kind in (AMOUNTS, SIZES))
    known = [amount for amount, row in zip(amounts, given, strict=True) if AMOUNTS[row % len(AMOUNTS)] is not None]
    mean, std = float(np.mean(known)), float(np.std(known))
    places = {
        "id": ["3", str(LARGE), str(LARGE + 2)],
        "flag": ["False", "True"],
        "day": ["2020-01-02", "2021-12-31"],
        "code": ["007", "1", "1_000", "x"],
    }
    firsts = np.cumsum([0, *(1 + len(names) for names in places.values())]).tolist()
    indices = np.random.default_rng(0).permutation(len(given)).tolist()
    batch = data.train.batch(indices)
    assert batch.inputs["numbers"].dtype == np.float32
    for place, index in enumerate(indices):
        row = given[index]
        one = data.processor.encode([asked(row)])
        assert all(one[name].tobytes() == found[place].tobytes() for name, found in batch.inputs.items())
        amount, size = batch.inputs["numbers"][place].tolist()
        if AMOUNTS[row % len(AMOUNTS)] is None:
            assert math.copysign(1.0, amount) == 1.0
            assert amount == 0.0
        else:
            assert amount == pytest.approx((amounts[index] - mean) / std, rel=1e-6, abs=1e-12)
        assert size == pytest.approx((sizes[index] - np.mean(sizes)) / np.std(sizes), rel=1e-6)
        words = [str(cell).strip().removesuffix(".0") for cell in cells(row)[:-1]]
        for column, first in zip(places, firsts, strict=False):
            word, found = words[NAMES.index(column)], batch.inputs["categories"][place, list(places).index(column)]
            assert found == (first + 1 + places[column].index(word) if word in places[column] else first)
    rows = [data.train.split.inputs[index] for index in range(len(given))]
    assert rows == list(data.train.split.inputs)
    assert rows[0]["id"] == (str(IDS[given[0] % len(IDS)]) if IDS[given[0] % len(IDS)] else None)
    again = data.processor.encode(rows)
    assert all(again[name][indices].tobytes() == found.tobytes() for name, found in batch.inputs.items())


def test_encodings_have_known_bits(tmp_path: Path) -> None:
    data = prepared(table(tmp_path))
    given = [int(value) for value in data.train.split.classes]
    batch = data.train.batch([given.index(row) for row in KNOWN])
    for (numbers, categories), row, places in zip(
        KNOWN.values(), batch.inputs["numbers"], batch.inputs["categories"], strict=True
    ):
        assert row.tobytes().hex() == numbers
        assert places.tolist() == categories


def test_words_that_no_training_row_had_are_unknown(tmp_path: Path) -> None:
    processor = prepared(table(tmp_path)).processor
    new = {"amount": "?", "id": 5, "size": "1e0", "flag": "maybe", "day": "2022-01-01", "code": True}
    old = dict.fromkeys(new) | {"size": 1}
    assert [found.tolist() for found in processor.encode([new]).values()] == [
        found.tolist() for found in processor.encode([old]).values()
    ]


def test_a_part_of_rows_is_rows() -> None:
    columns = RowColumns(("n",), ("c",))
    rows = TableRows.of([{"n": "1", "c": 2.0}, {"n": None, "c": "NA"}, {"n": 3, "c": "x"}], columns)
    assert list(rows) == [{"n": 1.0, "c": "2"}, {"n": None, "c": None}, {"n": 3.0, "c": "x"}]
    part = rows[1:]
    assert isinstance(part, TableRows)
    assert [*part] == [rows[1], rows[2]]
    assert TableRows.of(rows, columns) is rows
    (other,) = TableRows.of(rows[:1], RowColumns(("c",), ()))
    assert other == {"c": 2.0}


def test_a_column_whose_numbers_are_in_the_test_source_alone_says_nothing(tmp_path: Path) -> None:
    lines = [f",{'ab'[number % 2]},{number}" for number in range(COUNT)]
    for name, rows in (("rows", lines), ("tests", ["5,a,1", "6,b,2"])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["n,c,price", *rows]), encoding="utf-8")
    data = prepared(tmp_path / "rows.csv", columns={"categories": []}, test_source=str(tmp_path / "tests.csv"))
    assert data.facts["num_category_columns"] == data.facts["num_numbers"] == 1
    for split in (data.train, data.test):
        assert {*split.batch(range(len(split))).inputs["numbers"][:, 0].tolist()} == {0.0}


@pytest.mark.parametrize("features", [None, ["size", "id"], ["size", "amount", "id"]])
def test_a_group_is_a_feature_only_if_the_recipe_names_it(tmp_path: Path, features: list[str] | None) -> None:
    columns = {"features": features}
    data = prepared(table(tmp_path), columns=columns, group_column="amount", validation_fraction=0.4)
    expected = features or [name for name in NAMES if name not in ("amount", "price")]
    assert sorted(data.processor.columns) == sorted(expected)


def test_a_table_with_nothing_but_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\n".join(["price", *map(str, range(COUNT))]), encoding="utf-8")
    with refused("columns.only_label", "data.source"):
        prepared(tmp_path / "rows.csv", columns={"categories": []})


FORMATS = {"csv": str, "jsonl": int, "parquet": float, "arrow": int}
"""What counts are written as in each format. Only csv writes amounts in two decimals."""


def written(path: Path, numbers: Sequence[int], names: Sequence[str] = ("amount", "code", "count", "price")) -> Path:
    """Write rows whose values are those of ``numbers``, in the columns' order and the types of the format."""
    count = FORMATS[path.suffix[1:]]
    rows = [
        {
            "amount": f"{number / 4:.2f}" if count is str else number / 4,
            "code": count(number % 7),
            "count": count(number),
            "price": f"{number}.50" if count is str else number + 0.5,
        }
        for number in numbers
    ]
    write_table(path, [tuple(row[name] for name in names) for row in rows], names)
    return path


def splits(data: Any) -> dict[str, list[float]]:
    found = {"train": data.train, "validation": data.validation, "test": data.test}
    return {name: sorted(split.split.classes) for name, split in found.items()}


def test_equal_rows_are_equal_in_every_format(tmp_path: Path) -> None:
    tests = {suffix: written(tmp_path / f"tests.{suffix}", range(0, COUNT, 5)) for suffix in FORMATS}
    names = ("count", "price", "code", "amount")
    for number, suffix in enumerate(FORMATS):
        source = written(tmp_path / f"rows.{suffix}", range(COUNT), names[number:] + names[:number])
        shared = {"columns": {"categories": ["code"]}, "clean": {"deduplicate": True}}
        with_test = prepared(source, **shared, test_fraction=0.2)
        assert splits(with_test) == splits(
            prepared(written(tmp_path / "same.csv", range(COUNT)), **shared, test_fraction=0.2)
        )
        for given in tests.values():
            found = prepared(source, **shared, test_source=str(given))
            assert found.report.dropped == {"in_test": COUNT // 5}, (source, given)


def test_equal_rows_of_several_formats_are_duplicates_unless_a_category_is_written_otherwise(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for suffix in FORMATS:
        written(tmp_path / "rows" / f"rows.{suffix}", range(COUNT))
    data = prepared(tmp_path / "rows", columns={"categories": ["code"]}, clean={"deduplicate": True})
    assert data.report.dropped == {"duplicate": COUNT * (len(FORMATS) - 1)}
    lines = [f"{code},{number}" for number in range(COUNT // 2) for code in ("007", "7")]
    (tmp_path / "codes.csv").write_text("\n".join(["code,price", *lines]), encoding="utf-8")
    for categories, dropped in ((["code"], {}), ([], {"duplicate": COUNT // 2})):
        data = prepared(tmp_path / "codes.csv", columns={"categories": categories}, clean={"deduplicate": True})
        assert data.report.dropped == dropped


def test_numbers_of_single_precision_are_those_that_csv_has(tmp_path: Path) -> None:
    amounts = [0.1 * number for number in range(1, COUNT + 1)]
    table = pa.table({"amount": pa.array(amounts, pa.float32()), "price": pa.array(amounts, pa.float32())})
    pq.write_table(table, tmp_path / "rows.parquet")
    lines = [f"{amount:.1f},{amount:.1f}" for amount in amounts]
    (tmp_path / "rows.csv").write_text("\n".join(["amount,price", *lines]), encoding="utf-8")
    tests = {"columns": {"categories": []}, "test_source": str(tmp_path / "rows.csv"), "clean": {"deduplicate": True}}
    with refused("split.empty", "data.source"):
        prepared(tmp_path / "rows.parquet", **tests)


@pytest.mark.parametrize("written", [("true", "false"), ("TRUE", "FALSE"), ("True", "False")])
def test_a_boolean_is_one_in_every_format_and_at_the_endpoint(tmp_path: Path, written: tuple[str, str]) -> None:
    (tmp_path / "rows").mkdir()
    lines = [f"{written[number % 2]},{written[number % 3 == 0]},{number}" for number in range(COUNT)]
    (tmp_path / "rows/a.csv").write_text("\n".join(["flag,label,n", *lines]), encoding="utf-8")
    typed = [(number % 2 == 0, number % 3 != 0, number) for number in range(COUNT, 2 * COUNT)]
    write_table(tmp_path / "rows/b.parquet", typed, ["flag", "label", "n"])
    tree = {"name": "rows", "task": "tabular-classification", "data": {"source": str(tmp_path / "rows")}}
    data: Any = prepare(Recipe.model_validate(tree | {"model": {"factory": "a:b"}}))
    assert data.targets.labels == ["False", "True"]
    assert data.facts["num_categories"] == 3
    asked = [{"flag": flag, "n": 1} for flag in (True, *written, False, "yes", None)]
    assert data.processor.encode(asked)["categories"].ravel().tolist() == [2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("task", "label"), [("tabular-classification", "label"), ("text-multilabel", "label"), ("tabular-regression", "n")]
)
def test_rows_with_booleans_are_equal_in_every_format(tmp_path: Path, task: str, label: str) -> None:
    typed = [(str(number), number % 2 == 0, number % 3 != 0, number) for number in range(COUNT)]
    names = ["text", "flag", "label", "n"]
    write_table(tmp_path / "a.csv", [(text, *(str(cell).lower() for cell in more)) for text, *more in typed], names)
    write_table(tmp_path / "b.parquet", typed[::5], names)
    given = {"source": str(tmp_path / "a.csv"), "test_source": str(tmp_path / "b.parquet"), "columns": {"label": label}}
    tree = {"name": "rows", "task": task, "data": given, "model": {"factory": "a:b"}}
    data: Any = prepare(Recipe.model_validate(tree))
    assert data.report.dropped == {"in_test": COUNT // 5}


def test_equal_texts_with_one_boolean_in_two_formats_are_no_conflict(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    typed = [(str(number), number % 2 == 0, "") for number in range(COUNT)]
    write_table(tmp_path / "rows/a.csv", [(text, str(label).lower(), "") for text, label, _ in typed])
    write_table(tmp_path / "rows/b.parquet", typed)
    tree = {"name": "rows", "task": "text-classification", "data": {"source": str(tmp_path / "rows")}}
    data: Any = prepare(Recipe.model_validate(tree | {"model": {"factory": "a:b"}}))
    assert data.report.dropped == {"duplicate": COUNT}
    assert data.targets.labels == ["False", "True"]


def test_words_beside_others_that_are_no_booleans_stay_as_they_are(tmp_path: Path) -> None:
    words = ["true", "True", "yes"]
    lines = [f"{words[number % 3]},{words[number % 3]},{number}" for number in range(COUNT)]
    (tmp_path / "rows.csv").write_text("\n".join(["word,label,n", *lines]), encoding="utf-8")
    tree = {"name": "rows", "task": "tabular-classification", "data": {"source": str(tmp_path / "rows.csv")}}
    data: Any = prepare(Recipe.model_validate(tree | {"model": {"factory": "a:b"}}))
    assert data.targets.labels == ["True", "true", "yes"]
    assert data.facts["num_categories"] == 4


@pytest.mark.parametrize(("cell", "name"), [("-0.0", "0"), ("1.0", "1"), ("-1.0", "-1"), ("007.0", "007")])
def test_a_whole_number_in_csv_is_that_of_typed_files(cell: str, name: str) -> None:
    assert name_of(cell) == name
