"""Preparation as shards: every format, in units, cleaned and split as told, the same bytes whoever works on it."""

import io
import json
import os
import random
import shutil
import signal
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from upath import UPath

from app.config import load_recipe
from app.data.preparation import prepare as preparing
from app.data.preparation import sample as sampling
from app.data.preparation.formats import read_unit
from app.data.preparation.progress import UnitProgress
from app.data.preparation.rows import Columns
from app.data.preparation.units import Unit, cut_units, list_files
from app.data.preparation.work import UnitWork
from app.data.sharded_data import ShardedLabelledData, ShardedLanguageData
from app.data.shards import ShardIndex, ShardWriter
from app.data.tokenizer import SETTINGS_FILE, LanguageTokenizer
from app.errors import DataError, RecipeError
from app.heartbeat import HEARTBEAT_FILE
from app.storage import open_storage, to_path, write_atomically
from app.tasks import load_prepared, load_with_test, prepare, prepare_shards
from tests.preparing import ROWS, WORDS, language_recipe, prepared, recipe_of, rows_in, text, write_table


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv", "jsonl"])
def test_every_format_gives_every_row_once_in_many_units(tmp_path: Path, suffix: str) -> None:
    for part in range(2):
        write_table(tmp_path / f"part{part}.{suffix}", ROWS[600 * part : 600 * (part + 1)])
    recipe = recipe_of(tmp_path, "data.test_fraction=0.1")
    files = list_files(recipe.data, "text")
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
    (file,) = list_files(recipe_of(path).data, "text")
    cut = cut_units([file], 9_000)
    assert len(cut) > 5
    columns = Columns("text", "label", "author")
    found, whole = (
        [
            row
            for unit in units
            for part in read_unit(unit, columns)
            for row in zip(part.inputs, part.labels or (), strict=True)
        ]
        for units in (cut, cut_units([file], 10**6))
    )
    assert found == whole
    assert found[:-2] == [(item, label) for item, label, _ in rows]
    assert found[-2:] == [('bare "quote" 1', "good"), ('bare "quote 2', "bad")]


def test_rows_of_one_hash_take_no_more_memory_than_others(tmp_path: Path) -> None:
    """Rows are compared a few at a time, whether they are alike or not."""
    alike = " ".join(WORDS * 6)
    texts = [text(number) if number % 4 == 0 else f"{alike} number {number % 41}" for number in range(2000)]
    rows = [(item, ("good", "bad")[number % 8 == 0], "") for number, item in enumerate(texts)]
    write_table(tmp_path / "rows.csv", rows)
    found = []
    for memory in ("40KB", "1GB"):
        for keys in ("{}", "{deduplicate: false}", "{near_duplicates: 0.6}"):
            shards = f"data.shards={{size: 5KB, window: 20KB, memory: {memory}}}"
            storage = f"storage={tmp_path / memory}"
            found.append(prepared(tmp_path / "rows.csv", f"data.clean={keys}", shards, storage).reference.sha256)
    assert found[:3] == found[3:]
    assert len(set(found)) == 3


def test_a_row_stays_in_its_split_when_the_data_grow(tmp_path: Path) -> None:
    write_table(tmp_path / "some.jsonl", ROWS[:700])
    before = rows_in(prepared(tmp_path / "some.jsonl"))
    write_table(tmp_path / "more.jsonl", ROWS)
    after = rows_in(prepared(tmp_path / "more.jsonl"))
    assert set(before["train"]) <= set(after["train"])
    assert set(before["validation"]) <= set(after["validation"])


