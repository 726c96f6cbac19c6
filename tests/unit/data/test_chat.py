"""Conversations as training data: what is learned of them, packing, and what is refused."""

import csv
import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from upath import UPath

from app.config import Recipe, dump_recipe, load_recipe
from app.data.chat import CONVERSATIONS, LEARNED, ChatBlocks, ChatData
from app.data.conversations import MESSAGES, read_chat
from app.data.preparation.chats import pack
from app.data.prepared import IGNORED
from app.data.sources.cells import Columns
from app.data.sources.source import Source
from app.data.sources.units import read_source
from app.models.traits import require_apart
from app.runs import Run
from app.serving.generation.tokenizer import GenerationTokenizer
from app.serving.protocol.openai.chat import ChatRequest
from app.tasks import load_prepared, prepare
from app.training.data.recipe_order import order_of
from app.training.publication import finish_run
from app.training.run import open_run, prepare_run
from app.training.session import train
from app.training.worker import start_worker
from tests.generating import make_language_model
from tests.helpers import losses, train_alone
from tests.preparing import read_fewer_files
from tests.pretrained import BERT, WORDS, write_decoder
from tests.wording import refused

TEMPLATE = (
    "{% for message in messages %}[MASK] {{ message.role }} {{ message.content }} [SEP] {% endfor %}"
    "{% if add_generation_prompt %}[MASK] assistant {% endif %}"
)
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.thinking %}<think>{{ message.thinking }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|endoftext|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def user(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **keys}


def answer(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def write_chats(file: Path, chats: list[list[dict[str, Any]]]) -> Path:
    file.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats), encoding="utf-8")
    return file


def many() -> list[list[dict[str, Any]]]:
    return [
        [user(f"was it good {'very ' * (number % 7)}"), answer(f"it was {'not ' * (number // 7)} good")]
        for number in range(40)
    ]


def recipe_of(tmp_path: Path, source: Path, *overrides: str, model_type: str = "llama") -> Recipe:
    folder = tmp_path / model_type
    if not folder.exists():
        write_decoder(folder, model_type)
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    model = [f"model.pretrained={folder}", "model.factory=null", "model.args={}", "task=chat", f"data.source={source}"]
    keys = ["data.block_length=32", "data.tokenizer={}", "tune=null", "train.workers=1", f"storage={tmp_path / 's'}"]
    small = ["train.epochs=2", "train.global_batch_size=4", "data.validation_fraction=0.2"]
    return load_recipe("recipes/stdlib_gpt.yaml", [*model, *keys, *small, *overrides])


def chats_of(recipe: Recipe) -> ChatData:
    data = prepare(recipe)
    assert isinstance(data, ChatData)
    return data


