"""Files of every format are read in units, and no row is lost or read twice."""

import csv
import io
import json
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from s3fs.core import S3File
from upath import UPath

from app.config import ColumnsConfig, DataConfig, load_recipe
from app.data.examples import Modality
from app.data.preparation.samples import Documents
from app.data.sources.labelled import INPUT, LABEL, labelled_columns
from app.data.sources.source import Source
from app.data.sources.units import cut_units, list_files, read_source, read_unit
from app.storage import to_path
from app.tasks import prepare
from tests.preparing import ROWS, language_recipe, prepared, recipe_of, rows_in, text, write_table
from tests.wording import refused


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv", "jsonl"])
def test_every_format_gives_every_row_once_in_many_units(tmp_path: Path, suffix: str) -> None:
    for part in range(2):
        write_table(tmp_path / f"part{part}.{suffix}", ROWS[600 * part : 600 * (part + 1)])
    recipe = recipe_of(tmp_path, "data.test_fraction=0.1")
    files = list_files(Source(recipe.data.source), "text")
    assert len(cut_units(files, 20_000)) > 4
    data = prepared(tmp_path, "data.test_fraction=0.1")
    found = rows_in(data)
    assert Counter(row for rows in found.values() for row in rows) == Counter((item, label) for item, label, _ in ROWS)
    assert 80 < len(found["validation"]) < 160
    assert 80 < len(found["test"]) < 160
    assert data.rows == {name: len(rows) for name, rows in found.items()}


def test_a_csv_file_is_cut_between_its_rows_only(tmp_path: Path) -> None:
    odd = ['two\n"lines", quoted', 'a " in it', "commas, of course", "\n\n", '""', "an\r\nend"]
    rows = [(f"{odd[number % 6]} {number}", ("good", "bad")[number % 2], "") for number in range(3000)]
    path = tmp_path / "rows.csv"
    write_table(path, rows)
    bare = 'bare "quote" 1,good,\nbare "quote 2,bad,\n'
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + bare.encode())
    (file,) = list_files(Source(str(path)), "text")
    cut = cut_units([file], 9_000)
    assert len(cut) > 5
    columns = labelled_columns(ColumnsConfig(), "text", "author")
    found, whole = (
        [
            row
            for unit in units
            for part in read_unit(unit, columns)
            for row in zip(*(part.cells[key].to_pylist() for key in (INPUT, LABEL)), strict=True)
        ]
        for units in (cut, cut_units([file], 10**6))
    )
    assert found == whole
    assert found[:-2] == [(item, label) for item, label, _ in rows]
    assert found[-2:] == [('bare "quote" 1', "good"), ('bare "quote 2', "bad")]


@pytest.mark.parametrize("size", [90, 100, 110])
def test_a_quoted_cell_of_a_tsv_file_is_not_cut(tmp_path: Path, size: int) -> None:
    rows = [(f"t{number}", f"two\nlines {number}") for number in range(100)]
    path = tmp_path / "rows.tsv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t").writerows([("text", "label"), *rows])
    units = cut_units(list_files(Source(str(path)), "text"), size)
    assert len(units) > 10
    parts = [part.cells for unit in units for part in read_unit(unit, labelled_columns(ColumnsConfig(), "text"))]
    texts, labels = ([cell for cells in parts for cell in cells[key].to_pylist()] for key in (INPUT, LABEL))
    assert list(zip(texts, labels, strict=True)) == rows


