"""Real streams for tests: a NATS server with JetStream, and the broker that Kafka's client brings for tests."""

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import nats
import torch
from confluent_kafka import Producer
from nats.js.api import StreamConfig
from safetensors.torch import load_file
from upath import UPath

from app.artifacts import WEIGHTS_FILE
from app.config import Recipe, load_recipe
from app.data.prepared import SHARDS_FILE
from app.data.sharded import ShardReference
from app.data.streaming.collector import Collector
from app.data.streaming.messages import Message, Offsets
from app.data.streaming.micro_epochs import MicroEpoch
from app.data.streaming.prepare import initial_encoding
from app.data.streaming.rows import ChosenRows, RowsFactory, StreamRows
from app.data.text import TextProcessor
from app.ports import is_free, unused
from app.tasks import find_task
from app.training.publication import export_checkpoint
from tests.faults.models import ledger_places
from tests.helpers import BIN, wait_until

LABELS = ["low", "high"]
DIGITS = 4


def text_of(number: int) -> str:
    """A text whose tokens are the digits of a number, so that a model can tell which message it sees."""
    return " ".join(f"{number:0{DIGITS}d}")


def message(number: int) -> bytes:
    """A message of the stream that tests publish."""
    return json.dumps({"text": text_of(number), "label": LABELS[number % 10 >= 5]}).encode()


def document(number: int) -> bytes:
    """A message for language modelling, of one to eight lines."""
    return json.dumps({"text": f"line {number} of a document\n" * (1 + number % 8)}).encode()