def test_only_the_answers_are_learned(tmp_path: Path) -> None:
    chats = [[user("good film"), answer("a great film"), user("and book"), answer("poor book")]] * 1 + many()
    first = chats_of(recipe_of(tmp_path, write_chats(tmp_path / "chats.jsonl", chats), "data.chat.packing=false"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama")
    learned = set()
    for split in (first.train, first.validation):
        for row in range(len(split)):
            targets = split.batch([row]).targets[0]
            learned.add(tokenizer.decode(targets[targets != IGNORED]))
    assert "a great film [SEP] poor book [SEP]" in learned
    assert {text.removesuffix(" [SEP]").split(" [SEP] ")[0].split()[0] for text in learned} == {"it", "a"}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def test_a_conversation_is_written_as_the_endpoint_writes_it(tmp_path: Path) -> None:
    """In OpenAI's API, arguments of a call are JSON text, and tools are beside the messages (oumi-ai/oumi#2599)."""
    folder = make_language_model(tmp_path / "model", length=512)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE, encoding="utf-8")
    given = [
        {"role": "developer", "content": "be short"},
        user("weather in Paris?"),
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "where?",
            "tool_calls": [call('{"city": "Paris", "days": 2}')],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    rows = [{"messages": [*given, answer("sunny")], "tools": [TOOL]}, *({"messages": chat} for chat in many())]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    keys = [f"model.pretrained={folder}", "data.block_length=512", "data.chat.packing=false"]
    data = chats_of(recipe_of(tmp_path, tmp_path / "chats.jsonl", *keys))

    request = ChatRequest.model_validate({"model": "m", "messages": given, "tools": [TOOL]})
    prompt = GenerationTokenizer.load(folder).chat(request.turns, request.callable_tools)
    splits = (data.train, data.validation)
    found = [split.batch([row]).inputs["input_ids"][0] for split in splits for row in range(len(split))]
    assert sum(tuple(tokens[: len(prompt)]) == prompt for tokens in found) == 1


@pytest.mark.parametrize("tools", [None, "null", "[]"])
def test_a_conversation_may_have_no_tools(tools: str | None) -> None:
    assert read_chat(json.dumps(many()[0]), tools).tools is None


def test_a_mask_of_ones_own_decides(tmp_path: Path) -> None:
    chats = [[user("good", train=True), answer("fine", train=False), answer("great")] for _ in range(2)] + many()
    keys = ["data.chat.packing=false", "data.clean.deduplicate=false", "data.validation_fraction=0.5"]
    data = chats_of(recipe_of(tmp_path, write_chats(tmp_path / "chats.jsonl", chats), *keys))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama")
    learned = [
        tokenizer.decode(row[row != IGNORED])
        for split in (data.train, data.validation)
        for row in split.batch(range(len(split))).targets
    ]
    assert sum("good [SEP] great [SEP]" in text and "fine" not in text for text in learned) == 2


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "qwen3"])
def test_a_packed_conversation_is_answered_as_alone(model_type: str, tmp_path: Path) -> None:
    source = write_chats(tmp_path / "chats.jsonl", many())
    keys = ["data.block_length=64"]
    packed, alone = (
        chats_of(recipe_of(tmp_path, source, *keys, f"data.chat.packing={packing}", model_type=model_type)).train
        for packing in ("true", "false")
    )
    assert len(packed) < len(alone) / 1.9
    model = AutoModelForCausalLM.from_pretrained(tmp_path / model_type, use_cache=False).eval()
    require_apart(model)

    def loss_of(split: ChatBlocks) -> float:
        total = 0.0
        for row in range(len(split)):
            batch = split.batch([row])
            inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
            logits = model(**inputs).logits.flatten(0, 1)
            targets = torch.from_numpy(batch.targets).flatten()
            assert (targets != IGNORED).sum() == split.num_targets[np.array([row])]
            total += float(functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"))
        return total

    with torch.no_grad():
        assert loss_of(packed) == pytest.approx(loss_of(alone), rel=1e-5)
    assert packed.shards.total(LEARNED) == alone.shards.total(LEARNED)


def test_a_model_that_would_mix_packed_conversations_is_refused(tmp_path: Path) -> None:
    source = write_chats(tmp_path / "chats.jsonl", many())
    own = ["model.factory=tests.unit.data.test_chat:caching", "model.args={}"]
    write_decoder(tmp_path / "llama")
    (tmp_path / "llama/chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with refused("packing.unsupported", "data.chat.packing"):
        prepare_run(Run.start("train", recipe_of(tmp_path, source, *own)))


def caching(vocab_size: int) -> torch.nn.Module:
    """A Llama that keeps a cache, with which transformers looks at no positions."""
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, num_key_value_heads=4, **BERT))


def test_blocks_are_full_and_hold_each_conversation_once() -> None:
    lengths = [int(number) for number in np.random.default_rng(0).integers(1, 100, 500)]
    blocks = pack(lengths, 100)
    assert sorted(number for block in blocks for number in block) == list(range(500))
    assert max(sum(lengths[number] for number in block) for block in blocks) <= 100
    assert len(blocks) <= 1.06 * sum(lengths) / 100


def train_losses(tmp_path: Path, name: str, source: Path, *overrides: str) -> list[float]:
    recipe = recipe_of(tmp_path, source, f"storage={tmp_path / name}", *overrides)
    run = Run.start("train", recipe)
    plan, data = prepare_run(run)
    open_run(run, plan, data)
    finish_run(run, data, train(plan, data, start_worker(recipe.train), run.folder))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line] + [
        line["val_loss"] for line in lines if "val_loss" in line
    ]


