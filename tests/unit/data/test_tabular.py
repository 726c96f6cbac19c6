"""Tables, numbers and sets of labels: how files become tensors, and what is refused."""

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import feather
from sklearn.metrics import f1_score, mean_absolute_error, r2_score, root_mean_squared_error
from upath import UPath

from app.compile.export import export_onnx
from app.config import ColumnsConfig, DataConfig, Recipe
from app.data.labelled import LabelledData
from app.data.tabular import TabularProcessor
from app.data.targets import Classes, LabelSets, Numbers, Scale
from app.engines.onnxruntime import open_oracle
from app.models.tabular import mlp
from app.tasks import load_with_test, prepare
from app.tasks.multilabel import F1, ExactMatch
from app.tasks.regression import MeanAbsoluteError, RootMeanSquaredError, RSquared
from app.tensors import OUTPUT
from tests.examples import read_examples
from tests.preparing import rows_in, write_table
from tests.wording import refused

ROWS = [("34", "red", "10115", 0.5), ("28", "blue", "10117", 1.5), ("", "red", "10115", 2.5), ("40", "", "10119", 3.5)]
CONFIG = DataConfig(source="-", columns=ColumnsConfig(categories=["code"]))


def row(age: Any = 34, colour: Any = "red", code: Any = "10115") -> dict[str, Any]:
    return {"age": age, "colour": colour, "code": code}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A csv whose rows come five times, each with another number to predict, and most with another age."""
    lines = [
        f"{age and int(age) + repeat},{colour},{code},{number + repeat}"
        for repeat in range(5)
        for age, colour, code, number in ROWS
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["age,colour,code,price", *lines]), encoding="utf-8")
    return tmp_path / "rows.csv"


def recipe_of(table: Path, task: str = "tabular-regression", **columns: Any) -> Recipe:
    data = {"source": str(table), "columns": {"label": "price", **columns}, "test_fraction": 0.2}
    return Recipe.model_validate({"name": "rows", "task": task, "data": data, "model": {"factory": "a:b"}})


def test_a_csv_becomes_numbers_and_categories_and_is_read_as_it_was_written(table: Path, tmp_path: Path) -> None:
    recipe = recipe_of(table, categories=["code"])
    data = prepare(recipe)
    assert isinstance(data, LabelledData)
    assert sum(data.rows.values()) == 20, "equal rows with other numbers are no duplicates"
    rows = data.rows["train"]
    assert data.facts == {"num_labels": 1, "num_numbers": 1, "num_categories": 7, "num_category_columns": 2}
    batch = data.train.batch(range(rows))
    assert {name: (array.dtype, array.shape) for name, array in batch.inputs.items()} == {
        "numbers": (np.float32, (rows, 1)),
        "categories": (np.int64, (rows, 2)),
    }
    values = list(data.train.split.classes)
    assert batch.targets == pytest.approx((np.array(values) - np.mean(values)) / np.std(values))
    (answer,) = data.targets.decode(batch.targets[:1, None])
    assert answer["value"] == pytest.approx(values[0])
    data.save(UPath(tmp_path / "data"))
    loaded = load_with_test(recipe, UPath(tmp_path / "data"))
    assert loaded.fingerprint == data.fingerprint
    assert loaded.rows == data.rows
    assert np.array_equal(loaded.train.batch([3]).targets, batch.targets[3:4])


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow", "jsonl"])
def test_equal_rows_stay_whatever_their_labels_unless_a_whole_row_is_in_the_test_source(
    tmp_path: Path, suffix: str
) -> None:
    rows = [(number % 40 + 0.5, "ab"[number % 3 == 0]) for number in range(200)]
    source, tests = (tmp_path / f"{name}.{suffix}" for name in ("rows", "tests"))
    for path, given in ((source, rows), (tests, [rows[3], rows[3]])):
        write_table(path, given, ["size", "kind"])
    recipe = recipe_of(source, "tabular-classification", label="kind")
    config = recipe.data.model_copy(update={"test_source": str(tests), "test_fraction": None})
    data = prepare(recipe.model_copy(update={"data": config}))
    assert isinstance(data, LabelledData)
    found = [(item["size"], label) for part in rows_in(data).values() for item, label in part]
    assert sorted(found) == sorted([*(row for row in rows if row != rows[3]), rows[3], rows[3]])
    assert data.report.dropped == {"in_test": rows.count(rows[3])}


@pytest.mark.parametrize("number", [0.1, -1e300, 3e-310, 0.0, 1e9])
def test_a_constant_column_is_0_whatever_comes_later(number: float) -> None:
    processor = TabularProcessor.fit([row(number)] * 99, CONFIG)
    assert np.std([0.1] * 99) > 0.0, "rounding gives it a deviation"
    for later in (number, 0.2, -1e308):
        assert processor.encode([row(later)])["numbers"].tolist() == [[0.0]]


def test_a_deviation_of_rounding_is_none() -> None:
    processor = TabularProcessor.fit([row(0.3), row(0.1 + 0.2)], CONFIG)
    assert processor.encode([row(5)])["numbers"].tolist() == [[0.0]]
    # Seconds since 1970 differ by little, too.
    times = TabularProcessor.fit([row(1.7e9), row(1.7e9 + 1)], CONFIG)
    assert times.encode([row(1.7e9 + 1)])["numbers"].tolist() == [[1.0]]


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_numbers_of_any_size_are_scaled(size: float) -> None:
    processor = TabularProcessor.fit([row(-size), row(size), row(size)], CONFIG)
    (found,) = processor.encode([row(size)])["numbers"].tolist()
    assert found == pytest.approx([1 / np.sqrt(2)])
    fitted = Numbers(Scale()).fitted([-size, size], [1, 2])
    assert fitted.batch([size]).tolist() == pytest.approx(found)


@pytest.mark.parametrize("number", [1e300, -1e300])
def test_a_number_far_from_those_of_training_is_refused(number: float) -> None:
    processor = TabularProcessor.fit([row(1), row(2)], CONFIG)
    with refused("number.far", "age"):
        processor.encode([row(number)])
    with refused("number.invalid", "age"):
        processor.encode([row(10**400)])


def test_targets_that_are_all_the_same_stay_finite() -> None:
    targets = Numbers(Scale()).fitted([0.1], [99])
    assert targets.batch([0.1, 1.1]) == pytest.approx([0.0, 1.0])
    (answer,) = targets.decode(np.array([[1.0]], np.float32))
    assert answer["value"] == pytest.approx(1.1)


def test_r2_of_targets_that_are_all_the_same_is_no_number() -> None:
    given, same = torch.rand(1001, 1), torch.full((1001,), 0.7)
    assert np.isnan(RSquared().value(RSquared().sums(given, same)))


def test_unknown_values_are_the_mean_or_a_category_of_their_own() -> None:
    processor = TabularProcessor.fit([row(age, colour, code) for age, colour, code, _ in ROWS], CONFIG)
    assert processor.columns == ["age", "colour", "code"]
    known, unknown = (processor.encode([item]) for item in (row(), row(None, "green", None)))
    assert known["numbers"][0, 0] == pytest.approx(0.0, abs=1e-6), "34 is the mean of 34, 28 and 40"
    assert unknown["numbers"][0, 0] == 0.0
    assert unknown["categories"].tolist() == [[0, 3]]
    assert known["categories"].tolist() == [[2, 4]]
    outputs = mlp(num_labels=3, **processor.facts)(**{name: torch.from_numpy(array) for name, array in known.items()})
    assert outputs.shape == (1, 3)


@pytest.mark.parametrize(
    ("given", "rule", "key"),
    [
        ([1], "row.not_an_object", None),
        ({"age": 1, "colour": "red"}, "row.incomplete", "code"),
        (row(age="old"), "number.invalid", "age"),
        (row(age=True), "number.invalid", "age"),
        (row(age="inf"), "number.invalid", "age"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused(given: Any, rule: str, key: str | None) -> None:
    processor = TabularProcessor.fit([row(age, colour, code) for age, colour, code, _ in ROWS], CONFIG)
    with refused(rule, key):
        processor.encode([given])


@pytest.mark.parametrize(
    ("columns", "rule", "key"),
    [
        ({"label": "cost"}, "columns.missing", "data.columns.label"),
        ({"features": ["age", "size"]}, "columns.missing", "data.columns.features.1"),
        ({"categories": ["size"]}, "columns.unknown", "data.columns.categories"),
        ({"numbers": ["size"]}, "columns.unknown", "data.columns.numbers"),
        ({"label": "colour"}, "label.not_a_number", None),
    ],
)
def test_columns_that_do_not_fit_are_named(table: Path, columns: dict[str, Any], rule: str, key: str | None) -> None:
    with refused(rule, key):
        prepare(recipe_of(table, **columns))


def test_several_labels_are_read_from_lists_and_from_texts(tmp_path: Path) -> None:
    config = DataConfig(source="x.csv", columns=ColumnsConfig(separator=","))
    targets = LabelSets.fit(dict.fromkeys(['["bill", "late"]', "late, broken", "[]"], 1), config)
    assert targets.labels == ["bill", "broken", "late"]
    assert targets.read(["broken,bill", "[]"], config) == [[0, 1], []]
    assert targets.batch([[0, 1], []]).tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    (answer,) = targets.decode(np.array([[2.0, -2.0, 0.0]], np.float32))
    assert answer["labels"] == ["bill", "late"]
    assert answer["scores"] == pytest.approx({"bill": 0.880797, "broken": 0.119203, "late": 0.5})
    with refused("labels.unknown", "data.source"):
        targets.read(["odd"], config)
    lines = [json.dumps({"text": f"text {number}", "label": ["a"] * (number % 2) + ["b"]}) for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = prepare(
        Recipe.model_validate(
            {
                "name": "sets",
                "task": "text-multilabel",
                "data": {"source": str(tmp_path / "rows.jsonl")},
                "model": {"factory": "a:b"},
            }
        )
    )
    assert isinstance(data, LabelledData)
    assert data.targets.labels == ["a", "b"]
    parts = [part.split.take(range(len(part))) for part in (data.train, data.validation)]
    rows = [row for inputs, values in parts for row in zip(inputs, values, strict=True)]
    assert sorted(rows) == sorted((f"text {number}", [0] * (number % 2) + [1]) for number in range(20))


def test_equal_sets_of_labels_are_equal_in_every_format(tmp_path: Path) -> None:
    rows = [(f"text {number}", ["b", "a"] if number % 2 else ["c"]) for number in range(20)]
    write_table(tmp_path / "rows.jsonl", rows, ["text", "label"])
    write_table(
        tmp_path / "tests.csv", [(text, " | ".join(sorted(labels))) for text, labels in rows[:10]], ["text", "label"]
    )
    recipe = recipe_of(tmp_path / "rows.jsonl", "text-multilabel", label="label")
    config = recipe.data.model_copy(update={"test_source": str(tmp_path / "tests.csv"), "test_fraction": None})
    data: Any = prepare(recipe.model_copy(update={"data": config}))
    assert data.report.dropped == {"in_test": 10}


def test_shared_keys_apply_to_a_source_with_its_own_columns(tmp_path: Path) -> None:
    rows = [(f"{number}", f"{number % 7}.5", "red,blue" if number % 2 else "red") for number in range(40)]
    write_table(tmp_path / "first.csv", rows[:20], ["code", "size", "label"])
    write_table(tmp_path / "second.csv", rows[20:], ["code", "size", "tags"])
    own = [{"label": "label"}, {"label": "tags"}]
    sources = [
        {"source": str(tmp_path / name), "columns": columns}
        for name, columns in zip(["first.csv", "second.csv"], own, strict=True)
    ]

    def prepared(**columns: Any) -> Any:
        recipe = recipe_of(tmp_path, "tabular-multilabel", separator=",", **columns)
        data = {**recipe.data.model_dump(), "source": None, "sources": sources}
        return prepare(recipe.model_copy(update={"data": DataConfig.model_validate(data)}))

    data = prepared()
    assert data.targets.labels == ["blue", "red"]
    assert data.processor.facts["num_numbers"] == 2
    assert prepared(categories=["code"]).processor.facts["num_numbers"] == 1


@pytest.mark.parametrize(
    ("targets", "labels", "rule"),
    [
        (Classes, ["1", "01"], "labels.alike"),
        (LabelSets, ["a|1", "01"], "labels.alike"),
        (LabelSets, ["[]", ""], "labels.too_few"),
        (Numbers, ["1", "1.0"], "labels.too_few"),
    ],
)
def test_labels_that_teach_nothing_are_refused(targets: Any, labels: list[str], rule: str) -> None:
    with refused(rule, "data.source"):
        targets.fit(dict.fromkeys(labels, 1), DataConfig(source="x.csv"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_null_and_empty_labels_of_a_list_are_left_out(tmp_path: Path, name: str) -> None:
    lists = [["a", None], ["", "b", " "], [None], ["b"], ["a"]] * 8
    rows = [{"text": f"text {number}", "label": given} for number, given in enumerate(lists)]
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    elif name.endswith("jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    else:
        write_table(tmp_path / name, [(str(row["text"]), json.dumps(row["label"]), "") for row in rows])
    tree = {"name": "x", "task": "text-multilabel", "data": {"source": str(tmp_path / name)}}
    data: Any = prepare(Recipe.model_validate(tree | {"model": {"factory": "a:b"}}))
    assert data.targets.labels == ["a", "b"]
    assert len(data.train) + len(data.validation) == len(rows)


def test_the_kind_of_a_column_without_values_is_not_guessed() -> None:
    rows: list[dict[str, Any]] = [{"age": None, "size": 1}, {"age": "NA", "size": 2}]
    with refused("column.no_values", "age"):
        TabularProcessor.fit(rows, DataConfig(source="-"))
    for kind, facts in (("numbers", (2, 0)), ("categories", (1, 1))):
        named = DataConfig(source="-", columns=ColumnsConfig.model_validate({kind: ["age"]}))
        processor = TabularProcessor.fit(rows, named)
        assert (processor.facts["num_numbers"], processor.facts["num_category_columns"]) == facts
        assert processor.encode([{"age": 7, "size": 1}])["numbers"][0, 0] == (0.0 if kind == "numbers" else -1.0)


def test_metrics_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    given, true = generator.normal(size=(2, 50))
    targets = Numbers(Scale(mean=100.0, std=7.0))
    outputs, expected = torch.from_numpy(given)[:, None], torch.from_numpy(true)
    for metric, function, scale in (
        (MeanAbsoluteError(), mean_absolute_error, 7.0),
        (RootMeanSquaredError(), root_mean_squared_error, 7.0),
        (RSquared(), r2_score, 1.0),
    ):
        sums = metric.bind(targets).sums(outputs, expected)
        assert metric.value(sums) == pytest.approx(scale * function(true, given)), metric.name
    scores, labels = generator.normal(size=(40, 5)), generator.integers(0, 2, (40, 5))
    outputs, expected = torch.from_numpy(scores), torch.from_numpy(labels).float()
    assert F1().value(F1().sums(outputs, expected)) == pytest.approx(f1_score(labels, scores > 0, average="micro"))
    assert ExactMatch().value(ExactMatch().sums(outputs, expected)) == np.mean(((scores > 0) == labels).all(axis=1))


def test_the_gate_counts_a_rise_of_an_error_as_a_share_of_it() -> None:
    assert MeanAbsoluteError().drop(40.0, 41.0) == pytest.approx(0.025)
    assert F1().drop(0.9, 0.88) == pytest.approx(0.02)
    assert MeanAbsoluteError().drop(0.0, 0.1) == float("inf")


@pytest.mark.parametrize(
    "given", [[{"age": 1, "colour": "red"}, {"age": 2, "colour": "blue"}], [{"a": "x"}, {"a": "y"}]]
)
def test_a_table_with_or_without_numbers_is_exported(given: list[dict[str, Any]], tmp_path: Path) -> None:
    processor = TabularProcessor.fit(given, DataConfig(source="-"))
    model = mlp(num_labels=2, **processor.facts).eval()
    tensors = processor.encode(given)
    export_onnx(model, processor.inputs, tensors, tmp_path / "model.onnx", "fp32")
    with closing(open_oracle(tmp_path / "model.onnx")) as engine:
        three = processor.encode([*given, given[0]])
        outputs = engine.run(three)[OUTPUT]
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(array) for name, array in three.items()})
    np.testing.assert_allclose(outputs, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl"])
def test_an_empty_cell_leaves_the_other_labels_as_they_are(tmp_path: Path, suffix: str) -> None:
    table, path = pa.table({"text": ["a", "b", "c"], "label": [1, None, 2]}), tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    elif suffix == "arrow":
        feather.write_feather(table, path)
    else:
        path.write_text("\n".join(map(json.dumps, table.to_pylist())), encoding="utf-8")
    assert [label for _, label in read_examples(DataConfig(source=str(path)))] == ["1", "", "2"]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow", "jsonl"])
def test_a_column_means_the_same_in_every_format(tmp_path: Path, suffix: str) -> None:
    codes = [7, 12345678901234567, 12345678901234568, 7]
    columns = {"age": [1.0, math.nan, 2.0, 3.0], "code": codes, "label": ["a", "b"] * 2}
    table, path = pa.table(columns), tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        lines = [",".join("" if cell != cell else str(cell) for cell in row.values()) for row in table.to_pylist()]
        path.write_text("\n".join(["age,code,label", *lines]), encoding="utf-8")
    elif suffix == "parquet":
        pq.write_table(table, path)
    elif suffix == "arrow":
        feather.write_feather(table, path)
    else:
        path.write_text("\n".join(map(json.dumps, table.to_pylist())), encoding="utf-8")
    config = DataConfig(source=str(path), columns=ColumnsConfig(categories=["code"]))
    processor = TabularProcessor.fit([json.loads(item) for item, _ in read_examples(config, "row")], config)
    assert processor.facts == {"num_numbers": 1, "num_categories": 4, "num_category_columns": 1}
    places = [processor.encode([{"age": 2, "code": code}])["categories"].item() for code in codes]
    assert sorted(set(places)) == [1, 2, 3]
    assert places[0] == places[3]


def other_table(folder: Path, name: str, header: str) -> str:
    path = folder / name
    path.write_text("\n".join([header, *(f"{place}.5,red,1,{place}" for place in range(40))]), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("keys", "rule", "key"),
    [
        ({"test_source": "age,COLOUR,code,price"}, "columns.missing", "data.columns.features.1"),
        ({"second": "age,COLOUR,code,price"}, "columns.missing", "data.columns.features.1"),
        ({"second": "age,colour,code,price", "features": ["age"]}, "sources.differ", "data.sources"),
    ],
    ids=["test source", "second source", "features of its own"],
)
def test_every_table_of_a_recipe_has_the_features_of_the_first(
    tmp_path: Path, keys: dict[str, Any], rule: str, key: str
) -> None:
    first = other_table(tmp_path, "first.csv", "age,colour,code,price")
    recipe = recipe_of(Path(first))
    if "test_source" in keys:
        given = {"test_source": other_table(tmp_path, "test.csv", keys["test_source"]), "test_fraction": None}
    else:
        second = {"source": other_table(tmp_path, "second.csv", keys["second"])}
        second |= {"columns": {"label": "price", "features": keys["features"]}} if "features" in keys else {}
        given = {"source": None, "sources": [{"source": first}, second]}
    data = {**recipe.data.model_dump(), **given}
    with refused(rule, key):
        prepare(recipe.model_copy(update={"data": DataConfig.model_validate(data)}))
