"""Streams of NATS and Kafka, read by offset and cut into micro-epochs."""

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partialmethod
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.js.api import RetentionPolicy

from app.data.streaming.collector import open_reader
from app.data.streaming.messages import Offsets
from app.errors import BrokerUnreachableError, DataError
from app.runs import Outcome, Run
from app.tasks import prepare
from app.training.records import StoppedTrainMetrics
from app.training.resume import start_or_resume
from tests.streams import (
    NatsServer,
    collect,
    collector_of,
    kafka_broker,
    message,
    nats_server,
    recipe,
    text_of,
    texts_of,
)
from tests.wording import refused


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("jetstream")) as server:
        server.publish(map(message, range(300)))
        yield server


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.streaming.collector._POLL_S", 0.3)
    monkeypatch.setattr("app.data.streaming.jetstream._RETRY_S", 0.05)


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def numbers(source: str, start: Offsets, count: int) -> list[int]:
    with closing(open_reader(source, start)) as reader:
        return [message.offset for message in reader.read(count, 5.0)]


def test_jetstream_is_read_from_a_sequence_on(server: NatsServer) -> None:
    server.publish([b"x", b"y"], "T", "t.a")
    server.publish([b"z"], "T", "t.b")
    assert numbers(f"{server.url}/S", {}, 3) == [1, 2, 3]
    assert numbers(f"{server.url}/S", {0: 200}, 2) == [200, 201]
    assert numbers(f"{server.url}/T?subject=t.b", {}, 2) == [3]
    with closing(open_reader(f"{server.url}/T", {0: 4})) as reader:
        assert reader.read(1, 0.1) == []


def test_messages_of_other_subjects_may_be_deleted(server: NatsServer, capfd: pytest.CaptureFixture[str]) -> None:
    server.publish([b"x"] * 10, "Q", "q.a")
    server.publish([b"y"] * 3, "Q", "q.b")
    server.purge(until=10, stream="Q")
    assert numbers(f"{server.url}/Q?subject=q.b", {0: 5}, 3) == [11, 12, 13]
    assert (
        "deleted what is before 10, and training continues at 5: messages of subject q.b may be"
        in capfd.readouterr().err
    )


def test_kafka_is_read_from_the_offset_of_each_partition() -> None:
    with kafka_broker() as broker:
        broker.publish(map(message, range(40)), "texts")
        source = f"kafka://{broker.servers}/texts"
        with closing(open_reader(source, {1: 8, 3: 10})) as reader:
            assert reader.start == {0: 0, 1: 8, 2: 0, 3: 10}
            found = reader.read(40, 2.0)
        assert len(found) == 22
        assert min(found, key=lambda one: (one.partition != 1, one.offset)).value == message(4 * 8 + 1)
        with refused("stream.unknown", "data.source"):
            open_reader(f"kafka://{broker.servers}/text", {})
        with refused("stream.recreated", "data.source"):
            open_reader(source, {0: 11})