def test_the_loss_is_the_mean_over_targets_however_they_are_shared_out(tmp_path: Path) -> None:
    source = write_chats(tmp_path / "chats.jsonl", many())
    whole = train_losses(tmp_path, "whole", source, "train.plan={micro_batch: 4}", "data.chat.packing=false")
    parts = train_losses(tmp_path, "parts", source, "train.plan={micro_batch: 1}", "data.chat.packing=false")
    assert len(whole) > 4
    assert parts == pytest.approx(whole, rel=1e-5)
    assert whole[-1] < whole[0]


@pytest.mark.parametrize("split", [pytest.param("tensor: 2", marks=pytest.mark.slow), "zero_stage: 3"])
def test_a_step_on_a_split_model_is_the_mean_over_targets(split: str, tmp_path: Path) -> None:
    """Micro-batches differ in their targets. A mean of their means would be another loss."""
    recipe = recipe_of(tmp_path, write_chats(tmp_path / "chats.jsonl", many()))
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    keys = ["train.max_steps=3", "data.chat.packing=false", "train.optimizer={name: sgd}"]
    alone, shared = (
        losses(train_alone(*keys, f"train.plan={{{plan}}}", processes=processes, recipe=str(tmp_path / "recipe.yaml")))
        for plan, processes in (("zero_stage: 1", 1), (f"{split}, micro_batch: 1", 2))
    )
    assert shared == pytest.approx(alone, rel=1e-4)


def test_a_pipeline_is_refused_where_lengths_vary(tmp_path: Path) -> None:
    source = write_chats(tmp_path / "chats.jsonl", many())
    keys = ["data.chat.packing=false", "train.workers=2", "train.plan={pipeline: 2}"]
    with refused("pipeline.shapes", "train.plan.pipeline"):
        prepare_run(Run.start("train", recipe_of(tmp_path, source, *keys)))


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64 - 1])
def test_any_seed_that_torch_takes_splits_the_chats(seed: int, tmp_path: Path) -> None:
    data = chats_of(recipe_of(tmp_path, write_chats(tmp_path / "chats.jsonl", many()), f"data.seed={seed}"))
    assert len(data.validation) > 0


def test_dropped_and_cut_conversations_are_told(tmp_path: Path) -> None:
    long = [user("good"), answer("very " * 60)]
    late = [user("very " * 60), answer("good")]
    data = chats_of(recipe_of(tmp_path, write_chats(tmp_path / "chats.jsonl", [*many(), long, late, many()[0]])))
    assert str(data.report) == (
        "43 conversations, 41 kept; dropped: 1 exact duplicates, 1 without an answer in the first data.block_length "
        "tokens; cut at data.block_length tokens: 1"
    )
    assert "% full, with" in data.summary


def test_saved_data_are_loaded_unchanged(tmp_path: Path) -> None:
    own = TEMPLATE.replace("[SEP]", "film")
    (tmp_path / "own.jinja").write_text(own, encoding="utf-8")
    source = write_chats(tmp_path / "chats.jsonl", many())
    recipe = recipe_of(tmp_path, source, f"data.chat.template={tmp_path / 'own.jinja'}")
    data = chats_of(recipe)
    assert data.fingerprint != chats_of(recipe_of(tmp_path, source)).fingerprint
    data.save(UPath(tmp_path / "data"))
    assert AutoTokenizer.from_pretrained(tmp_path / "data").chat_template == own
    loaded = load_prepared(recipe, UPath(tmp_path / "data"))
    assert (loaded.fingerprint, loaded.facts, loaded.rows) == (data.fingerprint, data.facts, data.rows)
    for name, tensor in data.train.batch([1, 0]).inputs.items():
        assert np.array_equal(loaded.train.batch([1, 0]).inputs[name], tensor)


