"""Every task on a stream: the batches and losses that shards of the same rows give, and what is refused."""

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from upath import UPath

from app.config import BUILT_IN_TASKS, Recipe
from app.config.loading import parse_recipe
from app.data.preparation.encoding import Encoding
from app.data.prepared import TRAIN, VALIDATION, GrowingData, PreparedData, SplitData
from app.data.sharded import ShardedRows
from app.data.streaming.collector import Collector
from app.data.streaming.messages import Message, Offsets
from app.data.streaming.micro_epochs import MicroEpoch, MicroEpochStore
from app.data.streaming.rows import ChosenRows, StreamRows
from app.errors import DataError, RayloomError
from app.storage import to_path
from app.tasks import find_task, prepare
from tests.odd import picture
from tests.preparing import first_losses
from tests.pretrained import write_decoder
from tests.streams import NatsServer, nats_server, rows_of
from tests.unit.data.test_chat import TEMPLATE, answer, user
from tests.unit.data.test_tagging import spans, tokens

ROWS, SAMPLES, BATCH = 200, 64, 16
TEXT = {"layers": 1, "width": 8, "heads": 2}
ENCODER = {"factory": "app.models.text:encoder_classifier", "args": TEXT}
MLP = {"factory": "app.models.tabular:mlp", "args": {"width": 8, "layers": 1}}
CNN = {"factory": "app.models.image:small_cnn", "args": {"width": 8, "poolings": 1}}
GOODS = {
    "factory": "app.models.multimodal:late_fusion",
    "args": {"width": 8, "encoders": {"title": ENCODER, "photo": CNN, "size": MLP}},
}
FEATURES = {"columns": {"features": ["age", "income", "colour"], "categories": ["colour"]}}
RECORDS = {
    "columns": {
        "categories": ["colour"],
        "fields": {
            "title": {"kind": "text"},
            "photo": {"kind": "image"},
            "size": {"kind": "row", "columns": ["age", "colour"]},
        },
    }
}
WORDS = ["good", "bad", "fine", "poor", "a", "film", "book", "very"]