def test_rows_of_a_group_are_in_one_split(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    found = rows_in(prepared(tmp_path / "rows.csv", "data.group_column=author", "data.test_fraction=0.2"))
    author = {item: group for item, _, group in ROWS}
    groups = [{author[item] for item, _ in rows} for rows in found.values()]
    assert len(groups) == 3
    assert sum(map(len, groups)) == len(set().union(*groups)) == 60


def test_rows_without_a_group_are_split_one_by_one(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.csv", [(item, label, "") for item, label, _ in ROWS])
    data = prepared(tmp_path / "rows.csv", "data.group_column=author", "data.test_fraction=0.2")
    assert 180 < data.rows["test"] < 300
    with pytest.raises(RecipeError, match="equal inputs of two groups could be in two splits"):
        recipe_of(tmp_path / "rows.csv", "data.group_column=author", "data.clean={deduplicate: false}")


def test_what_is_dropped_is_what_the_data_in_memory_drop(tmp_path: Path) -> None:
    odd = [
        ("  ", "good"),
        (ROWS[3][0], ROWS[3][1]),
        (ROWS[4][0], "good"),
        (f" {ROWS[5][0]} ", ROWS[5][1]),
        (text(-1), ""),
    ]
    write_table(tmp_path / "rows.parquet", [*ROWS[:300], *((*row, "") for row in odd), *ROWS[300:]])
    source = tmp_path / "rows.parquet"
    sharded = prepared(source).report
    in_memory = prepare(load_recipe("recipes/reviews.yaml", [f"data.source={source}", "train.linear_baseline=false"]))
    assert sharded.model_copy(update={"examples": {}}) == in_memory.report
    assert sharded.dropped == {"empty": 1, "duplicate": 3, "conflicting": 1, "unlabelled": 1}
    assert sharded.examples["conflicting"] == [ROWS[4][0]]


def test_texts_of_other_lengths_are_dropped_in_shards_and_in_memory(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    keys = ["data.clean={min_length: 60, max_length: 120}"]
    sharded = prepared(tmp_path / "rows.csv", *keys).report
    keys += [f"data.source={tmp_path / 'rows.csv'}", "train.linear_baseline=false"]
    in_memory = prepare(load_recipe("recipes/reviews.yaml", keys)).report
    assert sharded.dropped == in_memory.dropped
    assert sharded.dropped["too_short"] == sum(len(item) < 60 for item, _, _ in ROWS)
    assert sharded.dropped["too_long"] == sum(len(item) > 120 for item, _, _ in ROWS)
    assert all(len(item) > 120 for item in sharded.examples["too_long"]) or len(sharded.examples["too_long"]) == 10


def planted(count: int = 600) -> tuple[list[str], list[str]]:
    """Unlike texts, and copies of a tenth of them in which one word in a hundred is another."""
    source = random.Random(0)
    words = [f"{word}{number}" for word in WORDS for number in range(300)]
    texts = [source.choices(words, k=source.randint(100, 180)) for _ in range(count)]
    copies = []
    for words_of_one in texts[::10]:
        copy = list(words_of_one)
        copy[source.randrange(len(copy))] = "other"
        copies.append(" ".join(copy))
    return [" ".join(one) for one in texts], copies


def test_near_duplicates_are_found_and_nothing_else(tmp_path: Path) -> None:
    texts, copies = planted()
    unlike = ["short", "short one", "全然不同的一句话在这里", "另外一句与它毫不相干的话语"]
    rows = [(item, ("good", "bad")[place % 2], "") for place, item in enumerate([*texts, *unlike, *copies])]
    write_table(tmp_path / "rows.jsonl", rows)
    data = prepared(tmp_path / "rows.jsonl", "data.clean={near_duplicates: 0.8}")
    kept = {item for rows in rows_in(data).values() for item, _ in rows}
    assert {*texts, *unlike} <= kept  # precision
    assert len(kept & set(copies)) <= 0.05 * len(copies)  # recall
    assert data.report.dropped == {"near_duplicate": len(rows) - len(kept)}
    assert len(data.report.examples["near_duplicate"]) == 10
    few_at_a_time = recipe_of(tmp_path / "rows.jsonl", "data.clean={near_duplicates: 0.8}", "data.seed=1")
    shards = few_at_a_time.data.shards
    assert shards is not None
    bounded = few_at_a_time.data.model_copy(update={"shards": shards.model_copy(update={"memory": 40_000})})
    again = prepare(few_at_a_time.model_copy(update={"data": bounded}))
    assert again.report.dropped == data.report.dropped


def test_all_who_work_on_it_write_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "rows.jsonl", ROWS)
    here = prepared(tmp_path / "rows.jsonl").reference

    def elsewhere(work: Callable[[int], int], numbers: Sequence[int]) -> Iterable[int]:
        with ThreadPoolExecutor(3) as pool:
            yield from pool.map(work, reversed(numbers))

    monkeypatch.setenv("RAYLOOM_STORAGE", str(tmp_path / "other"))
    there = prepare_shards(recipe_of(tmp_path / "rows.jsonl"), elsewhere)
    assert isinstance(there, ShardedLabelledData)
    assert there.reference.location != here.location
    assert there.reference.sha256 == here.sha256
    assert there.fingerprint == prepared(tmp_path / "rows.jsonl").fingerprint


def test_a_killed_preparation_goes_on_and_a_second_one_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path / "rows.jsonl", ROWS)
    recipe = recipe_of(tmp_path / "rows.jsonl")
    child = os.fork()
    if not child:
        write = ShardWriter._write

        def killed(writer: ShardWriter) -> None:
            if "00002" in writer._prefix and writer.shards:  # the second shard of the third unit
                os.kill(os.getpid(), signal.SIGKILL)
            write(writer)

        monkeypatch.setattr(ShardWriter, "_write", killed)
        prepare(recipe)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (folder,) = (open_storage(None) / preparing.SHARDS).iterdir()
    assert ShardIndex.find(folder) is None
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*-0000[01]-*.arrow")}
    assert len(before) > 4

    monkeypatch.setattr("app.heartbeat._TIMEOUT_S", 0.5)
    resumed = prepare(recipe)
    assert "writing shards: goes on after 2 of 6 parts" in capsys.readouterr().out
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.glob("*-0000[01]-*.arrow")}
    assert not [path for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".lock"]

    def forbidden(work: Callable[[int], int], numbers: Sequence[int]) -> Iterable[int]:
        raise AssertionError("it is prepared already")

    again = prepare_shards(recipe, forbidden)
    monkeypatch.setenv("RAYLOOM_STORAGE", str(tmp_path / "other"))
    assert again.fingerprint == resumed.fingerprint == prepare(recipe).fingerprint