@pytest.mark.parametrize(
    ("rows", "rule", "key"),
    [
        ([{"messages": [user("good")]}], "chat.nothing_to_learn", None),
        ([{"messages": []}], "chat.turns", None),
        ([{"text": "good"}], "columns.missing", "a row"),
        ([{"messages": [{"role": "user"}]}], "chat.turns", None),
        (["{"], "json.invalid", None),
        (['{"messages": [{"role": "assistant", "content": "\\ud83d"}]}'], "text.encoding", None),
        ([{"messages": None}], "chat.turns", None),
        ([{"messages": "good"}], "chat.turns", None),
        ([{"messages": [user("good"), answer("", tool_calls=[call("{")])]}], "chat.turns", None),
        ([{"messages": [user("good"), answer("", tool_calls=[call("1")])]}], "chat.turns", None),
        ([{"messages": [user("good"), answer("", tool_calls="weather")]}], "chat.turns", None),
        ([{"messages": many()[0], "tools": ["weather"]}], "chat.tools", None),
        ([{"messages": many()[0], "tools": [TOOL]}], "chat.tools_unread", None),
    ],
)
def test_a_row_that_is_no_conversation_is_refused(rows: list[Any], rule: str, key: str | None, tmp_path: Path) -> None:
    good = json.dumps({"messages": many()[0]})
    lines = [good, *(row if isinstance(row, str) else json.dumps(row) for row in rows)]
    source = tmp_path / "chats.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    with refused(rule, key):
        prepare(recipe_of(tmp_path, source))


@pytest.mark.parametrize(
    ("template", "overrides", "rule", "key"),
    [
        (None, [], "chat.no_template", "data.chat.template"),
        ("{{ raise_exception('no system role') }}", [], "chat.template", None),
        (
            "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}",
            [],
            "chat.template",
            None,
        ),
        (TEMPLATE, ["data.chat.template=/nowhere.jinja"], "file.unreadable", "data.chat.template"),
        (TEMPLATE, ["data.block_length=128"], "length.too_long", "data.block_length"),
        (TEMPLATE, ["data.columns.input=chat"], "task.unsupported", "data.columns.input"),
        (TEMPLATE, ["model.pretrained=null", "model.factory=app.models.gpt:gpt"], "recipe.missing", "model.pretrained"),
        (TEMPLATE, ["task=language-modeling", "data.chat.packing=false"], "task.unsupported", "data.chat.packing"),
    ],
)
def test_a_template_or_key_that_does_not_fit_is_refused(
    template: str | None, overrides: list[str], rule: str, key: str | None, tmp_path: Path
) -> None:
    source = write_chats(tmp_path / "chats.jsonl", many())
    recipe_of(tmp_path, source)
    (tmp_path / "llama/chat_template.jinja").unlink()
    if template:
        (tmp_path / "llama/chat_template.jinja").write_text(template, encoding="utf-8")
    with refused(rule, key):
        prepare(recipe_of(tmp_path, source, *overrides))