@dataclass
class NatsServer:
    """A server that a test starts, stops and starts again, with one folder and one port."""

    folder: Path
    arguments: Sequence[str] = ()
    process: "subprocess.Popen[bytes] | None" = None

    def __post_init__(self) -> None:
        (self.port,) = unused(1)
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"nats://{self.address}"
        self.start()

    def start(self) -> None:
        address = ["-a", "127.0.0.1", "-p", str(self.port), "-sd", str(self.folder)]
        self.process = subprocess.Popen(
            [str(BIN / "nats-server"), "-js", *address, *self.arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: not is_free(self.port))

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(30)

    def publish(self, messages: Iterable[bytes], stream: str = "S", subject: str = "s.a", **settings: Any) -> None:
        """Publish into a stream, which is made unless it is there."""

        async def publish_all() -> None:
            client = await nats.connect(self.url)
            context = client.jetstream()
            await context.add_stream(StreamConfig(name=stream, subjects=[f"{stream.lower()}.*"], **settings))
            for content in messages:
                await context.publish(subject, content)
            await client.close()

        asyncio.run(publish_all())

    def purge(self, until: int, stream: str = "S") -> None:
        """Delete the messages before a sequence, as retention does."""

        async def purge() -> None:
            client = await nats.connect(self.url)
            await client.jetstream().purge_stream(stream, seq=until)
            await client.close()

        asyncio.run(purge())


@contextmanager
def nats_server(folder: Path, *arguments: str) -> Iterator[NatsServer]:
    """Run a server within the context."""
    server = NatsServer(folder, arguments)
    try:
        yield server
    finally:
        server.stop()


@dataclass
class KafkaBroker:
    """A broker on loopback that lives as long as its client."""

    producer: Producer
    servers: str

    def publish(self, messages: Iterable[bytes], topic: str, partitions: int = 4) -> None:
        """Publish one message after another into the partitions in turn. The broker makes 4 for a new topic."""
        producer = Producer({"bootstrap.servers": self.servers})
        for number, content in enumerate(messages):
            producer.produce(topic, value=content, partition=number % partitions)
        assert producer.flush(30) == 0


@contextmanager
def kafka_broker() -> Iterator[KafkaBroker]:
    """Run a broker within the context."""
    producer = Producer({"bootstrap.servers": "", "test.mock.num.brokers": 1})
    (broker,) = producer.list_topics(timeout=10).brokers.values()
    yield KafkaBroker(producer, f"{broker.host}:{broker.port}")


@contextmanager
def published(kind: str, folder: Path, messages: Iterable[bytes]) -> Iterator[str]:
    """Publish messages with NATS or Kafka, and yield the source that has them."""
    if kind == "kafka":
        with kafka_broker() as broker:
            broker.publish(messages, "texts")
            yield f"kafka://{broker.servers}/texts"
        return
    with nats_server(folder) as server:
        server.publish(messages)
        yield f"{server.url}/S"


def overrides(source: str, storage: Path, pause_s: float = 0.0, **stream: Any) -> list[str]:
    """Keys for recipes/reviews.yaml: a model on a stream counts its texts, and sleeps ``pause_s`` in each step."""
    keys = {"labels": LABELS, "samples": 96, "idle_seconds": 3.0, **stream}
    return [
        *(f"data.source={source}", f"data.stream={json.dumps(keys)}", "data.test_fraction=null", "data.buckets=[8]"),
        *("data.tokenizer={vocab_size: 13}", "tune=null", "alerts=[]", f"storage={storage}", "train.workers=1"),
        *("model.factory=tests.faults.models:CountingText", f"model.args={{pause_s: {pause_s}}}"),
        "train.linear_baseline=false",
        *("train.global_batch_size=16", "train.epochs=99", "train.early_stopping=null"),
        "train.schedule={name: constant, warmup_fraction: 0.0}",
    ]


def recipe(source: str, tmp_path: Path, *keys: str, **stream: object) -> Recipe:
    """Return a recipe of labelled texts on a stream."""
    return load_recipe("recipes/reviews.yaml", [*overrides(source, tmp_path, **stream), *keys])


def collector_of(
    given: Recipe, start: Offsets, is_first: bool = False, clock: Callable[[], float] = time.monotonic
) -> Collector:
    """Return a collector of messages."""
    return Collector(given, rows_of(given), start, is_first, clock)


def rows_of(given: Recipe) -> RowsFactory:
    """Return what makes rows of messages, as far as the recipe says how."""
    return partial(StreamRows, initial_encoding(given, find_task(given.task).samples(given)), frozenset())


def collect(given: Recipe, start: Offsets, is_first: bool = False) -> ChosenRows:
    """Return the first micro-epoch from these offsets on."""
    with closing(collector_of(given, start, is_first)) as collector:
        while True:
            if (chosen := collector.poll()) is not None:
                return chosen


def texts_of(messages: Sequence[Message]) -> list[str]:
    """Return the texts of messages."""
    return [json.loads(message.value)["text"] for message in messages]


def language_overrides(source: str, storage: Path) -> list[str]:
    """Keys with which recipes/stdlib_gpt.yaml trains on micro-epochs of 16 blocks of a stream."""
    return [
        *(f"data.source={source}", "data.stream={samples: 16, idle_seconds: 1.0}", f"storage={storage}", "tune=null"),
        *("data.tokenizer={vocab_size: 300}", "data.block_length=32", "train.global_batch_size=8"),
        *("train.schedule={name: constant, warmup_fraction: 0.0}", "train.early_stopping=null"),
    ]


def times_trained(run_folder: Path, numbers: Sequence[int]) -> list[float]:
    """How often the newest checkpoint of a run was trained on each message."""
    with tempfile.TemporaryDirectory() as folder:
        weights = UPath(folder) / "weights"
        export_checkpoint(UPath(run_folder), weights)
        processor = TextProcessor.load(weights)
        digits = torch.from_numpy(processor.encode([text_of(number) for number in numbers])["input_ids"][:, 1:5])
        seen = load_file(str(weights / WEIGHTS_FILE))["seen"]
        found: list[float] = seen[ledger_places(digits, processor.facts["vocab_size"])].tolist()
    return found


def left_out(run_folder: Path, total: int) -> int:
    """How many of the messages a run held out, or did not come to."""
    return total - micro_epochs_of(run_folder)[-1].total_rows


def micro_epochs_of(run_folder: Path) -> list[MicroEpoch]:
    """Return the micro-epochs that a run keeps, in order."""
    (folder,) = {
        UPath(ShardReference.model_validate_json(file.read_bytes()).location) for file in run_folder.rglob(SHARDS_FILE)
    }
    return [MicroEpoch.model_validate_json(file.read_bytes()) for file in sorted(folder.glob("micro-epoch-*"), key=str)]
