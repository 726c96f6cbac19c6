"""Preparation as shards: one source with its settings gives the same bytes, whichever workers prepare it."""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from app.data.labelled import LabelledData
from app.data.language import LanguageData
from app.data.preparation import prepare as preparing
from app.data.preparation import sample as sampling
from app.data.preparation.data import prepare_labelled
from app.data.preparation.encoding import Encoding
from app.data.preparation.progress import UnitProgress
from app.data.preparation.samples import Documents
from app.data.preparation.work import UnitWork
from app.data.shards import ShardIndex, ShardWriter
from app.data.sources import units
from app.data.sources.units import Unit
from app.data.text import TextProcessor
from app.data.tokenizer import SETTINGS_FILE, LanguageTokenizer
from app.heartbeat import HEARTBEAT_FILE
from app.storage import open_storage, to_path, write_atomically
from app.tasks import load_prepared, load_with_test, prepare
from tests.helpers import wait_until
from tests.preparing import ROWS, WORDS, language_recipe, prepared, recipe_of, text, write_table
from tests.wording import refused


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


def test_all_who_work_on_it_write_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "rows.jsonl", ROWS)
    here = prepared(tmp_path / "rows.jsonl").reference

    def elsewhere(work: Callable[[int], int], numbers: Sequence[int]) -> Iterable[int]:
        with ThreadPoolExecutor(3) as pool:
            yield from pool.map(work, reversed(numbers))

    monkeypatch.setenv("RAYLOOM_STORAGE", str(tmp_path / "other"))
    there = prepare(recipe_of(tmp_path / "rows.jsonl"), elsewhere)
    assert isinstance(there, LabelledData)
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
            if "00002" in writer.place.prefix and writer.shards:  # the second shard of the third unit
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

    again = prepare(recipe, forbidden)
    monkeypatch.setenv("RAYLOOM_STORAGE", str(tmp_path / "other"))
    assert again.fingerprint == resumed.fingerprint == prepare(recipe).fingerprint


def test_a_second_job_waits_for_the_first_and_returns_its_shards(
    storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path / "rows.jsonl", ROWS)
    recipe = recipe_of(tmp_path / "rows.jsonl", f"storage={storage}", "data.shards={size: 20KB, window: 20KB}")
    begun, released, said = threading.Event(), threading.Event(), ""

    def is_waiting() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "another job was preparing" in said

    def slow(work: Callable[[int], int], numbers: Sequence[int]) -> Iterable[int]:
        begun.set()
        assert released.wait(60)
        return map(work, numbers)

    def forbidden(work: Callable[[int], int], numbers: Sequence[int]) -> Iterable[int]:
        raise AssertionError("the first job prepares it")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(prepare, recipe, slow)
        assert begun.wait(30)
        second = pool.submit(prepare, recipe, forbidden)
        wait_until(is_waiting, timeout_s=30)
        with pytest.raises(TimeoutError):
            second.result(0.5)
        released.set()
        assert second.result(30).fingerprint == first.result(30).fingerprint
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

    with refused("source.changed", "data.source" if changed == "file" else None):
        prepare(recipe_of(source), run_units)
    (folder,) = (open_storage(None) / preparing.SHARDS).iterdir()
    assert ShardIndex.find(folder) is None