def test_what_a_broker_refuses_is_told(server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.publish([b"x"], "W", "w.a", retention=RetentionPolicy.WORK_QUEUE)
    server.publish([b"x"] * 20, "P", "p.a")
    server.purge(until=11, stream="P")
    for name, start, rule in (
        ("N", {}, "unknown"),
        ("W", {}, "retention"),
        ("P", {0: 5}, "messages_gone"),
        ("P", {0: 99}, "recreated"),
    ):
        with refused(f"stream.{rule}", "data.source"):
            open_reader(f"{server.url}/{name}", start)
    assert numbers(f"{server.url}/P", {}, 1) == [11]
    with nats_server(tmp_path, "--user", "me", "--pass", "secret") as locked:
        with refused("stream.credentials", "data.source"):
            open_reader(f"{locked.url}/S", {})
        monkeypatch.setenv("NATS_USER", "me")
        monkeypatch.setenv("NATS_PASSWORD", "secret")
        with refused("stream.unknown", "data.source"):
            open_reader(f"{locked.url}/S", {})
    with refused("broker_unreachable"):
        open_reader(f"{locked.url}/S", {})
    monkeypatch.setenv("NATS_CREDS", "no.creds")
    with refused("file.missing"):
        open_reader(f"{locked.url}/S", {})
    (tmp_path / "empty.creds").touch()
    monkeypatch.setenv("NATS_CREDS", str(tmp_path / "empty.creds"))
    with refused("broker_unreachable"):
        open_reader(f"{locked.url}/S", {})


def test_what_kafka_refuses_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.data.streaming.kafka._TIMEOUT_S", 1.0)
    with pytest.raises(BrokerUnreachableError, match=r"no broker answers .*Connection refused"):
        open_reader("kafka://127.0.0.1:1/t", {})
    assert capfd.readouterr().err == ""
    properties = tmp_path / "kafka.conf"
    monkeypatch.setenv("RAYLOOM_KAFKA_CONFIG", str(properties))
    with refused("file.unreadable"):
        open_reader("kafka://127.0.0.1:1/t", {})
    properties.write_text("colour=red\n", encoding="utf-8")
    with refused("kafka.properties"):
        open_reader("kafka://127.0.0.1:1/t", {})


@pytest.mark.parametrize(
    ("override", "rule", "key"),
    [
        ("data.source=nats://127.0.0.1:4222", "stream.address", "data"),
        ("data.source=nats://me:pw@127.0.0.1:4222/S", "secret.in_recipe", "data"),
        ("data.source=kafka://127.0.0.1:9092/t?subject=s", "stream.address", "data"),
        ("data.source=builtin:reviews", "keys.contradict", "data"),
        ("data={source: null, sources: [{source: a.csv}, {source: nats://h:1/S}]}", "keys.contradict", "data"),
        ("data.stream=null", "recipe.missing", "data"),
        ("data.stream={labels: [a, a]}", "names.twice", "data.stream.labels"),
        ("data.test_fraction=0.1", "keys.contradict", "data.test_fraction"),
        ("data.validation_source=nats://h:1/V", "stream.validation", "data"),
        ("data.clean={near_duplicates: 0.8}", "keys.contradict", "data.clean.near_duplicates"),
        ("train.schedule={name: cosine}", "stream.no_end", None),
        ("train.schedule={name: constant}", "stream.no_end", None),
        ("train={tokens_per_batch: 4096, global_batch_size: null}", "keys.contradict", "train.tokens_per_batch"),
        ("train.class_weights=balanced", "stream.no_end", None),
        ("train.global_batch_size=128", "batch.too_large", None),
        ("tune={space: tune_spaces.text:space}", "keys.contradict", "tune"),
        ("train.linear_baseline=true", "keys.contradict", "train.linear_baseline"),
    ],
)
def test_recipes_that_a_stream_cannot_be_trained_with(
    tmp_path: Path, override: str, rule: str, key: str | None
) -> None:
    with refused(rule, key) as raised:
        recipe("nats://127.0.0.1:4222/S", tmp_path, override)
    assert "pw" not in str(raised.value)


def test_labels_and_the_task_are_checked_before_a_broker_is_asked(tmp_path: Path) -> None:
    regression = ["task=text-regression", "train.label_smoothing=0.0", "train.early_stopping=null"]
    with refused("stream.labels", "data.stream.labels"):
        prepare(recipe("nats://127.0.0.1:1/S", tmp_path, labels=None))
    with refused("task.unsupported", "data.stream.labels"):
        prepare(recipe("nats://127.0.0.1:1/S", tmp_path, *regression))


def test_a_resumed_run_may_bear_more_bad_messages_but_no_other_labels(tmp_path: Path) -> None:
    source = "nats://127.0.0.1:1/S"
    begun = Run.start("train", recipe(source, tmp_path))
    begun.open()
    begun.end(Outcome(StoppedTrainMetrics(steps=1, epochs=0, paused=True), {}, status="stopped"))
    resume = f"train.resume={begun.run_id}"
    resumed = start_or_resume("train", recipe(source, tmp_path, resume, max_bad=0.5, idle_seconds=9.0))
    assert resumed.run_id == begun.run_id
    assert resumed.recipe.data.stream is not None
    assert resumed.recipe.data.stream.max_bad == 0.5
    with refused("resume.differs", "train.resume"):
        start_or_resume("train", recipe(source, tmp_path, resume, labels=["low", "other"]))


def test_micro_epochs_follow_each_other_without_a_gap(server: NatsServer, tmp_path: Path) -> None:
    given = recipe(f"{server.url}/S", tmp_path)
    first = collect(given, {}, is_first=True)
    second = collect(given, first.stop)
    assert (first.start, second.start) == ({0: 1}, first.stop)
    assert len(texts_of(first.train)) == len(texts_of(second.train)) == 96
    assert texts_of(first.validation)
    assert not texts_of(second.validation)
    taken = [*texts_of(first.train), *texts_of(second.train), *texts_of(first.validation)]
    held_out = second.report.dropped["held_out"]
    assert second.report.examples["held_out"]
    assert len(set(taken)) == len(taken) == second.stop[0] - 1 - held_out
    assert set(taken) <= {text_of(number) for number in range(second.stop[0] - 1)}


def test_the_first_micro_epoch_holds_out_a_later_message_if_it_has_none(server: NatsServer, tmp_path: Path) -> None:
    given = recipe(f"{server.url}/S", tmp_path, "data.validation_fraction=0.01", "data.seed=4")
    first = collect(given, {}, is_first=True)
    assert first.stop == {0: 97}  # message 137 is the first that the seed holds out, and 191 the second
    assert texts_of(first.validation) == [text_of(137)]
    second = collect(given, first.stop)
    trained = [*texts_of(first.train), *texts_of(second.train)]
    assert trained == [text_of(number) for number in range(194) if number not in (137, 191)]


def test_a_micro_epoch_ends_after_its_seconds_and_the_stream_when_it_is_idle(
    server: NatsServer, tmp_path: Path
) -> None:
    clock = Clock()
    given = recipe(f"{server.url}/S", tmp_path, samples=960, seconds=60.0, idle_seconds=90.0)
    with closing(collector_of(given, {0: 271}, clock=clock)) as collector:
        assert collector.poll() is None
        clock.now = 59.0
        assert collector.poll() is None
        clock.now = 60.0
        chosen = collector.poll()
    assert chosen is not None
    assert len(texts_of(chosen.train)) == 16  # of 30 messages
    with closing(collector_of(given, chosen.stop, clock=clock)) as collector:
        assert collector.poll() is None
        clock.now += 89.0
        assert collector.poll() is None
        assert not collector.has_ended
        clock.now += 1.0
        assert collector.poll() is None
        assert (collector.has_ended, collector.collected) == (True, 301 - chosen.stop[0])


def test_a_stream_that_goes_on_before_training_asks_has_not_ended(tmp_path: Path) -> None:
    with nats_server(tmp_path / "jetstream") as server:
        server.publish(map(message, range(10)))
        clock = Clock()
        given = recipe(f"{server.url}/S", tmp_path, seconds=60.0, idle_seconds=5.0)
        with closing(collector_of(given, {0: 1}, clock=clock)) as collector:
            assert collector.poll() is None
            clock.now = 5.0
            assert collector.poll() is None
            assert collector.has_ended
            server.publish(map(message, range(10, 150)))
            while (chosen := collector.poll()) is None:
                pass
            assert (len(texts_of(chosen.train)), collector.has_ended) == (96, False)


def test_a_server_that_hangs_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Client, "jetstream", partialmethod(Client.jetstream, timeout=1.0))  # it waits for 5 seconds
    with nats_server(tmp_path / "jetstream") as server:
        server.publish(map(message, range(10)))
        clock = Clock()
        given = recipe(f"{server.url}/S", tmp_path, seconds=60.0)
        with closing(collector_of(given, {0: 1}, clock=clock)) as collector:
            assert collector.poll() is None
            assert server.process is not None
            server.process.send_signal(signal.SIGSTOP)
            try:
                clock.now = 3.0
                assert (collector.poll(), collector.has_ended) == (None, False)
            finally:
                server.process.send_signal(signal.SIGCONT)
            assert capfd.readouterr().err.count("training waits for it") == 1
            assert (collector.poll(), collector.has_ended) == (None, False)
            clock.now = 6.0
            assert (collector.poll(), collector.has_ended) == (None, True)


