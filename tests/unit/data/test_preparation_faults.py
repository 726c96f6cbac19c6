"""Faults of a source: which file and row, what was expected, and what to do; nothing is dropped silently."""

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from upath import UPath

from app.config import Recipe, load_recipe
from app.data.preparation import prepare as preparing
from app.data.preparation.preview import require_readable
from app.data.tabular import TabularProcessor
from app.errors import DataError
from app.storage import open_storage, to_path
from app.tasks import find_task, prepare
from tests.examples import read_examples
from tests.odd import picture, tar
from tests.preparing import ROWS, prepared, recipe_of, rows_in, text, write_table
from tests.wording import refused


def broken(folder: Path, name: str) -> Path:
    """A folder of two good files and a bad one."""
    write_table(folder / "a.jsonl", ROWS[:100])
    write_table(folder / "b.csv", ROWS[100:200])
    match name:
        case "missing":
            write_table(folder / "c.parquet", [row[:1] for row in ROWS[200:210]], ["text"])
        case "json":
            (folder / "c.jsonl").write_text('{"text": "a", "label": "b"}\n{"text": \n')
        case "list":
            (folder / "c.jsonl").write_text('{"text": "a", "label": "b"}\n[1]\n')
        case "parquet":
            (folder / "c.parquet").write_bytes(b"PAR1 this is none")
        case "csv":
            (folder / "c.csv").write_text("text,label\na,good\nb,bad,more\n")
    return folder