@pytest.mark.parametrize("one_in", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_the_standard_library_is_a_set_of_conversations(
    one_in: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_fewer_files("_questions", one_in, monkeypatch)
    shards = f"data.shards={{size: {50_000 // one_in}, window: {200_000 // one_in}}}"
    data = chats_of(recipe_of(tmp_path, tmp_path, "data.source=builtin:stdlib", "data.block_length=64", shards))
    assert data.report.kept > 3000 / one_in
    # They are one unit, which is packed in parts, since nobody knows how large it is.
    assert sum(split.shards.total(CONVERSATIONS) for split in (data.train, data.validation)) == data.report.kept


def conversations_in(data: ChatData) -> dict[str, list[tuple[tuple[int, int], ...]]]:
    """The tokens and targets of each conversation of each split, sorted."""
    found = {}
    for name, split in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        assert split is not None
        chats: list[tuple[tuple[int, int], ...]] = []
        for row, length in enumerate(split.lengths):
            batch = split.batch([row])
            tokens, targets = batch.inputs["input_ids"][0, :length], batch.targets[0, :length]
            positions = batch.inputs.get("position_ids", np.arange(len(tokens))[None])[0, :length]
            starts = np.flatnonzero(positions == 0)[1:]
            parts = zip(np.split(tokens, starts), np.split(targets, starts), strict=True)
            chats += [tuple(zip(*(part.tolist() for part in chat), strict=True)) for chat in parts]
        found[name] = sorted(chats)
    return found


def test_units_of_any_size_keep_the_same_conversations_in_the_same_splits(tmp_path: Path) -> None:
    words = [word for word in WORDS if word not in ("it", "was")][:10]
    chats = [[user(" ".join(pair)), answer(f"it was {' '.join(pair)}")] for pair in product(words, repeat=3)]
    chats += [[user("very " * 60), answer("good")], *chats[:50]]
    source = write_chats(tmp_path / "chats.jsonl", chats)

    def elsewhere(work: Callable[[int], int], numbers: Sequence[int]) -> Iterable[int]:
        return map(pickle.loads(pickle.dumps(work)), numbers)

    found = []
    for packing, shards in product(("true", "false"), ("{}", "{size: 4096, window: 20KB}")):
        keys = [f"data.chat.packing={packing}", f"data.shards={shards}", "data.test_fraction=0.1"]
        data = prepare(recipe_of(tmp_path, source, *keys), elsewhere)
        assert isinstance(data, ChatData)
        found.append((data, conversations_in(data)))
    whole, *others = found
    num_shards = [len(data.train.shards.shard_rows) for data, _ in found]
    assert (num_shards[0], num_shards[2]) == (1, 1)
    assert min(num_shards[1], num_shards[3]) > 8
    assert [(data.report.kept, data.report.dropped) for data, _ in found] == [
        (len(words) ** 3, {"duplicate": 50, "no_answer": 1})
    ] * 4
    assert [chats for _, chats in others] == [whole[1]] * 3


def test_a_conversation_means_the_same_in_every_layout(tmp_path: Path) -> None:
    chats = many()
    source = write_chats(tmp_path / "chats.jsonl", [*chats, chats[0]])
    texts = [json.dumps(chat, indent=1) for chat in [*chats, chats[0]]]
    pq.write_table(pa.table({"messages": [*chats, chats[0]]}), tmp_path / "chats.parquet")
    pq.write_table(pa.table({"messages": texts}), tmp_path / "texts.parquet")
    with (tmp_path / "chats.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["messages"], *([text] for text in texts)])
    data = [
        chats_of(recipe_of(tmp_path, tmp_path / name)) for name in ("chats.jsonl", "chats.parquet", "texts.parquet")
    ]
    data.append(chats_of(recipe_of(tmp_path, tmp_path / "chats.csv")))
    assert len({one.fingerprint for one in data}) == 1
    losses = train_losses(tmp_path, "lines", source)
    assert losses == train_losses(tmp_path, "cells", tmp_path / "chats.csv")


def test_sources_are_mixed_and_groups_stay_together(tmp_path: Path) -> None:
    rows = [{"messages": chat, "author": f"author {number // 8}"} for number, chat in enumerate(many() * 2)]
    for number, part in enumerate((rows[:40], rows[40:])):
        lines = [json.dumps(row | {"messages": [*row["messages"], user("hotel " * number)]}) for row in part]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sources = ", ".join(f"{{source: {tmp_path / f'{number}.jsonl'}, weight: {number + 1}}}" for number in range(2))
    keys = ["data.source=null", f"data.sources=[{sources}]", "data.group_column=author", "data.chat.packing=false"]
    data = chats_of(recipe_of(tmp_path, tmp_path, *keys))
    assert data.origins
    assert len(data.validation) % 8 == len(data.train) % 8 == 0
    order = order_of(recipe_of(tmp_path, tmp_path, *keys), data)
    found = order.source_samples(1, range(order.num_batches(1)))
    assert [*found.values()] == [
        order.num_batches(1) * 4 // 3,
        order.num_batches(1) * 4 - order.num_batches(1) * 4 // 3,
    ]


def test_parquet_gives_the_conversations_of_json_lines(tmp_path: Path) -> None:
    """An Arrow column gives all objects the same keys, with null where one is missing (modelscope/ms-swift#10125)."""
    calls = [{"name": "f", "arguments": {"city": "Paris"}}, {"name": "g", "arguments": {"size": 1}}]
    chats = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "x"}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}],
    ]
    pq.write_table(pa.table({"messages": chats}), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    for name in ("rows.parquet", "rows.jsonl"):
        rows = read_source(Source(str(tmp_path / name)), Columns("chat", (MESSAGES,)))
        assert [json.loads(cell) for some in rows for cell in some.cells[MESSAGES.key].to_pylist()] == chats
