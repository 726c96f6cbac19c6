"""Records, samples of several fields: how files become tensors, batches of one group, and the model."""

import base64
import json
import wave
from collections.abc import Sequence
from contextlib import closing
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from pydantic import ByteSize, ValidationError
from torch import Tensor
from upath import UPath

from app.compile.export import export_onnx
from app.config import CleanConfig, ColumnsConfig, Recipe
from app.config.data import ShardsConfig
from app.data.images import encode_png
from app.data.records import RecordProcessor
from app.data.sources.labelled import LABEL, labelled_columns
from app.data.sources.source import Source
from app.data.sources.units import read_source
from app.engines.onnxruntime import open_oracle
from app.models.factory import build_model
from app.models.multimodal import LateFusion
from app.serving.protocol.predict import PredictRequest
from app.storage import to_path
from app.tasks import find_served_task, load_with_test, prepare
from app.tensors import OUTPUT, check_tensors
from app.training.data.ranks import DataRank, validation_share
from app.training.data.recipe_order import order_of
from tests.examples import read_examples
from tests.preparing import write_table
from tests.records import ENCODERS, FIELDS, recipe_of, with_data, write_goods
from tests.wording import refused


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_goods(tmp_path)


def torch_of(tensors: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in tensors.items()}


def fields_in(data: Any, indices: Sequence[int]) -> set[tuple[str, ...]]:
    return {tuple(data.split.inputs[index]) for index in indices}


def test_a_table_becomes_records_which_are_kept_as_they_are(table: Path, tmp_path: Path) -> None:
    recipe = recipe_of(table)
    first = json.loads(read_examples(recipe.data, "record")[0][0])
    assert list(first) == list(FIELDS)
    assert first["size"] == {"width": 0.0, "colour": "red"}
    assert base64.b64decode(first["photo"]) == (tmp_path / "0.png").read_bytes()
    data: Any = prepare(recipe)
    batch = data.validation.batch(range(len(data.validation)))
    check_tensors(batch.inputs, data.processor.inputs)
    assert set(batch.inputs) == {
        *(f"{text}_{name}" for text in ("title", "note") for name in ("input_ids", "attention_mask", "present")),
        *("photo_pixel_values", "photo_present", "size_numbers", "size_categories", "size_present"),
    }
    assert batch.absent == frozenset(), "all fields are somewhere in the batch"
    data.save(UPath(tmp_path / "data"))
    loaded: Any = load_with_test(recipe, UPath(tmp_path / "data"))
    assert loaded.fingerprint == data.fingerprint
    again = loaded.validation.batch(range(len(data.validation)))
    assert all(np.array_equal(again.inputs[name], array) for name, array in batch.inputs.items())


def test_shards_hold_the_fields_of_records_as_they_are(table: Path, tmp_path: Path) -> None:
    data: Any = prepare(recipe_of(table))
    (path,) = to_path(data.reference.location).glob("train-*.arrow")
    shard = pa.ipc.open_file(path.read_bytes()).read_all()
    assert {name: str(shard.schema.field(name).type) for name in shard.column_names} == {
        "field.title": "string",
        "field.note": "string",
        "field.photo": "binary",
        "field.size.numbers": "fixed_size_list<item: double>[1]",
        "field.size.categories": "fixed_size_list<item: string>[1]",
        "value": "int32",
        "length": "int32",
    }
    pictures = {file.read_bytes() for file in tmp_path.glob("*.png")}
    assert {*shard["field.photo"].to_pylist()} <= pictures | {None}
    records = [data.train.split.inputs[index] for index in range(len(data.train))]
    assert records == list(data.train.split.inputs)
    assert {frozenset(record) for record in records} == {
        *map(frozenset, (("title", "note", "photo", "size"), ("title", "photo"), ("photo", "size"), ("title",)))
    }
    again = data.processor.encode(records)
    batch = data.train.batch(range(len(records)))
    assert all(np.array_equal(again[name], array) for name, array in batch.inputs.items())
    asked = [
        {name: base64.b64encode(cell).decode() if name == "photo" else cell for name, cell in record.items()}
        for record in records
    ]
    assert all(np.array_equal(data.processor.encode(asked)[name], array) for name, array in batch.inputs.items())