@pytest.mark.parametrize(
    ("name", "rule", "key"),
    [
        ("missing", "columns.missing", "data.columns.label"),
        ("json", "json.invalid", None),
        ("list", "row.not_an_object", None),
        ("parquet", "file.unreadable", None),
        ("csv", "row.cells", None),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, rule: str, key: str | None) -> None:
    with refused(rule, key):
        prepare(recipe_of(broken(tmp_path, name)))


def lines_of(path: Path, *lines: bytes) -> Path:
    """A file of the usual rows, with other lines among them."""
    good = [json.dumps({"text": item, "label": label}).encode() for item, label, _ in ROWS]
    path.write_bytes(b"\n".join([*lines, *good]))
    return path


def test_json_of_other_writers_is_read(tmp_path: Path) -> None:
    odd = [
        b"",
        b'{"text": "no number", "label": NaN}',
        b'{"text": NaN, "label": "good"}',
        b'{"label": "bad", "text": "x"}',
    ]
    path = lines_of(tmp_path / "rows.jsonl", *odd)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    data = prepared(path)
    assert data.report.dropped == {"unlabelled": 1, "empty": 1}
    assert ("x", "bad") in [row for rows in rows_in(data).values() for row in rows]


def test_texts_that_are_not_utf_8_are_counted_and_shown(tmp_path: Path) -> None:
    path = lines_of(tmp_path / "rows.jsonl", b'{"text": "half \\ud83d", "label": "good"}')
    data = prepared(path)
    assert data.report.dropped == {"not_text": 1}
    assert data.report.examples["not_text"] == [f"'{path}', line 1"]
    write_table(tmp_path / "rows.csv", ROWS)
    with (tmp_path / "rows.csv").open("ab") as file:
        file.write(b"caf\xe9,good,\n")
    assert prepared(tmp_path / "rows.csv").report.dropped == {"not_text": 1}
    with refused("rows.unreadable", "data.source") as raised:
        prepared(tmp_path / "rows.csv", "data.clean={max_unreadable: 0.0}")
    (place,) = re.findall(r"such as '.*rows\.csv', row (\d+) after byte ([\d,]+): repair", str(raised.value))
    row, start = (int(number.replace(",", "")) for number in place)
    assert (tmp_path / "rows.csv").read_bytes()[start:].splitlines()[row - 1] == b"caf\xe9,good,"


def test_texts_in_arrow_that_are_not_utf_8_are_counted_or_named(tmp_path: Path) -> None:
    good, labels = pa.array([item for item, _, _ in ROWS]), pa.array([label for _, label, _ in ROWS])
    odd, one = (pa.array([cell], pa.binary()).view(pa.string()) for cell in (b"caf\xe9", b"good"))
    texts, names = pa.chunked_array([good, odd]), pa.chunked_array([labels, one])
    pa.parquet.write_table(pa.table({"text": texts, "label": names}), tmp_path / "rows.parquet")
    assert prepared(tmp_path / "rows.parquet").report.dropped == {"not_text": 1}
    pa.parquet.write_table(pa.table({"text": names, "label": texts}), tmp_path / "labels.parquet")
    with refused("text.encoding"):
        prepared(tmp_path / "labels.parquet")


@pytest.mark.parametrize(
    ("lines", "rule", "key"),
    [
        ([b"", b'{"content": "a"}'], "columns.missing", "data.columns.input"),
        ([b'{"text": "a", "label": "b"}', b'{"text": "a"}'], "columns.missing", "data.columns.label"),
        ([b'{"text": "a", "label": "\\udc80"}'], "text.encoding", None),
        ([b'{"text": "a", "label": {"b": 1}}'], "cell.type", "data.columns.label"),
        ([b'{"text": "a", "label": ["b"]}'], "cell.type", "data.columns.label"),
        ([b'{"text": {"a": 1}, "label": "b"}'], "cell.type", "data.columns.input"),
        ([b'{"text": ["a"], "label": "b"}'], "cell.type", "data.columns.input"),
    ],
)  # fmt: skip
def test_a_row_that_is_unlike_the_others_is_named(
    tmp_path: Path, lines: list[bytes], rule: str, key: str | None
) -> None:
    with refused(rule, key):
        prepared(lines_of(tmp_path / "rows.jsonl", *lines))


def test_a_number_is_one_label_in_every_type(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    expected = {item: str(number % 2) for number, (item, _, _) in enumerate(ROWS)}
    texts = list(expected)
    for part, (name, kind) in enumerate((("a", pa.int64()), ("b", pa.float64()), ("c", pa.string()))):
        some = texts[400 * part : 400 * (part + 1)]
        labels = pa.array([int(expected[item]) for item in some]).cast(kind)
        pa.parquet.write_table(pa.table({"text": some, "label": labels}), source / f"{name}.parquet")
    lines = [{"text": "an int", "label": 1}, {"text": "a float", "label": 1.0}, {"text": "a text", "label": "1"}]
    (source / "d.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    expected |= {str(line["text"]): "1" for line in lines}
    data = prepared(source)
    assert data.labels == ["0", "1"]
    assert dict(row for rows in rows_in(data).values() for row in rows) == expected
    assert dict(read_examples(recipe_of(source).data)) == expected


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_row_of_a_later_part_of_a_file_is_named(tmp_path: Path, suffix: str) -> None:
    rows = [(item.encode(), label.encode()) for item, label, _ in ROWS]
    rows[250] = (b"a text", b"caf\xe9")
    write_table(tmp_path / f"rows.{suffix}", rows, ["text", "label"])  # in parts of 100 rows
    with refused("text.encoding"):
        prepared(tmp_path / f"rows.{suffix}")


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label,text\na,good,b\n")
    with refused("columns.twice", "data.columns.input"):
        prepared(tmp_path / "rows.csv")


def images_in(folder: Path, *places: str) -> None:
    for number, place in enumerate(places):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(folder / place)


@pytest.mark.parametrize("odd", ["top.png", "dark/more/deep.png"])
def test_images_at_another_depth_are_refused(tmp_path: Path, odd: str) -> None:
    images_in(tmp_path, "dark/1.png", "light/2.png", odd)
    recipe = load_recipe("recipes/digits.yaml", [f"data.source={tmp_path}"])
    with refused("source.layout"):
        prepare(recipe)


def test_files_that_are_not_read_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    (tmp_path / "README.md").write_text("about")
    prepared(tmp_path)
    assert f"1 files are not read (1 .md), such as '{tmp_path / 'README.md'}'" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["storage", ""], ids=["in the source", "the source itself"])
def test_shards_in_the_source_are_not_read(tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    keys = [f"storage={tmp_path / folder}", "data.clean={near_duplicates: 0.8}"]
    first = prepared(tmp_path, *keys)
    assert prepared(tmp_path, *keys, "data.seed=1").report == first.report
    assert "are not read" not in capsys.readouterr().out


@pytest.mark.parametrize(("step", "rule"), [("listing", "source.not_opened"), ("reading", "file.forbidden")])
def test_refused_credentials_are_told(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, rule: str
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    UPath("s3://guarded").mkdir(exist_ok=True)
    write_table(tmp_path / "rows.parquet", ROWS)
    to_path("s3://guarded/source/rows.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes())

    def refuse() -> None:
        monkeypatch.setattr("moto.core.responses.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)

    def run_units(work: Callable[[int], int], numbers: Sequence[int]) -> Iterable[int]:
        refuse()
        return map(work, numbers)

    if step == "listing":
        refuse()
    with refused(rule):
        prepare(recipe_of("s3://guarded/source"), run_units)
    assert not list((open_storage(None) / preparing.SHARDS).rglob("*.arrow"))


def test_arrow_files_with_large_batches_are_refused(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * 1000] * 600, "label": ["good"] * 600})
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table)
    with refused("batches.too_large", "data.shards.memory"):
        prepared(tmp_path / "rows.arrow", "data.shards={size: 5KB, window: 20KB, memory: 40KB}")


def tar_of(path: Path, count: int = 60) -> None:
    """Write a tar of texts with their labels."""
    with tarfile.open(path, "w") as tar:
        for number, (item, label, _) in enumerate(ROWS[:count]):
            for extension, content in (("txt", item.encode()), ("cls", label.encode())):
                member = tarfile.TarInfo(f"{number:04d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("fault", ["cut between blocks", "cut in a header", "changed header"])
def test_a_torn_tar_is_not_taken_for_a_short_one(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "rows.tar"
    tar_of(path)
    assert prepared(path).report.given == 60
    content = bytearray(path.read_bytes())
    if fault == "changed header":
        content[20 * 1024 : 20 * 1024 + 512] = b"x" * 512
    else:
        del content[20 * 1024 + (0 if fault == "cut between blocks" else 200) :]
    path.write_bytes(content)
    with refused("file.torn"):
        prepared(path)


def test_a_torn_parquet_file_is_to_be_written_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_table(path, ROWS)
    content = bytearray(path.read_bytes())
    content[3000:3400] = bytes(400)
    path.write_bytes(content)
    with refused("file.unreadable"):
        prepared(path)


GOOD = {
    "text-classification": lambda n: {"text": f"text {n}", "label": "ab"[n % 2]},
    "text-regression": lambda n: {"text": f"text {n}", "label": n},
    "text-multilabel": lambda n: {"text": f"text {n}", "label": ["a"] * (n % 2) + ["b"]},
    "token-classification": lambda n: {"tokens": [f"w{n}", "x"], "tags": ["O", "AC"[n % 2]]},
    "sentence-embedding": lambda n: {"anchor": f"asks {n}", "positive": f"says {n}"},
    "language-modeling": lambda n: {"text": f"text {n}"},
    "tabular-regression": lambda n: {"size": n / 2, "label": n},
    "tabular-multilabel": lambda n: {"size": n / 2, "label": ["a"] * (n % 2) + ["b"]},
}
"""A row of each kind of task, by its number."""


def of_task(task: str, source: Path, **data: object) -> Recipe:
    model = {"factory": "a:b", "args": {"dimensions": 8}}
    tree = {"name": "x", "task": task, "data": {"source": str(source), **data}, "model": model}
    return Recipe.model_validate(tree)


def of_rows(path: Path, task: str, *bad: dict[str, object], first: int = 0) -> Path:
    """Write good rows, with bad ones from row 26 on."""
    rows = [GOOD[task](first + number) for number in range(50)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in (*rows[:25], *bad, *rows[25:])), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("task", "bad", "rule", "key"),
    [
        ("text-classification", {"text": "c", "label": ["a"]}, "cell.type", "data.columns.label"),
        ("text-classification", {"text": {"a": 1}, "label": "a"}, "cell.type", "data.columns.input"),
        ("text-regression", {"text": "c", "label": "many"}, "label.not_a_number", None),
        ("tabular-regression", {"size": 1, "label": "inf"}, "label.not_a_number", None),
        ("tabular-regression", {"size": 1, "label": "1_000"}, "label.not_a_number", None),
        ("tabular-regression", {"size": [1], "label": 1}, "cell.type", "data.columns.features.0"),
        ("tabular-multilabel", {"size": 1, "label": {"a": 1}}, "cell.type", "data.columns.label"),
        ("text-multilabel", {"text": "c", "label": ["1", "01"]}, "labels.alike", "data.source"),
        ("text-multilabel", {"text": "c", "label": ["\u00e9", "e\u0301"]}, "labels.alike", "data.source"),
        ("token-classification", {"tokens": ["a"], "tags": []}, "tags.count", None),
        ("token-classification", {"tokens": ["a"], "tags": [1]}, "tag_names.missing", "data.columns.tag_names"),
        ("token-classification", {"tokens": "a", "tags": ["O"]}, "cell.not_a_list", "data.columns.tokens"),
        ("sentence-embedding", {"anchor": ["a"], "positive": "b"}, "cell.type", "data.columns.anchor"),
        ("language-modeling", {"text": ["a"]}, "cell.type", "data.columns.input"),
    ],
)
def test_a_row_that_cannot_be_learned_is_named(
    tmp_path: Path, task: str, bad: dict[str, object], rule: str, key: str | None
) -> None:
    of_rows(tmp_path / "data/a.jsonl", task)
    of_rows(tmp_path / "data/b.jsonl", task, bad, bad)
    with refused(rule, key):
        prepare(of_task(task, tmp_path / "data"))


@pytest.mark.parametrize(
    ("task", "bad", "words"),
    [
        ("text-classification", {"text": "c", "label": "odd"}, "has the label 'odd', but .* only a, b"),
        ("text-multilabel", {"text": "c", "label": ["a", "odd"]}, "has the label 'odd', but .* only a, b"),
        ("text-regression", {"text": "c", "label": "odd"}, "has the label 'odd': a regression"),
        ("token-classification", {"tokens": ["a"], "tags": ["ODD"]}, "has the label 'B-ODD', but .* only O, B-A, "),
    ],
)
def test_a_row_of_the_test_source_with_an_unknown_label_is_named(
    tmp_path: Path, task: str, bad: dict[str, object], words: str
) -> None:
    source = of_rows(tmp_path / "a.jsonl", task)
    tests = of_rows(tmp_path / "tests.jsonl", task, bad, first=100)
    with pytest.raises(DataError, match=rf"tests\.jsonl', (line|row) 26\b.*data\.test_source .*{words}"):
        prepare(of_task(task, source, test_source=str(tests)))


def test_a_sample_that_the_processor_refuses_is_named(tmp_path: Path) -> None:
    data: Any = prepare(of_task("tabular-regression", of_rows(tmp_path / "a.jsonl", "tabular-regression")))
    column = data.processor._numbers[0].model_copy(update={"std": 1e-40})
    data = replace(data, train=replace(data.train, processor=TabularProcessor([column], [])))
    with pytest.raises(DataError, match=r"/train-00000-000\.arrow, row 3: a row has .* for 'size'"):
        data.train.batch([2, 1])


@pytest.mark.parametrize("count", [32, 4_000])
def test_a_look_refuses_unreadable_rows_only_if_there_are_no_others(
    tmp_path: Path, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{text(number)} caf\u00e9,{'ab'[number % 2]}" for number in range(count)]
    encoded = [row.encode("cp1252" if number < 32 else "utf-8") for number, row in enumerate(rows)]
    (tmp_path / "rows.csv").write_bytes(b"\n".join([b"text,label", *encoded]))
    recipe = of_task("text-classification", tmp_path / "rows.csv")
    kind = find_task(recipe.task).samples(recipe)
    if count == 32:
        with refused("rows.unreadable", "data.source"):
            require_readable(recipe.data, kind)
        return
    require_readable(recipe.data, kind)
    assert "rows.csv" not in capfd.readouterr().err
    data: Any = prepare(recipe)
    assert data.report.dropped["not_text"] == 32


def test_a_sample_of_a_tar_may_have_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    samples = [(f"caf\udce9 {number}", picture(number), b"ab"[number % 2 :][:1]) for number in range(40)]
    samples.append(("caf\udce9 torn", b"torn", b"a"))
    members = [member for name, png, label in samples for member in ((f"{name}.png", png), (f"{name}.cls", label))]
    (tmp_path / "some.tar").write_bytes(tar(*members))
    overrides = [f"data.source={tmp_path}/some.tar", "train.linear_baseline=false", "data.clean.max_unreadable=0.1"]
    data = prepare(load_recipe("recipes/digits.yaml", overrides))
    assert data.report.dropped == {"unreadable": 1}
    with refused("rows.unreadable", "data.source"):
        prepare(load_recipe("recipes/digits.yaml", overrides[:2]))
