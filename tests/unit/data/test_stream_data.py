"""The data of a run on a stream: micro-epochs in storage, blocks of documents, and validation from a file."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from upath import UPath

from app.config import Recipe, ShardsConfig, load_recipe
from app.data.labelled import LabelledData
from app.data.language import LanguageData
from app.data.preparation.sample import SAMPLE_FILE
from app.data.preparation.samples import Documents
from app.data.preparation.survey import SplitRule, digest_of
from app.data.sharded import TOKENS, ShardedRows
from app.data.streaming.collector import Collector
from app.data.streaming.messages import Offsets
from app.data.streaming.micro_epochs import Collection, MicroEpochStore
from app.data.streaming.prepare import initial_encoding
from app.data.streaming.rows import ChosenRows, StreamRows
from app.data.tokenizer import LanguageTokenizer
from app.storage import list_names, to_path
from app.tasks import prepare
from tests.helpers import wait_until
from tests.streams import (
    NatsServer,
    collect,
    document,
    language_overrides,
    message,
    nats_server,
    recipe,
    rows_of,
    text_of,
)
from tests.wording import refused

DOCUMENTS = [json.loads(document(number))["text"] for number in range(400)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("jetstream")) as server:
        server.publish(map(message, range(300)))
        server.publish(map(document, range(400)), "DOCS", "docs.a")
        yield server


def labelled(given: Recipe) -> LabelledData:
    data = prepare(given)
    assert isinstance(data, LabelledData)
    return data


def documents(given: Recipe) -> LanguageData:
    data = prepare(given)
    assert isinstance(data, LanguageData)
    return data


@pytest.mark.parametrize("place", ["disk", "s3"])
def test_micro_epochs_are_shards_in_storage(
    server: NatsServer, tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYLOOM_CACHE", str(tmp_path / "cache"))
    UPath("s3://micro-epochs").mkdir(exist_ok=True)
    given = recipe(f"{server.url}/S", tmp_path, f"storage={tmp_path if place == 'disk' else 's3://micro-epochs'}")
    data = labelled(given)
    assert (len(data.train), data.labels) == (96, ["high", "low"])
    assert data.rows["validation"] == len(data.validation) > 0
    store = MicroEpochStore(to_path(data.reference.location))
    first = store.find(1, {0: 1})
    assert first is not None
    assert [shard.name for shard in first.shards] == [f"train-{1:012d}-{first.stop[0]:012d}-000.arrow"]
    assert store.find(1, {0: 2}) is None
    # Another is written, read and deleted; the first one stays, since the data name its shards.
    second = store.write(2, collect(given, first.stop))
    assert second.report.given == second.stop[0] - 1
    assert len(data.with_train(data.reference.open_shards(second.shards)).train) == 96
    for number in (1, 2):
        store.delete(number)
    assert store.find(2, first.stop) is None
    grown = replace(collect(given, first.stop), start={**first.stop, 1: 0})
    assert store.write(2, grown) == store.find(2, first.stop)
    store.delete(2)
    assert {name for name in list_names(store.folder) if name.endswith(".arrow") and name != SAMPLE_FILE} == {
        shard.name for shards in data.reference.index.splits.values() for shard in shards
    }


@pytest.fixture
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.streaming.collector._POLL_S", 0.3)


@pytest.mark.usefixtures("_short_polls")
def test_a_stream_that_is_idle_while_training_is_busy_has_not_ended(tmp_path: Path) -> None:
    with nats_server(tmp_path / "jetstream") as server:
        server.publish(map(message, range(10)))
        given = recipe(f"{server.url}/S", tmp_path, idle_seconds=1.0)
        store, make_rows = MicroEpochStore(to_path(tmp_path)), rows_of(given)
        with closing(Collection(given, store, make_rows, 7, {0: 1})) as collection:
            wait_until(lambda: collection.collected == 10)
            time.sleep(1.8)  # longer than idle_seconds and two polls
            assert not collection.has_ended
            server.publish(map(message, range(10, 150)))
            found = collection.wait(30.0)
            assert found is not None
            assert (found.rows, store.find(7, {0: 1})) == (96, found)
        with closing(Collection(given, store, make_rows, 8, {0: 151})) as collection:
            assert collection.wait(30.0) is None
            assert (collection.has_ended, collection.collected) == (True, 0)


@pytest.mark.usefixtures("_short_polls")
def test_a_stream_without_a_batch_is_no_data(server: NatsServer, tmp_path: Path) -> None:
    server.publish([message(1)], "F", "f.a")
    with refused("stream.too_few", "data.source"):
        prepare(recipe(f"{server.url}/F", tmp_path, idle_seconds=0.5))
    with refused("stream.silent", "data.source"):
        prepare(recipe(f"{server.url}/F?subject=g", tmp_path, idle_seconds=0.5))


def language_recipe(source: str, storage: Path, *keys: str) -> Recipe:
    return load_recipe("recipes/stdlib_gpt.yaml", [*language_overrides(source, storage), *keys])


def collect_blocks(given: Recipe, start: Offsets, tokenizer: LanguageTokenizer | None = None) -> ChosenRows:
    """Collect a micro-epoch: without a tokenizer, the first one."""
    encoding = replace(initial_encoding(given, Documents()), tokenizer=tokenizer)
    make_rows = partial(StreamRows, encoding, frozenset())
    with closing(Collector(given, make_rows, start, is_first=tokenizer is None)) as collector:
        while (chosen := collector.poll()) is None:
            assert not collector.has_ended
    return chosen


def tokens_of(chosen: ChosenRows, folder: Path) -> list[int]:
    """Return the tokens of the training blocks, in their order."""
    rows = ShardedRows(str(folder), chosen.write_train(UPath(folder)), ShardsConfig())
    (blocks,) = rows.read_arrays(range(len(rows)), TOKENS)
    return [*blocks[:, :-1].ravel().tolist(), int(blocks[-1, -1])]


def tokenizer_of(chosen: ChosenRows) -> LanguageTokenizer:
    assert chosen.encoding.tokenizer is not None
    return chosen.encoding.tokenizer


def test_each_document_is_in_the_blocks_of_one_micro_epoch(server: NatsServer, tmp_path: Path) -> None:
    given = language_recipe(f"{server.url}/DOCS", tmp_path)
    chosen = [collect_blocks(given, {})]
    tokenizer = tokenizer_of(chosen[0])
    assert 257 < tokenizer.facts["vocab_size"] < 300  # learned, from few bytes
    while len(chosen) < 4:
        chosen.append(collect_blocks(given, chosen[-1].stop, tokenizer))
    assert [part.start for part in chosen] == [{0: 1}, *(part.stop for part in chosen[:-1])]
    assert (len(chosen[0].validation) > 0, len(chosen[1].validation)) == (True, 0)
    low = np.array([np.frombuffer(digest_of(text), np.uint64)[1] for text in DOCUMENTS])
    is_trained_on = SplitRule(0, 0.1, 0.0).split(low) == 0
    used = 16 * 32 + 1
    for part in chosen:
        consumed = range(part.start[0] - 1, part.stop[0] - 1)
        documents = [DOCUMENTS[number] for number in consumed if is_trained_on[number]]
        tokens = tokenizer.join(documents)
        assert tokens_of(part, tmp_path) == tokens[:used].tolist()
        assert part.unused_tokens == len(tokens) - used
        assert len(tokenizer.join(documents[:-1])) < used  # the last one was needed
        assert part.report.dropped.get("held_out", 0) == (len(consumed) - len(documents)) * (part is not chosen[0])


def test_a_run_on_documents_keeps_its_tokenizer(server: NatsServer, tmp_path: Path) -> None:
    given = language_recipe(f"{server.url}/DOCS", tmp_path)
    data = documents(given)
    assert (len(data.train), data.tokens_per_sample, data.rows["validation"] > 0) == (16, 32, True)
    data.save(UPath(tmp_path / "run"))
    kept = LanguageData.load(UPath(tmp_path / "run"))
    assert kept.fingerprint == data.fingerprint
    store = MicroEpochStore(to_path(kept.reference.location))
    first = store.find(1, {0: 1})
    assert first is not None
    chosen = collect_blocks(given, first.stop, kept.tokenizer)
    second = store.write(2, chosen)
    assert (second.total_rows, second.unused_tokens) == (32, chosen.unused_tokens)
    batch = kept.with_train(kept.reference.open_shards(second.shards)).train.batch([15])
    assert batch.inputs["input_ids"][0].tolist() == tokens_of(chosen, tmp_path)[15 * 32 : 16 * 32]
    assert batch.targets[0].tolist() == tokens_of(chosen, tmp_path)[15 * 32 + 1 :]
    with refused("task.unsupported", "data.stream.labels"):
        language_recipe(f"{server.url}/DOCS", tmp_path, "data.stream={labels: [a, b]}")


def test_a_file_is_the_validation_split_and_none_of_it_is_trained_on(server: NatsServer, tmp_path: Path) -> None:
    table = tmp_path / "validation.jsonl"
    rows = [json.loads(message(number)) for number in (*range(0, 100, 10), 5000)]
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = recipe(f"{server.url}/S", tmp_path, f"data.validation_source={table}")
    data = labelled(given)
    assert list(data.validation.split.inputs) == [row["text"] for row in rows]
    store = MicroEpochStore(to_path(data.reference.location))
    first = store.find(1, {0: 1})
    assert first is not None
    # All messages but those in the file are trained on: none is held out.
    assert (first.rows, first.stop, first.report.dropped) == (96, {0: 107}, {"in_validation": 10})
    assert list(data.train.split.inputs) == [text_of(number) for number in range(106) if number % 10 or number >= 100]
    in_validation = store.in_validation
    assert in_validation == {digest_of(row["text"]) for row in rows}
    rows[0]["label"] = "odd"
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with refused("labels.unknown", "data.validation_source"):
        prepare(given)
    with refused("source.missing"):
        prepare(recipe("nats://127.0.0.1:1/S", tmp_path, "data.validation_source=no.csv"))


def test_a_folder_of_texts_validates_a_language_model(server: NatsServer, tmp_path: Path) -> None:
    folder = tmp_path / "validation"
    folder.mkdir()
    for number in (7, 15):
        (folder / f"{number}.txt").write_text(DOCUMENTS[number], encoding="utf-8")
    given = language_recipe(f"{server.url}/DOCS", tmp_path, f"data.validation_source={folder}")
    data = documents(given)
    assert data.report.dropped == {"in_validation": 2}
    assert len(data.validation) == (len(data.tokenizer.join([DOCUMENTS[7], DOCUMENTS[15]])) - 1) // 32 > 0
    (folder / "7.txt").unlink()
    (folder / "15.txt").write_text("short", encoding="utf-8")
    with refused("text.too_short", "data.validation_source"):
        documents(given)