def test_a_missing_field_is_empty_and_named(table: Path) -> None:
    data: Any = prepare(recipe_of(table))
    processor: RecordProcessor = data.processor
    alone = processor.encode([{"title": "a shoe"}])
    assert processor.absent(alone) >= {"photo_pixel_values", "photo_present", "note_input_ids", "size_numbers"}
    assert not processor.absent(alone) & {"title_input_ids", "title_attention_mask", "title_present"}
    assert not alone["photo_pixel_values"].any()
    assert alone["note_attention_mask"].sum() == 1, "an empty text has a token to attend to"
    assert alone["title_input_ids"].shape == alone["note_input_ids"].shape == (1, 4)
    same = processor.encode([{"title": "a shoe", "photo": None, "note": ""}])
    assert all(np.array_equal(same[name], array) for name, array in alone.items())
    empty = processor.encode([{"title": "a shoe", "size": {"width": None, "colour": "NA"}}])
    assert all(np.array_equal(empty[name], array) for name, array in alone.items())
    mixed = processor.encode([{"title": "a shoe"}, {"note": "one two three four five " * 3}])
    assert mixed["title_input_ids"].shape == mixed["note_input_ids"].shape == (2, 16), "all texts have one length"
    assert mixed["title_present"].tolist() == [[1], [0]]


