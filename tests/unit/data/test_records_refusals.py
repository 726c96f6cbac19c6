"""Records and recipes of several fields that are refused, and why."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from app.config import Recipe
from app.data.images import encode_png
from app.errors import DataError, RecipeError
from app.models.factory import build_model
from app.runs import Run
from app.tasks import prepare
from app.training.run import prepare_run
from tests.records import ENCODERS, recipe_of, write_goods


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_goods(tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "a record is not JSON"),
        ("[1]", r"a record is '\[1\]': expected an object with some of the fields title, note, photo, size"),
        ({"titel": "a"}, "a record has the field 'titel': expected title, note, photo, size"),
        ({}, "a record has none of its fields: expected at least one of title"),
        ({"title": "", "photo": None}, "a record has none of its fields"),
        ({"title": 3}, "field 'title' is int: expected a text"),
        ({"photo": 3}, "field 'photo' is int: expected the content of a file in base64"),
        ({"photo": "a b"}, "field 'photo' is not base64"),
        ({"photo": "aGFsbG8="}, "field 'photo': an image of 5 bytes cannot be read: expected a PNG or JPEG file"),
        ({"size": "wide"}, "field 'size': a row is 'wide': expected an object"),
        ({"size": {"width": 1}}, "field 'size': a row has no 'colour'"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused(table: Path, given: Any, words: str) -> None:
    processor: Any = getattr(prepare(recipe_of(table)), "processor")  # noqa: B009
    with pytest.raises(DataError, match=words):
        processor.encode([given if isinstance(given, str) else json.dumps(given)])


def test_a_file_that_is_missing_or_no_picture_is_named_with_its_row(table: Path, tmp_path: Path) -> None:
    (tmp_path / "2.png").unlink()
    with pytest.raises(DataError, match=r"goods.csv', row 3: the file '2.png' cannot be read .*: expected a file"):
        prepare(recipe_of(table))
    (tmp_path / "2.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"goods.csv', row 3: the file '2.png' cannot be read \(an image of 10 bytes"):
        prepare(recipe_of(table))
    whole = encode_png(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8))
    (tmp_path / "2.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"goods.csv', row 3: the file '2.png' cannot be read \(an image of \d+ bytes"):
        prepare(recipe_of(table))


def test_fields_that_would_be_padded_to_different_lengths_are_refused(table: Path) -> None:
    fields = {"title": {"kind": "text"}, "sound": {"kind": "tests.records:Waveform", "column": "file"}}
    words = "length of sound_samples varies up to 500, and that of title_input_ids up to 16; a model has one length"
    with pytest.raises(DataError, match=words):
        prepare(recipe_of(table, fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"title": {"kind": "text", "column": "name"}}, "data.columns.fields.title is 'name', which .*goods.csv' does"),
        ({"size": {"kind": "row", "columns": ["depth", "width"]}}, "fields.size.columns.0 is 'depth', which"),
        ({"title": {"kind": "text"}, "none": {"kind": "text", "column": "void"}}, "fields.none: no training row of"),
    ],
)
def test_fields_that_the_table_lacks_are_named(table: Path, fields: Any, words: str) -> None:
    lines = table.read_text(encoding="utf-8").split("\n")
    table.write_text("\n".join([f"{lines[0]},void", *(f"{line}," for line in lines[1:])]), encoding="utf-8")
    with pytest.raises(DataError, match=words):
        prepare(recipe_of(table, fields))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"data": {"columns": {"fields": {}}}}, "data.columns.fields is empty: task multimodal-classification learns"),
        ({"data": {"columns": {"fields": {"a": {"kind": "row"}}}}}, "kind row reads several columns: name them in"),
        ({"data": {"columns": {"fields": {"a": {"kind": "text", "columns": ["b"]}}}}}, "columns is for kind row"),
        ({"data": {"columns": {"fields": {"a": {"kind": "film"}}}}}, "should match pattern"),
        ({"task": "text-classification"}, "data.columns.fields is .*, which task text-classification does not support"),
        ({"data": {"columns": {"input": "a"}}}, "data.columns.input is 'a', which task multimodal-classification"),
        ({"model": {"pretrained": "folder"}}, "model.pretrained is 'folder', which task multimodal"),
    ],
)
def test_keys_that_do_not_fit_are_refused(table: Path, keys: dict[str, Any], words: str) -> None:
    tree = recipe_of(table).model_dump(exclude_defaults=True)
    for section, values in keys.items():
        if isinstance(values, str):
            tree[section] = values
            continue
        for name, value in values.items():
            tree[section][name] = {**tree[section].get(name, {}), **value} if isinstance(value, dict) else value
    with pytest.raises(ValidationError, match=words):
        Recipe.model_validate(tree)


def test_sources_of_records_are_refused(table: Path, tmp_path: Path) -> None:
    tree = recipe_of(table).model_dump(exclude_defaults=True)
    tree |= {"task": "app.tasks.multimodal:MultimodalClassification", "storage": str(tmp_path / "storage")}
    more = table.with_name("more.csv")
    more.write_text(table.read_text(encoding="utf-8").replace("a ", "the "), encoding="utf-8")
    del tree["data"]["source"]
    tree["data"]["sources"] = [{"source": str(table)}, {"source": str(more)}]
    with pytest.raises(
        RecipeError,
        match=r"data\.sources is .*, which task app.tasks.multimodal:Multimodal",
    ):
        prepare_run(Run.start("train", Recipe.model_validate(tree)))


@pytest.mark.parametrize(
    ("encoders", "words"),
    [
        ({"title": ENCODERS["title"]}, "model.args.encoders has title, and the data have 4 fields"),
        (
            {**ENCODERS, "film": ENCODERS["photo"]} | {},
            "has title, note, photo, size, film, and the data have 4 fields",
        ),
        (
            {"film" if name == "photo" else name: given for name, given in ENCODERS.items()},
            "encoders has 'film', which",
        ),
        ({**ENCODERS, "photo": "cnn"}, "model.args.encoders.photo is 'cnn': expected a factory and its args"),
        ({**ENCODERS, "photo": {"factory": "app.models.image:cnn"}}, "model.args.encoders.photo: .*cnn"),
    ],
)
def test_encoders_that_do_not_fit_the_fields_are_refused(table: Path, encoders: Any, words: str) -> None:
    recipe = recipe_of(table, encoders=encoders)
    with pytest.raises(RecipeError, match=words):
        build_model(recipe.model, prepare(recipe).facts)