def sentence(number: int) -> str:
    return " ".join(WORDS[(number // 8**place + place) % 8] for place in range(4)) + f" {number}"


def text(number: int) -> dict[str, Any]:
    return {"text": sentence(number)}


def photo(number: int) -> dict[str, Any]:
    return {"photo": picture(number)}


def table(number: int) -> dict[str, Any]:
    return {"age": number % 37, "income": None if number % 9 == 0 else number / 7, "colour": WORDS[number % 5]}


def goods(number: int) -> dict[str, Any]:
    return {"title": sentence(number), "photo": picture(number), "age": number % 37, "colour": WORDS[number % 3]}


def chat(number: int) -> dict[str, Any]:
    return {"messages": [user(f"was it {sentence(number % 60)}"), answer("not " * (number % 7) + sentence(number))]}


LABELS = {"classification": WORDS[:3], "multilabel": WORDS[:3]}
KINDS: dict[str, Callable[[int], Any]] = {
    "classification": lambda number: WORDS[number % 3],
    "regression": lambda number: number % 11 / 4,
    "multilabel": lambda number: [WORDS[place] for place in range(3) if number % (place + 2) == 0],
}


@dataclass(frozen=True)
class Streamed:
    """A task whose rows are messages."""

    task: str
    row: Callable[[int], dict[str, Any]]
    model: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    labels: list[str] | None = None
    """``data.stream.labels``."""

    def rows(self) -> list[dict[str, Any]]:
        labels = None if self.task.startswith("token") else KINDS.get(self.task.rpartition("-")[2])
        return [self.row(number) | ({"label": labels(number)} if labels else {}) for number in range(ROWS)]

    @property
    def stream(self) -> dict[str, Any]:
        """``data.stream``."""
        return {"samples": SAMPLES, "idle_seconds": 2.0, "labels": self.labels}

    def write_model(self, folder: Path) -> None:
        """Write the pretrained model that a chat needs."""
        if self.task == "chat":
            write_decoder(folder / "llama")
            (folder / "llama/chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")

    def recipe(self, folder: Path, source: str, columns: Mapping[str, Any] | None = None, **stream: Any) -> Recipe:
        """Return the recipe on a table, or with ``stream`` on a stream."""
        model = dict(self.model)
        if self.task == "chat":
            model = {"pretrained": str(folder / "llama")}
        data = {
            "source": source,
            "validation_fraction": 0.2,
            "buckets": [16],
            "image": {"size": 4, "channels": 1},
            "tokenizer": {"vocab_size": 300},
            "block_length": 32,
        }
        kept = {key: value for key, value in data.items() if key in ("source", "validation_fraction", *self.reads)}
        given: dict[str, Any] = kept | dict(self.data) | ({"stream": stream} if stream else {})
        given["columns"] = self.data.get("columns", {}) | (columns or {})
        train = {"global_batch_size": BATCH, "schedule": {"name": "constant", "warmup_fraction": 0.0}}
        tree = {"name": "n", "task": self.task, "data": given, "model": model, "train": train, "storage": str(folder)}
        return parse_recipe(tree)

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys of data that the task supports."""
        if self.task.startswith("multimodal-"):
            return ("buckets", "image", "tokenizer")
        if self.task in ("language-modeling", "chat"):
            return ("block_length",)
        return () if "tabular" in self.task else ("image",) if "image" in self.task else ("buckets", "tokenizer")


STREAMED = [
    *(Streamed(f"text-{kind}", text, ENCODER, labels=LABELS.get(kind)) for kind in KINDS),
    *(Streamed(f"tabular-{kind}", table, MLP, FEATURES, labels=LABELS.get(kind)) for kind in KINDS),
    *(Streamed(f"multimodal-{kind}", goods, GOODS, RECORDS, labels=LABELS.get(kind)) for kind in KINDS),
    Streamed("image-classification", photo, CNN, {"columns": {"input": "photo"}}, labels=WORDS[:3]),
    Streamed(
        "sentence-embedding",
        lambda number: {"anchor": sentence(number), "positive": f"it is {sentence(number + 1)}"},
        {"factory": "app.models.embedding:text_embedder", "args": TEXT | {"dimensions": 8}},
    ),
    Streamed(
        "token-classification",
        tokens,
        {"factory": "app.models.text:token_classifier", "args": TEXT},
        labels=["city", "number"],
    ),
    Streamed(
        "token-classification",
        spans,
        {"factory": "app.models.text:token_classifier", "args": TEXT},
        {"columns": {"tokens": None}},
        name="spans",
        labels=["city"],
    ),
    Streamed(
        "language-modeling",
        lambda number: {"text": "\n".join(sentence(number + line) for line in range(number % 4))},
        {"factory": "app.models.gpt:gpt", "args": TEXT},
        {"tokenizer": {"kind": "bytes"}},
    ),
    Streamed("chat", chat, {}, {"chat": {"packing": True}}),
    Streamed("chat", chat, {}, {"chat": {"packing": False}}, name="unpacked"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("jetstream")) as server:
        yield server


def message(row: Mapping[str, Any]) -> bytes:
    """Return a row as a message, with the content of files in base64."""
    return json.dumps(
        {key: base64.b64encode(value).decode() if isinstance(value, bytes) else value for key, value in row.items()}
    ).encode()


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines that name their files."""
    written = []
    for number, row in enumerate(rows):
        for key, value in row.items():
            if isinstance(value, bytes):
                (folder / f"{number}.png").write_bytes(value)
                row = row | {key: f"{number}.png"}
        written.append(json.dumps(row))
    (folder / "rows.jsonl").write_text("\n".join(written), encoding="utf-8")
    return folder / "rows.jsonl"


def content_of(data: PreparedData, count: int) -> list[Any]:
    """Return every batch of the first samples, and of all that are held out."""
    batches = [data.train.batch(range(first, first + BATCH)) for first in range(0, count, BATCH)]
    batches.append(data.validation.batch(range(len(data.validation))))
    return [
        (name, array.dtype, array.shape, array.tobytes())
        for batch in batches
        for name, array in (*batch.inputs.items(), ("targets", batch.targets))
    ]


def test_every_task_is_in_the_table() -> None:
    assert {streamed.task for streamed in STREAMED} == {*BUILT_IN_TASKS}


@pytest.mark.parametrize("streamed", STREAMED, ids=lambda streamed: f"{streamed.task} {streamed.name}".strip())
def test_a_stream_gives_what_shards_of_its_messages_give(
    streamed: Streamed, server: NatsServer, tmp_path: Path
) -> None:
    """The table of the messages up to the last one of the first micro-epoch has the same splits, batches and losses."""
    streamed.write_model(tmp_path)
    rows, name = streamed.rows(), f"{streamed.task}{streamed.name}".upper().replace("-", "")
    server.publish(map(message, rows), name, f"{name.lower()}.a")
    given = streamed.recipe(tmp_path, f"{server.url}/{name}", **streamed.stream)
    data = prepare(given)
    assert isinstance(data, GrowingData)
    first = first_of(data)
    assert first.rows == len(data.train) == SAMPLES
    alone = streamed.recipe(tmp_path, str(write_rows(tmp_path, rows[: first.stop[0] - 1])))
    shards = prepare(alone)
    assert isinstance(shards, GrowingData)
    assert len(shards.validation) == len(data.validation) > 0
    assert dict(shards.facts) == dict(data.facts)
    assert content_of(data, SAMPLES) == content_of(shards, SAMPLES)
    losses = first_losses(given, data)
    assert losses == first_losses(alone, shards)
    assert len(set(losses)) == len(losses)
    if streamed.task != "language-modeling":  # the last document has blocks beyond the last batch
        sums = [
            [[shard.sha256 for shard in one.reference.index.splits[split]] for split in (TRAIN, VALIDATION)]
            for one in (data, shards)
        ]
        assert sums[0] == sums[1]


TEXT_MESSAGE, GOOD = {"text": "a film", "label": "good"}, base64.b64encode(picture()).decode()
FEW: dict[str, Any] = {"age": 3, "income": 1.5, "colour": "red", "label": 2}
REFUSED = [
    ("text-classification", b"not json", "is not JSON"),
    ("text-classification", b'["a", "b"]', "is a list: expected an object in a message"),
    ("text-classification", {"label": "good"}, "data.columns.input is 'text', which … does not have: it has label"),
    ("text-classification", TEXT_MESSAGE | {"text": {"a": 1}}, "'text' is an object: expected a text"),
    ("text-classification", TEXT_MESSAGE | {"label": "odd"}, "has the label 'odd', but … has only bad, fine, good"),
    ("text-classification", TEXT_MESSAGE | {"label": None}, "is without a label"),
    ("text-multilabel", TEXT_MESSAGE | {"label": ["good", "odd"]}, "has the label 'odd'"),
    (
        "text-regression",
        TEXT_MESSAGE | {"label": "much"},
        "'much' is not a number, as the labels of data.source must be",
    ),
    ("text-regression", TEXT_MESSAGE | {"label": "inf"}, "'inf' is not a number, as the labels"),
    (
        "tabular-regression",
        {"age": 3, "income": 1.5, "label": 2},
        "data.columns.features.2 is 'colour', which …",
    ),
    ("tabular-regression", FEW | {"income": [1]}, "'income' is a list: expected a number or a text"),
    ("tabular-regression", FEW | {"age": "old"}, "'old' in … is not a number: send null if 'age' is unknown, or name"),
    ("image-classification", {"photo": "cat.png", "label": "good"}, "'photo' is not base64 … for data.columns.input"),
    ("image-classification", {"photo": "AAAA", "label": "good"}, "is not a picture that can be decoded"),
    ("multimodal-regression", {"photo": {"path": "/etc/passwd"}, "label": 1}, "'photo' is not base64 (an object)"),
    ("multimodal-regression", {"photo": "AAAA", "label": 1}, "the photo cannot be read"),
    ("sentence-embedding", {"anchor": "a question"}, "data.columns.positive is 'positive', which … does not have"),
    ("token-classification", {"tokens": ["a", "b"], "tags": ["O"]}, "has 2 tokens and 1 tags"),
    ("token-classification", {"tokens": ["a"], "tags": ["B-sea"]}, "has the label 'B-sea', but … has only O, B-city"),
    ("language-modeling", {"text": ["a"]}, "'text' is a list: expected a text"),
    ("chat", {"messages": []}, "messages: List should have at least 1 item"),
]


def of_task(task: str) -> Streamed:
    return next(streamed for streamed in STREAMED if streamed.task == task)


@pytest.mark.parametrize(("number", "task", "given", "told"), [(n, *row) for n, row in enumerate(REFUSED)])
def test_a_bad_message_is_told_with_its_place_and_key(
    server: NatsServer, tmp_path: Path, number: int, task: str, given: Any, told: str
) -> None:
    streamed = of_task(task)
    streamed.write_model(tmp_path)
    content = given if isinstance(given, bytes) else json.dumps(given).encode()
    server.publish([message(streamed.rows()[0]), content], f"BAD{number}", f"bad{number}.a")
    recipe = streamed.recipe(tmp_path, f"{server.url}/BAD{number}", **streamed.stream, max_bad=0.0)
    with pytest.raises(DataError, match=pattern_of(told)) as refusal:
        prepare(recipe)
    assert f"the message at offset 2 of subject bad{number}.a" in str(refusal.value)
    assert "1 of 2 messages are bad" in str(refusal.value)


def pattern_of(told: str) -> str:
    return ".*".join(map(re.escape, told.split("…")))


def collected(recipe: Recipe, data: PreparedData, start: Offsets) -> ChosenRows:
    """Return the micro-epoch that follows in a run."""
    assert isinstance(data, GrowingData)
    store = MicroEpochStore(to_path(data.reference.location))
    encoding = Encoding.load(recipe.data, find_task(recipe.task).samples(recipe), store.folder)
    if isinstance(data, SplitData):
        encoding = replace(encoding, processor=data.processor)
    make_rows = partial(StreamRows, encoding, store.in_validation)
    with closing(Collector(recipe, make_rows, start, is_first=False)) as collector:
        while (chosen := collector.poll()) is None:
            assert not collector.has_ended
    return chosen


def first_of(data: PreparedData) -> MicroEpoch:
    assert isinstance(data, GrowingData)
    found = MicroEpochStore(to_path(data.reference.location)).find(1, {0: 1})
    assert found is not None
    return found


@pytest.mark.parametrize(("task", "tensor", "columns"), [("tabular", "numbers", 2), ("multimodal", "size_numbers", 1)])
def test_later_rows_are_read_as_those_of_the_first_micro_epoch(
    server: NatsServer, tmp_path: Path, task: str, tensor: str, columns: int
) -> None:
    streamed = of_task(f"{task}-regression")
    rows = streamed.rows()
    rows[120]["age"], rows[121]["colour"], rows[122]["label"], rows[123]["age"] = "old", "new", "much", 1e300
    server.publish(map(message, rows), f"LATER{task}", f"later{task}.a")
    given = streamed.recipe(tmp_path, f"{server.url}/LATER{task}", **streamed.stream, max_bad=0.05)
    data = prepare(given)
    later = collected(given, data, first_of(data).stop)
    assert later.report.dropped["malformed"] == 3
    assert isinstance(data, GrowingData)
    shards = later.write_train(UPath(tmp_path / "later"))
    batch = data.with_train(
        ShardedRows(str(tmp_path / "later"), shards, given.data.shards, data.reference.index.columns)
    )
    numbers = batch.train.batch(range(SAMPLES)).inputs[tensor]
    assert numbers.shape == (SAMPLES, columns)
    assert np.isfinite(numbers).all()


@pytest.mark.parametrize("task", ["tabular-classification", "multimodal-classification", "sentence-embedding"])
def test_what_is_chosen_does_not_depend_on_how_messages_arrive(tmp_path: Path, task: str) -> None:
    streamed = of_task(task)
    rows = streamed.rows()
    for number, row in enumerate(rows):
        if "age" in row and number % 3:
            row["age"] = f" {row['age']}.0"  # a number as text, in some messages
    rows[20] = {"label": ["odd"]}
    rows[30:40] = rows[10:20]  # duplicates of texts
    given = streamed.recipe(tmp_path, "nats://127.0.0.1:1/S", **streamed.stream)
    found = []
    for size in (1, 7, ROWS):
        made = rows_of(given)({0: 1}, True)
        messages = [Message(0, 1 + number, message(row)) for number, row in enumerate(rows)]
        for start in range(0, ROWS, size):
            made.add(messages[start : start + size])
        chosen = made.choose(SAMPLES, BATCH, takes_fewer=False)
        assert chosen is not None
        found.append((chosen.train, chosen.validation, chosen.stop, chosen.report))
    assert found[0] == found[1] == found[2]
    assert found[0][3].dropped["malformed"] == 1


def test_no_later_pair_has_a_held_out_text(server: NatsServer, tmp_path: Path) -> None:
    streamed = of_task("sentence-embedding")
    rows = streamed.rows()
    given = streamed.recipe(tmp_path, f"{server.url}/PAIRS", **streamed.stream)
    server.publish(map(message, rows[:100]), "PAIRS", "pairs.a")
    data: Any = prepare(given)
    anchor, positive = data.validation.pairs[0]
    again = [{"anchor": anchor, "positive": "another"}, {"anchor": "yet another", "positive": positive}]
    server.publish(map(message, [*again, *rows[100:]]), "PAIRS", "pairs.a")
    later = collected(given, data, first_of(data).stop)
    assert later.report.dropped == {"in_validation": 2}


@pytest.mark.parametrize(
    ("task", "changes", "told"),
    [
        ("text-classification", {"labels": None}, "data.stream.labels is missing: name all labels"),
        ("text-classification", {"labels": ["good"]}, "has the classes ['good'] … expected two"),
        ("tabular-regression", {"columns": {"features": None}}, "data.columns.features is missing: a stream has no"),
    ],
)
def test_what_a_stream_cannot_tell_has_to_be_named(task: str, changes: Any, told: str, tmp_path: Path) -> None:
    streamed = of_task(task)
    stream = {key: value for key, value in (streamed.stream | changes).items() if key != "columns"}
    recipe = streamed.recipe(tmp_path, "nats://127.0.0.1:1/S", changes.get("columns"), **stream)
    with pytest.raises(RayloomError, match=pattern_of(told)):
        prepare(recipe)