def test_a_large_text_is_read_in_parts_without_losing_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.sources.formats.files.MAX_DOCUMENT_BYTES", 2000)
    lines = [text(number) for number in range(1000)]
    (tmp_path / "all.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = prepare(language_recipe(tmp_path / "all.txt", "data.tokenizer={kind: bytes}"))
    assert data.report.kept > 20
    assert data.report.given == data.report.kept
    tokens = (len(data.train) + len(data.validation)) * 16  # type: ignore[attr-defined]
    size = (tmp_path / "all.txt").stat().st_size
    assert size - 16 * 2 * 10 < tokens <= size + data.report.kept


def test_a_line_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.sources.lines._MAX_LINE_BYTES", 1000)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "x" * 1200, "label": "a"}))
    with refused("line.too_long"):
        prepare(recipe_of(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.csv", "rows.jsonl"])
def test_a_source_on_s3_is_prepared(
    name: str, s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    folder = f"s3://prepared-{name.replace('.', '-')}"
    UPath(folder).mkdir(exist_ok=True)
    write_table(tmp_path / name, ROWS)
    to_path(f"{folder}/source/{name}").write_bytes((tmp_path / name).read_bytes())
    shards = "data.shards={size: 20KB, window: 20KB}"
    data = prepare(recipe_of(f"{folder}/source", shards, f"storage={folder}/storage"))
    assert sum(data.rows.values()) == len(ROWS)
    local = prepare(recipe_of(tmp_path / name, shards))
    assert data.fingerprint == local.fingerprint


def test_documents_on_s3_are_read(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones are cut. An object whose key ends with a slash stands for a folder."""
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("app.data.sources.formats.files.MAX_DOCUMENT_BYTES", 1000)
    UPath("s3://documents").mkdir(exist_ok=True)
    storage, lines = to_path("s3://documents").fs, "".join(f"line {number}\n" for number in range(400))
    for path, content in {"": "", "in/": "", "in/a.txt": lines, "in/b.txt": "two"}.items():
        storage.pipe_file(f"documents/text/{path}", content.encode())
    source = Source("s3://documents/text")
    rows = read_source(source, Documents().columns(DataConfig(source=source.uri)))
    texts = [text for some in rows for text in some.cells[INPUT].to_pylist()]
    assert len(texts) > 3
    assert "".join(texts) == lines + "two"


def write_tar(path: Path, samples: Sequence[dict[str, bytes]]) -> None:
    """Write samples of members by extension in WebDataset's layout."""
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples):
            for extension, content in sample.items():
                member = tarfile.TarInfo(f"some/{number:05d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("contents", ["text", "image"])
def test_tars_and_pictures_on_s3_read_as_on_a_disk(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: Modality
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    folder, bucket = tmp_path / "source" / "some", UPath(f"s3://files-{contents}")
    bucket.mkdir(exist_ok=True)
    folder.mkdir(parents=True)
    if contents == "text":
        write_tar(folder / "a.tar", [{"txt": item.encode(), "cls": label.encode()} for item, label, _ in ROWS])
    for number in range(3 * (contents == "image")):
        Image.new("L", (8, 8), number).save(folder / f"{number}.png")
    bucket.fs.put(str(tmp_path / "source"), bucket.path, recursive=True)
    found, given = (
        [
            row
            for unit in cut_units(list_files(Source(str(source)), contents), 10**6)
            for rows in read_unit(unit, labelled_columns(ColumnsConfig(), contents))
            for row in zip(*(cells.to_pylist() for cells in rows.cells.values()), strict=True)
        ]
        for source in (bucket / "source", tmp_path / "source")
    )
    assert found == given
    assert len(found) == {"text": len(ROWS), "image": 3}[contents]


def test_texts_in_tars_are_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    samples = [
        {"txt": item.encode(), "cls": label.encode()}
        if number % 2
        else {"json": json.dumps({"text": item, "label": label}).encode()}
        for number, (item, label, _) in enumerate(ROWS)
    ]
    write_tar(source / "a.tar", samples[:700])
    write_tar(source / "b.tar", samples[700:])
    found = rows_in(prepared(source))
    assert {row for rows in found.values() for row in rows} == {(item, label) for item, label, _ in ROWS}
    write_tar(source / "b.tar", [{"txt": b"no label"}])
    with refused("tar.no_member"):
        prepared(source)
    (source / "b.tar").write_bytes((source / "a.tar").read_bytes()[:5000])
    with refused("file.unreadable"):
        prepared(source)


def test_pictures_in_tars_are_read(tmp_path: Path) -> None:
    samples = []
    for number in range(120):
        content = io.BytesIO()
        Image.new("L", (8, 8), number).save(content, "PNG")
        samples.append({"png": content.getvalue(), ("cls", "txt")[number % 2]: (b"dark", b"light")[number > 60]})
    write_tar(tmp_path / "pictures.tar", [*samples, {"png": b"torn", "cls": b"dark"}])
    recipe = load_recipe("recipes/digits.yaml", [f"data.source={tmp_path}", "data.shards={size: 5KB, window: 20KB}"])
    data = prepare(recipe)
    assert sum(data.rows.values()) == 120
    assert data.report.examples["unreadable"] == [f"'{tmp_path / 'pictures.tar'}', sample some/00120"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_unit_of_a_file_on_s3_is_fetched_about_once(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    UPath("s3://fetched").mkdir(exist_ok=True)
    letters, path = np.random.default_rng(0).integers(97, 123, (40_000, 1000), np.uint8), tmp_path / f"rows.{suffix}"
    table = pa.table({"text": [row.tobytes().decode() for row in letters], "label": ["some"] * len(letters)})
    if suffix == "parquet":
        pa.parquet.write_table(table, path, row_group_size=10_000, compression="none", use_dictionary=["label"])
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    to_path(f"s3://fetched/rows.{suffix}").write_bytes(path.read_bytes())
    fetched: list[int] = []
    fetch = S3File._fetch_range

    def counted(file: S3File, start: int, end: int) -> bytes:
        fetched.append(end - start)
        content: bytes = fetch(file, start, end)
        return content

    units = cut_units(list_files(Source(f"s3://fetched/rows.{suffix}"), "text"), 20_000_000)
    monkeypatch.setattr(S3File, "_fetch_range", counted)
    columns = labelled_columns(ColumnsConfig(), "text")
    assert sum(len(rows) for unit in units for rows in read_unit(unit, columns)) == len(letters)
    assert len(units) > 1
    # Lines are read ahead by 8 MiB. The first page of a row group is read twice.
    twice = len(units) * 2**23 if suffix == "jsonl" else 0.3 * path.stat().st_size
    assert sum(fetched) < path.stat().st_size + twice