def test_other_settings_make_other_shards_and_other_windows_do_not(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    source = tmp_path / "rows.csv"
    first = prepared(source).reference.location
    wider = recipe_of(source, "data.shards={size: 5KB, window: 90KB}", "data.buckets=[16]")
    same = prepare(wider)
    assert isinstance(same, LabelledData)
    assert same.reference.location == first
    assert prepared(source, "data.seed=1").reference.location != first
    write_table(source, ROWS[:-1])
    assert prepared(source).reference.location != first


OWN_CODE = """
from dataclasses import replace
from app.data.preparation.samples import Labelled
from app.data.targets import Classes
class OwnTargets(Classes):
    rule = replace(Classes.rule, written=lambda label, separator: label{change})
class OwnSamples(Labelled):
    def labels(self, rows, config):
        return [label{change} for label in super().labels(rows, config)]
KIND = {kind}
"""
OWN_RULES = """
try:
    import own.old
except SyntaxError:
    import json, own_code
def tail():
    return "{tail}"
"""


@pytest.mark.parametrize("kind", ["Labelled('text', OwnTargets)", "OwnSamples('text', Classes)"])
def test_changed_project_code_makes_other_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_table(tmp_path / "rows.csv", ROWS[:60])
    recipe = recipe_of(tmp_path / "rows.csv")

    def prepared_by(change: str) -> LabelledData:
        (tmp_path / "own_code.py").write_text(OWN_CODE.format(kind=kind, change=change), encoding="utf-8")
        monkeypatch.delitem(sys.modules, "own_code", raising=False)
        return prepare_labelled(recipe, import_module("own_code").KIND, TextProcessor)

    first = prepared_by("")
    assert prepared_by("").reference == first.reference
    assert prepared_by(".upper()").labels == ["BAD", "FAIR", "GOOD"]


@pytest.mark.parametrize(
    "imports",
    [
        "from own.rules import tail",
        "import own.rules; tail = own.rules.tail",
        "from own import tail",
        "from own import *",
    ],
)
def test_changed_imports_of_project_code_make_other_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_table(tmp_path / "rows.csv", ROWS[:60])
    (tmp_path / "own").mkdir()
    (tmp_path / "own/__init__.py").write_text("from .rules import tail\n")
    (tmp_path / "own/old.py").write_text("print 1")
    code = OWN_CODE.format(kind="Labelled('text', OwnTargets)", change=" + tail()")
    (tmp_path / "own_code.py").write_text(f"{imports}\n{code}")

    def prepared_by(tail: str) -> LabelledData:
        (tmp_path / "own/rules.py").write_text(OWN_RULES.format(tail=tail))
        for name in ("own_code", "own", "own.rules"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return prepare_labelled(recipe_of(tmp_path / "rows.csv"), import_module("own_code").KIND, TextProcessor)

    first = prepared_by("x")
    assert prepared_by("x").reference == first.reference
    assert first.labels == ["badx", "fairx", "goodx"]
    assert prepared_by("y").labels == ["bady", "fairy", "goody"]


def test_changed_code_of_a_module_that_is_not_named_after_its_file_makes_other_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_table(tmp_path / "rows.csv", ROWS[:60])

    def prepared_by(change: str) -> LabelledData:
        file = tmp_path / "targets.py"
        file.write_text(OWN_CODE.format(kind="Labelled('text', OwnTargets)", change=change))
        spec = spec_from_file_location("loaded", file)
        assert spec is not None
        assert spec.loader is not None
        monkeypatch.setitem(sys.modules, "loaded", module := module_from_spec(spec))
        spec.loader.exec_module(module)
        return prepare_labelled(recipe_of(tmp_path / "rows.csv"), module.KIND, TextProcessor)

    assert prepared_by("").labels == ["bad", "fair", "good"]
    assert prepared_by(".upper()").labels == ["BAD", "FAIR", "GOOD"]


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
        data = prepare(recipe.model_copy(update={"model": model}))
        assert isinstance(data, LanguageData)
        assert data.tokenizer.facts["vocab_size"] == size
        places.append(data.reference.location)
    assert places[0] != places[1]
    moved = model.model_copy(update={"pretrained": shutil.move(tmp_path / "model", tmp_path / "moved")})
    again = prepare(recipe.model_copy(update={"model": moved}))
    assert isinstance(again, LanguageData)
    assert again.reference.location == places[1]  # the tokenizer matters, and its location does not


def test_units_beyond_five_digits_are_found_again(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    units = tuple(Unit(number, ()) for number in range(100_011))
    work = UnitWork(str(tmp_path), Encoding(Documents(), recipe.data), units, sample_fraction=1.0)
    for number in (7, 10_000, 100_010):
        write_atomically(work.file("facts", number), b"{}")
    assert work.finished("facts") == {7, 10_000, 100_010}


def test_a_driver_that_lists_no_versions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    monkeypatch.setattr("app.data.sources.units.list_source", lambda source, root: [(root, {"size": 9})])
    with refused("storage.no_versions"):
        prepared(tmp_path / "rows.csv")


def test_a_run_keeps_a_reference_and_refuses_other_shards(tmp_path: Path, storage: str) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    shards = "data.shards={size: 20KB, window: 20KB}"
    recipe = recipe_of(tmp_path / "rows.csv", f"storage={storage}", "data.test_fraction=0.1", shards)
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
    assert isinstance(data, LanguageData)
    assert (data.report.given, data.report.kept, data.report.dropped) == (401, 400, {"not_text": 1})
    batch = data.train.batch([1, 0])
    assert batch.inputs["input_ids"].shape == batch.targets.shape == (2, 16)
    assert np.array_equal(batch.inputs["input_ids"][:, 1:], batch.targets[:, :-1])
    train = "".join(data.tokenizer.decode(data.train.batch([row]).inputs["input_ids"][0].tolist()) for row in range(50))
    assert sum(text(number) in train for number in range(400)) > 5
    blocks = (len(data.train) + len(data.validation)) * 16
    assert blocks > 0.9 * sum(len(data.tokenizer.encode(text(number))) + 1 for number in range(400))


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
    assert isinstance(data, LanguageData)
    assert data.tokenizer.facts["vocab_size"] == 300
    assert "a sample of" in (told := capsys.readouterr().out)
    assert 2 < int(told.partition("a sample of the training data: ")[2].split()[0]) < 30

    monkeypatch.setattr(sampling, "SAMPLE_SIZE", 1)
    with refused("tokenizer.no_text", "data.source"):
        prepare(language_recipe(folder, "data.validation_fraction=0.3", "data.seed=1"))


def test_the_settings_of_a_tokenizer_are_written_last(tmp_path: Path) -> None:
    recipe = language_recipe(tmp_path)
    tokenizer = LanguageTokenizer.fit(["some text"], recipe.data)
    (tmp_path / "tokenizer_config.json").mkdir()  # it cannot be written
    with pytest.raises(OSError, match=r"tokenizer_config\.json"):
        tokenizer.save(to_path(tmp_path))
    assert not (tmp_path / SETTINGS_FILE).exists()


def test_groups_are_of_tables_only(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text")
    with refused("group.no_table", "data.group_column"):
        prepare(language_recipe(tmp_path, "data.group_column=author"))


@pytest.mark.parametrize(
    ("rows", "overrides", "rule"),
    [
        (ROWS[:1], [], "split.empty"),
        ([(text(number), "good", "") for number in range(50)], [], "labels.too_few"),
        ([("", "", "")] * 3, [], "source.nothing_left"),
    ],
)
def test_too_little_data_is_refused(
    tmp_path: Path, rows: list[tuple[str, ...]], overrides: list[str], rule: str
) -> None:
    write_table(tmp_path / "rows.parquet", rows)
    with refused(rule, "data.source"):
        prepare(recipe_of(tmp_path / "rows.parquet", *overrides))


@pytest.mark.parametrize(
    ("overrides", "rule", "key"),
    [
        (["data.clean.near_duplicates=0.2"], "recipe.greater_than_equal", "data.clean.near_duplicates"),
        (["data.shards={size: 1GB}"], "shards.memory", "data.shards"),
        (["data.clean={min_length: 9, max_length: 3}"], "range.invalid", "data.clean"),
    ],
)
def test_keys_that_shards_do_not_go_with_are_refused(overrides: list[str], rule: str, key: str) -> None:
    with refused(rule, key):
        recipe_of("rows.csv", *overrides)


def test_progress_says_how_much_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    progress = UnitProgress("reading", dict.fromkeys(range(10), 1_000_000), {0}, lambda: now[0])
    for number, seconds in ((1, 5.0), (2, 12.0), (3, 18.0)):
        now[0] = seconds
        progress.add(number)
    told = capsys.readouterr().out.splitlines()
    assert told == ["reading: goes on after 1 of 10 parts", "reading: 3 of 10 parts, 3 of 10 MB, about 42.0 s left"]


def test_a_processor_is_fitted_once_for_the_same_data_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "rows.csv", ROWS)
    fits: list[int] = []
    listed: list[int] = []
    fit, list_source = TextProcessor.fit, units.list_source
    monkeypatch.setattr(TextProcessor, "fit", lambda *given: (fits.append(1), fit(*given))[1])
    monkeypatch.setattr(units, "list_source", lambda *given: (listed.append(1), list_source(*given))[1])
    first = prepared(tmp_path / "rows.csv")
    assert (len(fits), len(listed)) == (1, 2), "the second listing tells whether the source changed meanwhile"
    again = prepared(tmp_path / "rows.csv", "data.shards.window=30KB")
    assert (len(fits), len(listed)) == (1, 3)
    batches = [data.train.batch(range(8)).inputs["input_ids"] for data in (first, again)]
    assert np.array_equal(*batches)
    assert prepared(tmp_path / "rows.csv", "data.buckets=[8]").processor.inputs[0].max_length == 8
    assert len(fits) == 2
    for file in to_path(first.reference.location).glob("processor-*/text.json"):
        file.write_bytes(file.read_bytes()[:-1])
    assert prepared(tmp_path / "rows.csv").processor.facts == first.processor.facts, "a torn one is fitted again"
    assert len(fits) == 3