def test_a_second_job_waits_for_the_first_and_returns_its_shards(
    storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path / "rows.jsonl", ROWS)
    recipe = recipe_of(tmp_path / "rows.jsonl", f"storage={storage}")
    begun, released = threading.Event(), threading.Event()

    def slow(work: Callable[[int], int], numbers: Sequence[int]) -> Iterable[int]:
        begun.set()
        assert released.wait(30)
        return map(work, numbers)

    def forbidden(work: Callable[[int], int], numbers: Sequence[int]) -> Iterable[int]:
        raise AssertionError("the first job prepares it")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(prepare_shards, recipe, slow)
        assert begun.wait(30)
        second = pool.submit(prepare_shards, recipe, forbidden)
        with pytest.raises(TimeoutError):
            second.result(1.0)
        released.set()
        assert second.result(30).fingerprint == first.result(30).fingerprint
    assert "another job was preparing" in capsys.readouterr().out
    (folder,) = (to_path(storage) / preparing.SHARDS).iterdir()
    assert not (folder / HEARTBEAT_FILE).exists()


@pytest.mark.parametrize("changed", ["rows", "content", "label", "file"])
def test_a_source_that_changes_between_the_passes_is_refused(tmp_path: Path, changed: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_table(source / "rows.jsonl", ROWS)
    passes = 0

    def run_units(work: Callable[[int], int], numbers: Sequence[int]) -> Iterable[int]:
        nonlocal passes
        if passes == 1:
            rows = {
                "rows": [*ROWS[:5], *ROWS[3:5], *ROWS[5:]],
                "content": [*ROWS[:9], (ROWS[9][0].upper(), *ROWS[9][1:]), *ROWS[10:]],
                "label": [*ROWS[:9], (ROWS[9][0], "best", ROWS[9][2]), *ROWS[10:]],
                "file": ROWS,
            }[changed]
            write_table(source / ("more.jsonl" if changed == "file" else "rows.jsonl"), rows)
        passes += 1
        yield from map(work, numbers)

    told = r"changed while it was prepared \(1 files" if changed == "file" else "changed since the first pass"
    with pytest.raises(DataError, match=rf"{told}.*: prepare the data again"):
        prepare_shards(recipe_of(source), run_units)
    (folder,) = (open_storage(None) / preparing.SHARDS).iterdir()
    assert ShardIndex.find(folder) is None


def test_other_settings_make_other_shards_and_other_windows_do_not(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    source = tmp_path / "rows.csv"
    first = prepared(source).reference.location
    wider = recipe_of(source, "data.shards={size: 5KB, window: 90KB}", "data.buckets=[16]")
    same = prepare(wider)
    assert isinstance(same, ShardedLabelledData)
    assert same.reference.location == first
    assert prepared(source, "data.seed=1").reference.location != first
    write_table(source, ROWS[:-1])
    assert prepared(source).reference.location != first


def test_another_tokenizer_at_the_same_place_makes_other_shards(tmp_path: Path) -> None:
    source, folder = tmp_path / "texts.csv", to_path(tmp_path / "model")
    write_table(source, [(text(number),) for number in range(400)], ["text"])
    recipe = language_recipe(source)
    model = recipe.model.model_copy(update={"pretrained": str(folder)})
    places = []
    for size in (300, 280):
        config = language_recipe(source, f"data.tokenizer.vocab_size={size}").data
        LanguageTokenizer.fit([text(number) for number in range(400)], config).save(folder)
        (folder / "config.json").write_text('{"model_type": "some"}')
        data = prepare_shards(recipe.model_copy(update={"model": model}), map)
        assert isinstance(data, ShardedLanguageData)
        assert data.tokenizer.facts["vocab_size"] == size
        places.append(data.reference.location)
    assert places[0] != places[1]
    moved = model.model_copy(update={"pretrained": shutil.move(tmp_path / "model", tmp_path / "moved")})
    again = prepare_shards(recipe.model_copy(update={"model": moved}), map)
    assert isinstance(again, ShardedLanguageData)
    assert again.reference.location == places[1]  # the tokenizer counts, and its place does not


def test_units_beyond_five_digits_are_found_again(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    units = tuple(Unit(number, ()) for number in range(100_011))
    work = UnitWork(str(tmp_path), recipe.data, units, "text", sample_fraction=1.0)
    for number in (7, 10_000, 100_010):
        write_atomically(work.facts_file(number), b"{}")
    assert work.finished("facts-") == {7, 10_000, 100_010}


def test_a_driver_that_lists_no_versions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    monkeypatch.setattr("app.data.preparation.units.list_source", lambda source, root: [(root, {"size": 9})])
    with pytest.raises(DataError, match="lists neither an ETag nor a time of the last change"):
        prepared(tmp_path / "rows.csv")


def test_a_run_keeps_a_reference_and_refuses_other_shards(tmp_path: Path, storage: str) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    recipe = recipe_of(tmp_path / "rows.csv", f"storage={storage}", "data.test_fraction=0.1")
    data = prepare(recipe)
    folder = to_path(f"{storage}/runs/train/some/data")
    data.save(folder)
    loaded = load_with_test(recipe, folder)
    assert loaded.fingerprint == data.fingerprint
    assert loaded.rows == data.rows
    assert np.array_equal(loaded.train.batch([5, 3]).targets, data.train.batch([5, 3]).targets)
    index = ShardIndex.load(to_path(data.reference.location))  # type: ignore[attr-defined]
    index.splits["train"].pop()
    index.save(to_path(data.reference.location))  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="are not those that the run began with"):
        load_prepared(recipe, folder)


def test_documents_become_blocks_of_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number:03}.txt").write_text(text(number), encoding="utf-8")
    (folder / "odd.txt").write_bytes(b"\xff\xfe")
    write_table(folder / "more.csv", [(text(number),) for number in range(300, 400)], ["text"])
    data = prepare(language_recipe(folder))
    assert isinstance(data, ShardedLanguageData)
    assert (data.report.given, data.report.kept, data.report.dropped) == (401, 400, {"not_text": 1})
    batch = data.train.batch([1, 0])
    assert batch.inputs["input_ids"].shape == batch.targets.shape == (2, 16)
    assert np.array_equal(batch.inputs["input_ids"][:, 1:], batch.targets[:, :-1])
    train = "".join(data.tokenizer.decode(data.train.batch([row]).inputs["input_ids"][0].tolist()) for row in range(50))
    assert sum(text(number) in train for number in range(400)) > 5
    blocks = (len(data.train) + len(data.validation)) * 16
    assert blocks > 0.9 * sum(len(data.tokenizer.encode(text(number))) + 1 for number in range(400))


def test_a_large_text_is_read_in_parts_without_losing_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.preparation.units.MAX_DOCUMENT_BYTES", 2000)
    lines = [text(number) for number in range(1000)]
    (tmp_path / "all.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = prepare(language_recipe(tmp_path / "all.txt", "data.tokenizer={kind: bytes}"))
    assert data.report.kept > 20
    assert data.report.given == data.report.kept
    tokens = (len(data.train) + len(data.validation)) * 16  # type: ignore[attr-defined]
    size = (tmp_path / "all.txt").stat().st_size
    assert size - 16 * 2 * 10 < tokens <= size + data.report.kept


def test_a_tokenizer_is_learned_from_parts_of_few_large_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sampling, "SAMPLE_SIZE", 60_000)
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [text(number) for number in range(6000)]
    for part in range(8):
        (folder / f"{part}.txt").write_text("\n".join(lines[part::8]), encoding="utf-8")
    data = prepare(language_recipe(folder, "data.validation_fraction=0.3"))
    assert isinstance(data, ShardedLanguageData)
    assert data.tokenizer.facts["vocab_size"] == 300
    assert "a sample of" in (told := capsys.readouterr().out)
    assert 2 < int(told.partition("a sample of ")[2].split()[0]) < 30

    monkeypatch.setattr(sampling, "SAMPLE_SIZE", 1)
    with pytest.raises(DataError, match=r"has no training row in the sample .*: give more or shorter rows"):
        prepare(language_recipe(folder, "data.validation_fraction=0.3", "data.seed=1"))


def test_the_settings_of_a_tokenizer_are_written_last(tmp_path: Path) -> None:
    recipe = language_recipe(tmp_path)
    tokenizer = LanguageTokenizer.fit(["some text"], recipe.data)
    (tmp_path / "tokenizer_config.json").mkdir()  # it cannot be written
    with pytest.raises(OSError, match=r"tokenizer_config\.json"):
        tokenizer.save(to_path(tmp_path))
    assert not (tmp_path / SETTINGS_FILE).exists()


def test_pictures_that_cannot_be_decoded_are_counted_or_refused(tmp_path: Path) -> None:
    for label, level in (("dark", 0), ("light", 200)):
        (tmp_path / label).mkdir()
        for number in range(150):
            Image.new("L", (8, 8), level + number % 50).resize((8 + number // 50, 8)).save(
                tmp_path / label / f"{number}.png"
            )
    (tmp_path / "dark" / "torn.png").write_bytes(b"\x89PNG nothing")
    Image.new("1", (9000, 9000)).save(tmp_path / "dark" / "vast.png")  # training refuses so many pixels
    shards = "data.shards={size: 5KB, window: 20KB}"
    recipe = load_recipe("recipes/digits.yaml", [f"data.source={tmp_path}", shards])
    data = prepare(recipe)
    assert data.report.dropped == {"unreadable": 2}
    assert data.report.examples["unreadable"] == [str(tmp_path / "dark" / name) for name in ("torn.png", "vast.png")]
    assert data.train.batch([0, 1]).inputs["pixel_values"].shape[0] == 2
    for number in range(9):
        (tmp_path / "dark" / f"torn{number}.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(
        DataError, match=r"11 pictures that cannot be decoded among 311 rows, more than 1%, such as '.*/dark/torn\.png'"
    ):
        prepare(recipe)


def test_groups_are_of_tables_only(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text")
    with pytest.raises(DataError, match=r"group_column is 'author', and '.*text\.txt' is not a table"):
        prepare(language_recipe(tmp_path, "data.group_column=author"))


def test_a_line_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.preparation.lines._MAX_LINE_BYTES", 1000)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "x" * 1200, "label": "a"}))
    with pytest.raises(DataError, match=r"rows\.jsonl' has a line of more than 1,000 bytes"):
        prepare(recipe_of(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("rows", "overrides", "told"),
    [
        (ROWS[:1], [], "leaves the validation split empty"),
        ([(text(number), "good", "") for number in range(50)], [], r"has the classes \['good'\] after cleaning"),
        ([("", "", "")] * 3, [], "leaves the train split empty"),
    ],
)
def test_too_little_data_is_refused(
    tmp_path: Path, rows: list[tuple[str, ...]], overrides: list[str], told: str
) -> None:
    write_table(tmp_path / "rows.parquet", rows)
    with pytest.raises(DataError, match=told):
        prepare(recipe_of(tmp_path / "rows.parquet", *overrides))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.linear_baseline=true"], "train.linear_baseline reads all data into memory"),
        (["data.test_source=x.csv"], "test_source cannot be read with shards"),
        (["data.clean.near_duplicates=0.2"], "near_duplicates"),
        (["data.shards={size: 1GB}"], "memory is 1000000000 bytes, and a shard has 1000000000"),
        (["data.clean.near_duplicates=0.9", "data.shards=null"], "found in data in shards only"),
        (["data.clean={min_length: 9, max_length: 3}"], "min_length 9 is more than max_length 3"),
    ],
)
def test_keys_that_shards_do_not_go_with_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        recipe_of("rows.csv", *overrides)


def test_progress_says_how_much_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    progress = UnitProgress("reading", [1_000_000] * 10, {0}, lambda: now[0])
    for number, seconds in ((1, 5.0), (2, 12.0), (3, 18.0)):
        now[0] = seconds
        progress.add(number)
    told = capsys.readouterr().out.splitlines()
    assert told == ["reading: goes on after 1 of 10 parts", "reading: 3 of 10 parts, 3 of 10 MB, about 42.0 s left"]


def test_a_source_on_s3_is_prepared(s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    UPath("s3://prepared").mkdir(exist_ok=True)
    write_table(tmp_path / "rows.parquet", ROWS)
    to_path("s3://prepared/source/rows.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes())
    data = prepare(recipe_of("s3://prepared/source", "storage=s3://prepared/storage"))
    assert sum(data.rows.values()) == len(ROWS)
    local = prepare(recipe_of(tmp_path / "rows.parquet"))
    assert data.fingerprint == local.fingerprint


def write_tar(path: Path, samples: Sequence[dict[str, bytes]]) -> None:
    """Write samples of members by extension in WebDataset's layout."""
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples):
            for extension, content in sample.items():
                member = tarfile.TarInfo(f"some/{number:05d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


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
    with pytest.raises(
        DataError, match=r"b\.tar', sample some/00000 has no member that is a label: it has \.txt; expected"
    ):
        prepared(source)
    (source / "b.tar").write_bytes((source / "a.tar").read_bytes()[:5000])
    with pytest.raises(DataError, match=r"b\.tar' cannot be read as tar"):
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


def test_each_label_is_in_every_split_and_no_other_row_moves(tmp_path: Path) -> None:
    rows = [(item, f"rare {number // 4}" if number < 40 else label, "") for number, (item, label, _) in enumerate(ROWS)]
    write_table(tmp_path / "rows.csv", rows)
    keys = ["data.test_fraction=0.1", "data.validation_fraction=0.05"]
    found = rows_in(prepared(tmp_path / "rows.csv", "data.stratify=true", *keys))
    labels = [{label for _, label in split} for split in found.values()]
    assert labels[0] == labels[1] == labels[2]
    assert len(labels[0]) == 13
    common = [(item, label, "") for item, label, _ in rows if not label.startswith("rare")]
    write_table(tmp_path / "common.csv", common)
    plain = rows_in(prepared(tmp_path / "common.csv", *keys))
    for split, kept in plain.items():
        assert set(kept) <= set(found[split])
    with pytest.raises(RecipeError, match="stratify and group_column 'author' contradict each other"):
        recipe_of(tmp_path / "rows.csv", "data.stratify=true", "data.group_column=author")


def test_texts_are_dropped_by_language_and_symbols(tmp_path: Path) -> None:
    english = "The river flows past the old stone house and into the valley, where nobody lives any more"
    odd = [
        ("Der Fluss fließt an dem alten Haus vorbei und in das Tal, in dem niemand mehr wohnt", "language"),
        ("这条河流过古老的石头房子，流进山谷，那里再也没有人居住了", None),
        ("=== <<>> *** !!! ??? --- ### $$$ %%% house", "symbols"),
        ("नदी पुराने पत्थर के घर के पास से बहती है और घाटी में जाती है", "language"),
    ]
    rows = [(f"{english} {number}", ("good", "bad")[number % 2], "") for number in range(200)]
    write_table(tmp_path / "rows.csv", [*rows, *((item, "good", "") for item, _ in odd)])
    keys = ["data.clean={languages: [en, zh], max_symbol_share: 0.2}"]
    sharded = prepared(tmp_path / "rows.csv", *keys).report
    assert sharded.dropped == {"language": 2, "symbols": 1}
    assert sharded.examples["language"] == [item for item, reason in odd if reason == "language"]
    keys += [f"data.source={tmp_path / 'rows.csv'}", "train.linear_baseline=false"]
    assert prepare(load_recipe("recipes/reviews.yaml", keys)).report.dropped == sharded.dropped
    with pytest.raises(RecipeError, match="languages has english: expected codes of ISO 639-1 among"):
        prepared(tmp_path / "rows.csv", "data.clean={languages: [english]}")