def test_batches_never_mix_fields_on_any_number_of_ranks(table: Path) -> None:
    recipe = recipe_of(table)
    data: Any = prepare(recipe)
    order = order_of(recipe, data)
    seen: list[int] = []
    for number in range(order.num_batches(1)):
        batch = order.batch(1, number)
        assert len(fields_in(data.train, batch)) == 1
        assert len(batch) == order.batch_size(1, number) == 4
        assert set(batch) == {index for rank in (0, 1) for index in order.share(1, number, DataRank(rank, 2))}
        seen += batch.tolist()
    assert len(set(seen)) == len(seen)
    sizes = np.unique(data.train.groups, return_counts=True)[1]
    assert order.num_batches(1) == sum(size // 4 for size in sizes)
    assert [order.batch(2, number).tolist() for number in range(3)] != [order.batch(1, n).tolist() for n in range(3)]
    again = order_of(recipe, data)
    assert again.batch(2, 1).tolist() == order.batch(2, 1).tolist()


def test_labels_come_equally_often_among_records_with_the_same_fields(table: Path) -> None:
    head, *lines = table.read_text(encoding="utf-8").split("\n")
    labelled = [f"{line.rpartition(',')[0]},{'rare' if n // 4 % 4 == 0 else 'often'}" for n, line in enumerate(lines)]
    table.write_text("\n".join([head, *labelled]), encoding="utf-8")
    tree = recipe_of(table).model_dump(exclude_defaults=True)
    tree["data"]["sampling"] = "balanced"
    tree["train"]["curriculum"] = {"by": "length", "epochs": 2}
    recipe = Recipe.model_validate(tree)
    data: Any = prepare(recipe)
    hard = np.asarray(data.train.lengths, np.float32)
    order, plain = order_of(recipe, data, hard), order_of(recipe_of(table), data)
    assert order.num_batches(1) == plain.num_batches(1)
    batches = [order.batch(1, number) for number in range(order.num_batches(1))]
    assert all(len(fields_in(data.train, batch)) == 1 for batch in batches)
    classes = np.asarray(data.train.split.classes)
    rare, often = sorted(np.bincount(classes).tolist())
    assert rare < often / 2
    # Each of four groups leaves out what fills no batch.
    assert np.ptp(np.bincount(classes[np.concatenate(batches)])) <= 4 * 3


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_validate_the_same_fields_at_the_same_time(table: Path, ranks: int) -> None:
    data: Any = prepare(recipe_of(table))
    split = data.validation
    shares = [list(validation_share(split, DataRank(rank, ranks), 2)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    seen: list[int] = []
    for parts in zip(*shares, strict=True):
        assert len(fields_in(split, [index for batch, stand_in in parts for index in (*batch, stand_in)])) == 1
        seen += [index for batch, _ in parts for index in batch]
    assert sorted(seen) == list(range(len(split)))


def test_a_group_that_fills_no_batch_is_refused(table: Path) -> None:
    lines = table.read_text(encoding="utf-8").split("\n")
    table.write_text("\n".join([*lines, ",only this,,,,shoe", ",only that,,,,bag"]), encoding="utf-8")
    recipe = recipe_of(table)
    with refused("batch.fields", "train.global_batch_size"):
        order_of(recipe, prepare(recipe))


def test_the_model_computes_only_the_fields_that_are_there(table: Path) -> None:
    recipe = recipe_of(table)
    data: Any = prepare(recipe)
    model = build_model(recipe.model, data.facts).eval()
    assert isinstance(model, LateFusion)
    ran: list[int] = []
    for place, encoder in enumerate(model.encoders):
        encoder.register_forward_hook(lambda *_, place=place: ran.append(place))
    group = np.flatnonzero(data.train.groups == "title")
    batch = data.train.batch(group)
    whole = torch_of(batch.inputs)
    part = {name: tensor for name, tensor in whole.items() if name not in batch.absent}
    with torch.no_grad():
        expected = model(**part)
        assert ran == [0]
        torch.testing.assert_close(model(**whole), expected, msg="a graph with all fields answers the same")


def test_one_onnx_file_answers_records_with_any_fields(table: Path, tmp_path: Path) -> None:
    fields = {name: field for name, field in FIELDS.items() if name != "note"}  # a second text takes seconds to export
    recipe = recipe_of(table, fields, encoders={name: ENCODERS[name] for name in fields})
    data: Any = prepare(recipe)
    model = build_model(recipe.model, data.facts).eval()
    with torch.no_grad():
        model.missing.normal_()  # type: ignore[operator, union-attr]
    export_onnx(model, data.processor.inputs, data.train.batch(range(4)).inputs, tmp_path / "model.onnx")
    with closing(open_oracle(tmp_path / "model.onnx")) as engine:
        for group in np.unique(data.train.groups):
            batch = data.train.batch(np.flatnonzero(data.train.groups == group)[:3])
            inputs = {name: tensor for name, tensor in torch_of(batch.inputs).items() if name not in batch.absent}
            with torch.no_grad():
                expected = model(**inputs).numpy()
            np.testing.assert_allclose(engine.run(batch.inputs)[OUTPUT], expected, atol=1e-5)


def test_a_field_may_have_a_processor_of_ones_own(table: Path, tmp_path: Path) -> None:
    lines = ["title,sound,label"]
    for number in range(8):
        with wave.open(str(tmp_path / f"{number}.wav"), "wb") as recording:
            recording.setparams((1, 2, 8000, 0, "NONE", ""))
            recording.writeframes(np.full(64, 2**14 * (number % 2), np.int16).tobytes())
        lines.append(f"{'knock' * (number % 3)},{number}.wav,{'loud' if number % 2 else 'still'}")
    table.write_text("\n".join(lines), encoding="utf-8")
    recipe = recipe_of(table, {"title": {"kind": "text"}, "sound": {"kind": "tests.records:Loudness"}})
    data: Any = prepare(recipe)
    data.save(UPath(tmp_path / "data"))
    loaded: Any = load_with_test(recipe, UPath(tmp_path / "data"))
    batch = loaded.train.batch(range(len(loaded.train)))
    loud = [data.labels[index] == "loud" for index in loaded.train.split.classes]
    assert batch.inputs["sound_levels"][:, 0].tolist() == [0.5 if is_loud else 0.0 for is_loud in loud]
    assert data.facts["sound_num_levels"] == 8


@pytest.mark.parametrize("drop_empty", [True, False])
def test_rows_without_any_field_are_dropped_and_counted(table: Path, drop_empty: bool) -> None:
    table.write_text(f"{table.read_text(encoding='utf-8')}\n,,,,,shoe\n", encoding="utf-8")
    recipe = with_data(recipe_of(table), clean=CleanConfig(drop_empty=drop_empty))
    assert prepare(recipe).report.dropped["empty"] == 1


def read_fields(path: Path, table: pa.Table) -> list[Any]:
    parquet.write_table(table, path)
    fields = {"title": {"kind": "text"}, "size": {"kind": "row", "columns": ["day", "price"]}}
    return [json.loads(item) for item, _ in read_examples(recipe_of(path, fields).data, "record")]


def test_cells_of_parquet_are_read_in_every_type(tmp_path: Path) -> None:
    columns = {
        "title": [b"caf\xc3\xa9", b"bar"],
        "day": [date(2026, 1, 2), None],
        "price": [Decimal("1.50"), Decimal("2.00")],
        "label": ["a", "b"],
    }
    first, second = read_fields(tmp_path / "goods.parquet", pa.table(columns))
    assert first == {"title": "café", "size": {"day": "2026-01-02", "price": 1.5}}
    assert second == {"title": "bar", "size": {"day": None, "price": 2.0}}
    with refused("text.encoding"):
        read_fields(tmp_path / "goods.parquet", pa.table(columns | {"title": [b"caf", b"\xff"]}))
    with refused("text.encoding"):
        read_fields(tmp_path / "goods.parquet", pa.table(columns | {"price": [None, b"\xff"]}))
    with refused("cell.type", "data.columns.fields.size.columns.1"):
        read_fields(tmp_path / "goods.parquet", pa.table(columns | {"price": [[2.0], None]}))


def test_each_row_field_has_its_own_categories(table: Path) -> None:
    fields = {"size": {"kind": "row", "columns": ["width"]}, "look": {"kind": "row", "columns": ["colour"]}}
    columns = recipe_of(table, fields).data.columns
    named, unknown = (columns.model_copy(update={"categories": given}) for given in (["width"], ["width", "depth"]))
    data: Any = prepare(with_data(recipe_of(table), columns=named))
    assert data.facts["size_num_category_columns"] == data.facts["look_num_category_columns"] == 1
    with refused("columns.unknown", "data.columns.categories"):
        prepare(with_data(recipe_of(table), columns=unknown))


def test_a_request_in_python_may_have_files_as_bytes() -> None:
    request = PredictRequest(inputs=[{"title": "a", "photo": b"content"}])
    assert request.listed == [{"title": "a", "photo": base64.b64encode(b"content").decode()}]
    with pytest.raises(ValidationError):
        PredictRequest(inputs={"size": {"width": float("nan")}})


def test_all_multimodal_tasks_read_records() -> None:
    for kind in ("classification", "regression", "multilabel"):
        assert find_served_task(f"multimodal-{kind}").processor is RecordProcessor
    given = {"name": "x", "task": "text-classification", "data": {"source": "builtin:digit_halves"}}
    recipe = Recipe.model_validate(given | {"model": {"factory": "a:b"}})
    with refused("source.contents", "data.source"):
        prepare(recipe)


def photos_of(data: Any) -> set[bytes]:
    return {row["photo"] for split in (data.train, data.validation) for row in split.split.inputs if "photo" in row}


NEW = encode_png(np.full((6, 6), 7, np.uint8))


@pytest.mark.parametrize("where", ["file", "folder", "s3"])
def test_a_picture_that_a_table_names_is_read_again_once_it_changes(
    where: str, table: Path, s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table itself has not changed (huggingface/datasets#2956)."""
    source = to_path(table if where == "file" else tmp_path)
    if where == "s3":
        for name, value in s3.items():
            monkeypatch.setenv(name, value)
        source = to_path("s3://goods")
        source.mkdir(exist_ok=True)
        for path in tmp_path.iterdir():
            (source / path.name).write_bytes(path.read_bytes())
    recipe = with_data(recipe_of(table), source=str(source))
    first: Any = prepare(recipe)
    ((source.parent if where == "file" else source) / "0.png").write_bytes(NEW)
    second: Any = prepare(recipe)
    assert photos_of(second) - photos_of(first) == {NEW}
    assert prepare(recipe).reference == second.reference  # type: ignore[attr-defined]


def test_preparation_begins_anew_once_a_picture_has_changed(table: Path, tmp_path: Path) -> None:
    lines = table.read_text(encoding="utf-8").splitlines()
    table.write_text("\n".join([lines[0], *(line.replace(",", "," + "w " * 900, 1) for line in lines[1:])]))
    recipe = with_data(recipe_of(table), shards=ShardsConfig(size=ByteSize(4096), memory=ByteSize(10**6)))
    torn, whole = tmp_path / "46.png", (tmp_path / "46.png").read_bytes()
    torn.write_bytes(b"torn")
    with refused("file.unreadable"):
        prepare(recipe)
    torn.write_bytes(whole)
    (tmp_path / "0.png").write_bytes(NEW)
    with refused("source.changed"):
        prepare(recipe)
    assert NEW in photos_of(prepare(recipe))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "arrow"])
def test_few_large_files_that_a_table_names_are_read_at_a_time(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.data.sources.cells._FILE_BYTES", 10_000)
    for name, size in (("small", 100), ("large", 4000)):
        (tmp_path / name).write_bytes(bytes(size))
    rows = [("small" if number < 300 else "large", "a") for number in range(500)]
    write_table(tmp_path / f"rows.{suffix}", rows, ["photo", "label"])
    config = ColumnsConfig.model_validate({"fields": {"photo": {"kind": "image"}}})
    read = list(read_source(Source(str(tmp_path / f"rows.{suffix}")), labelled_columns(config, "record")))
    assert [label for batch in read for label in batch.cells[LABEL].to_pylist()] == ["a"] * len(rows)
    sizes = [sum(cells.nbytes for cells in batch.cells.values()) for batch in read[1:]]
    assert sum(size > 16 * 4100 for size in sizes) <= 1, "only the batch in which files become large"
    assert len(read) < 200
