"""Records and recipes of several fields that are refused, and why."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from app.config import Recipe
from app.data.images import encode_png
from app.models.factory import build_model
from app.runs import Run
from app.tasks import prepare
from app.training.run import prepare_run
from tests.records import ENCODERS, recipe_of, write_goods
from tests.wording import refused


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_goods(tmp_path)


@pytest.mark.parametrize(
    ("given", "rule", "key"),
    [
        ("{", "row.not_an_object", None),
        ([1], "row.not_an_object", None),
        ({"titel": "a"}, "fields.unknown", None),
        ({}, "fields.none", None),
        ({"title": "", "photo": None}, "fields.none", None),
        ({"title": 3}, "field.type", "title"),
        ({"photo": 3}, "field.type", "photo"),
        ({"photo": "a b"}, "field.not_base64", "photo"),
        ({"photo": "aGFsbG8="}, "image.unreadable", None),
        ({"size": "wide"}, "row.not_an_object", None),
        ({"size": {"width": 1}}, "row.incomplete", "colour"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused(table: Path, given: Any, rule: str, key: str | None) -> None:
    processor: Any = getattr(prepare(recipe_of(table)), "processor")  # noqa: B009
    with refused(rule, key):
        processor.encode([given])


def test_a_file_that_is_missing_or_no_picture_is_named_with_its_row(table: Path, tmp_path: Path) -> None:
    (tmp_path / "2.png").unlink()
    with refused("file.unreadable", "data.columns.fields.photo"):
        prepare(recipe_of(table))
    (tmp_path / "2.png").write_bytes(b"no picture")
    with refused("file.unreadable"):
        prepare(recipe_of(table))
    whole = encode_png(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8))
    (tmp_path / "2.png").write_bytes(whole[: len(whole) // 2])
    with refused("file.unreadable"):
        prepare(recipe_of(table))


def test_fields_that_would_be_padded_to_different_lengths_are_refused(table: Path) -> None:
    fields = {"title": {"kind": "text"}, "sound": {"kind": "tests.records:Waveform", "column": "file"}}
    with refused("fields.lengths", "data.columns.fields"):
        prepare(recipe_of(table, fields))


@pytest.mark.parametrize(
    ("fields", "rule", "key"),
    [
        ({"title": {"kind": "text", "column": "name"}}, "columns.missing", "data.columns.fields.title"),
        (
            {"size": {"kind": "row", "columns": ["depth", "width"]}},
            "columns.missing",
            "data.columns.fields.size.columns.0",
        ),
        (
            {"title": {"kind": "text"}, "none": {"kind": "text", "column": "void"}},
            "fields.never",
            "data.columns.fields.none",
        ),
    ],
)
def test_fields_that_the_table_lacks_are_named(table: Path, fields: Any, rule: str, key: str) -> None:
    lines = table.read_text(encoding="utf-8").split("\n")
    table.write_text("\n".join([f"{lines[0]},void", *(f"{line}," for line in lines[1:])]), encoding="utf-8")
    with refused(rule, key):
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
    with refused("task.unsupported", "data.sources"):
        prepare_run(Run.start("train", Recipe.model_validate(tree)))


@pytest.mark.parametrize(
    ("encoders", "rule"),
    [
        ({"title": ENCODERS["title"]}, "encoders.incomplete"),
        ({**ENCODERS, "film": ENCODERS["photo"]} | {}, "encoders.incomplete"),
        ({"film" if name == "photo" else name: given for name, given in ENCODERS.items()}, "encoders.unknown"),
        ({**ENCODERS, "photo": "cnn"}, "encoders.invalid"),
        ({**ENCODERS, "photo": {"factory": "app.models.image:cnn"}}, "encoders.invalid"),
    ],
)
def test_encoders_that_do_not_fit_the_fields_are_refused(table: Path, encoders: Any, rule: str) -> None:
    recipe = recipe_of(table, encoders=encoders)
    with refused(rule, "model.args.encoders"):
        build_model(recipe.model, prepare(recipe).facts)