def test_bad_messages_are_counted_shown_and_refused_above_a_share(server: NatsServer, tmp_path: Path) -> None:
    bad = [b"not json", b'["a list"]', b'{"text": "no label"}', json.dumps({"text": "9", "label": "odd"}).encode()]
    server.publish([*map(message, range(50)), *bad, *map(message, range(50, 100))], "B", "b.a")
    source = f"{server.url}/B"
    chosen = collect(recipe(source, tmp_path, samples=64, max_bad=0.05), {}, is_first=True)
    assert chosen.report.dropped == {"malformed": 3, "unknown_label": 1}
    assert chosen.report.examples["malformed"] == ["not json", '["a list"]', '{"text": "no label"}']
    words = r"4 of \d+ messages .* offset 51 of subject b\.a is not JSON .*: 'not json'; .*with a larger max_bad"
    with pytest.raises(DataError, match=words) as refusal:
        collect(recipe(source, tmp_path, samples=64), {}, is_first=True)
    assert (refusal.value.rule, refusal.value.key) == ("stream.bad_messages", "data.stream.max_bad")


def test_duplicates_are_dropped_within_a_micro_epoch(server: NatsServer, tmp_path: Path) -> None:
    contrary = json.dumps({"text": text_of(3), "label": "high"}).encode()
    server.publish([*map(message, range(40)), message(5), contrary, *map(message, range(40, 80))], "D", "d.a")
    chosen = collect(recipe(f"{server.url}/D", tmp_path, samples=64, max_bad=0.05), {}, is_first=True)
    assert chosen.report.dropped == {"duplicate": 2, "conflicting": 1}
    assert text_of(3) not in texts_of(chosen.train)


def test_a_server_that_comes_back_is_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with nats_server(tmp_path / "jetstream") as server:
        server.publish(map(message, range(60)))
        clock = Clock()
        given = recipe(f"{server.url}/S", tmp_path)
        with closing(collector_of(given, {0: 1}, clock=clock)) as collector:
            assert collector.poll() is None
            server.stop()
            assert collector.poll() is None
            assert collector.poll() is None
            assert capfd.readouterr().err.count("training waits for it") == 1
            server.start()
            server.publish(map(message, range(60, 120)))
            while (chosen := collector.poll()) is None:
                pass
            assert chosen.report.given == len({*texts_of(chosen.train)}) + chosen.report.dropped["held_out"]
        # What counts is how long it does not answer, however long the stream was quiet before.
        with closing(collector_of(given, chosen.stop, clock=clock)) as collector:
            assert collector.poll() is None
            server.stop()
            for clock.now in (4.0, 6.9):
                assert (collector.poll(), collector.has_ended) == (None, False)
            clock.now = 7.0
            with refused("broker_unreachable"):
                collector.poll()
