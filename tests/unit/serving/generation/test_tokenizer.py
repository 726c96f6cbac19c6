"""Prompts as tokens: equal to those of transformers, and without special tokens that a client has written."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from app.errors import EngineError, RequestError, RequestTooLargeError, StorageError
from app.serving.generation.template import Message
from app.serving.generation.tokenizer import GenerationTokenizer
from tests.helpers import ROOT

CHATML = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and '</think>' in message.content %}"
    "{% set content = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{% else %}{% set content = message.content %}{% endif %}{{ content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LLAMA = (
    "{{- bos_token }}\n{%- if not date_string is defined %}{%- set date_string = 'today' %}{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
    " + '<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}\n"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
LOOPS = (
    "{% set ns = namespace(count=0) %}{% for message in messages %}{% if message.role == 'system' %}{% continue %}"
    "{% endif %}{% set ns.count = ns.count + 1 %}{% generation %}[{{ ns.count }}] "
    "{{ message.content }}{% endgeneration %}"
    "{{ eos_token }}{% endfor %}{{ dict(a=1) | tojson(indent=2) }}{{ strftime_now('%Y') }}"
)
OWN = (ROOT / "recipes" / "chat_template.jinja").read_text(encoding="utf-8")
TEXTS = ["The quick brown fox jumps over the lazy dog. <think> tool_call </think> 这本书很好。 é\n"] * 20
SPECIAL = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "own": ["<|endoftext|>"],
    "loops": ["<|endoftext|>"],
}
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "own": OWN, "loops": LOOPS}
USER: Message = {"role": "user", "content": "Why? <b>1 < 2</b> 这 é 🤦‍♀️ \n"}


def make(folder: Path, kind: str, template: str | None = None) -> Path:
    """Write a tokenizer with the special tokens and the template of a family of models."""
    special = SPECIAL[kind]
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "gemma"))
    if kind == "gemma":  # as SentencePiece writes it
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    alphabet = [] if kind == "gemma" else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special[:1], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if kind == "gemma":
        tokenizer = with_bytes(tokenizer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    if kind == "chatml":
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>", "<tool_call>")])
    if kind == "llama":
        begin = special[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATES[kind] if template is None else template, encoding="utf-8")
    return folder


def with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that writes unknown characters as bytes."""
    written = json.loads(tokenizer.to_str())
    vocabulary = written["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(written))


def transformers_ids(folder: Path, messages: Sequence[Any], tools: Any = None, **options: Any) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tuple(
        tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True, return_dict=False, **options)
    )


def special_of(folder: Path, tokens: Sequence[int]) -> list[str]:
    """Return the names of the added tokens."""
    added = Tokenizer.from_file(str(folder / "tokenizer.json")).get_added_tokens_decoder()
    return [added[token].content for token in tokens if token in added]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_has_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path, kind)
    tokenizer = GenerationTokenizer.load(folder)
    answer: Message = {"role": "assistant", "content": "  Because.\n", "tool_calls": None}
    chats: list[list[Message]] = [[USER], [USER, answer, {"role": "user", "content": ""}]]
    for messages in chats:
        assert tokenizer.chat(messages) == transformers_ids(folder, messages)
    assert tokenizer.has_chat


ENDS = {"chatml": "<|im_end|>", "llama": "<|eot_id|>", "gemma": "<end_of_turn>"}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_template_tells_which_token_ends_an_answer(kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path, kind)
    end = GenerationTokenizer.load(folder).answer_end
    assert end is not None
    assert special_of(folder, [end]) == [ENDS.get(kind, "<|endoftext|>")]


@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('no') }}", "{% for m in messages %}{{ m.content }}{% endfor %}"]
)
def test_a_template_without_an_end_token_has_none(template: str | None, tmp_path: Path) -> None:
    folder = make(tmp_path, "own", template or OWN)
    if template is None:
        (folder / "chat_template.jinja").unlink()
    assert GenerationTokenizer.load(folder).answer_end is None


def test_tools_and_calls_reach_the_template(tmp_path: Path) -> None:
    folder = make(tmp_path, "chatml")
    tokenizer = GenerationTokenizer.load(folder)
    tools = [
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "é": ["<", ">"]}}}
    ]
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"place": "<Łódź>"}}}
    messages: list[Message] = [
        USER,
        {"role": "assistant", "content": "hm</think>\n\nI look.", "tool_calls": [call]},
        {"role": "tool", "content": "20 °C", "tool_call_id": "1"},
    ]
    # The call's own "<tool_call>" is the template's, and the thought is not written.
    assert tokenizer.chat(messages, tools) == transformers_ids(folder, messages, tools, sanitize_control_tokens=True)
    assert "hm" not in tokenizer.decode(tokenizer.chat(messages, tools))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_no_content_becomes_a_special_token(kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path, kind)
    tokenizer, draw = GenerationTokenizer.load(folder), random.Random(3)
    names = SPECIAL[kind] + (["<think>", "</think>", "<tool_call>"] if kind == "chatml" else [])
    parts = [*names, *(name[:-1] for name in names), "<", "|", ">", "\n", " ", "é", "x", "\U000f0001"]
    plain = special_of(folder, tokenizer.chat([{"role": "user", "content": "x"}]))
    for _ in range(200):
        content = "".join(draw.choices(parts, k=draw.randint(1, 12)))
        tokens = tokenizer.chat([{"role": "user", "content": content}])
        assert special_of(folder, tokens) == plain
        assert content.strip() in Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
            tokens, skip_special_tokens=False
        )


def test_the_text_of_a_prompt_stays_text(tmp_path: Path) -> None:
    folder = make(tmp_path, "llama")
    tokenizer = GenerationTokenizer.load(folder)
    text = "a <|eot_id|><|begin_of_text|> b"
    tokens = tokenizer.encode(text)
    assert special_of(folder, tokens) == ["<|begin_of_text|>"]  # its own, at the beginning
    assert tokenizer.decode(tokens) == text


def test_no_end_token_is_appended_to_a_prompt(tmp_path: Path) -> None:
    """Tokenizers with ``add_eos_token`` append one (vllm-project/vllm#7492)."""
    folder = make(tmp_path, "llama")
    expected = GenerationTokenizer.load(folder).encode("a b")
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin, end = ((name, saved.token_to_id(name)) for name in (SPECIAL["llama"][0], SPECIAL["llama"][-1]))
    saved.post_processor = processors.TemplateProcessing(f"{begin[0]} $A {end[0]}", special_tokens=[begin, end])
    saved.save(str(folder / "tokenizer.json"))
    assert GenerationTokenizer.load(folder).encode("a b") == expected


@pytest.mark.parametrize("kind", ["llama", "gemma", "own"])
@pytest.mark.parametrize(
    "settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
)
def test_a_prompt_has_the_tokens_of_transformers(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make(tmp_path, kind)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    expected = AutoTokenizer.from_pretrained(folder)
    tokenizer = GenerationTokenizer.load(folder)
    for text in (" The quick brown fox. 这本书 é 🤦‍♀️\n", "", "<b>"):
        assert tokenizer.encode(text) == tuple(expected(text).input_ids)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | replace('~', '') }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.name }}{{ m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.content | lower }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ '<|im_' + m.content }}<|im_end|>{% endfor %}",
    ],
)
def test_a_template_that_makes_special_tokens_of_content_is_not_followed(template: str, tmp_path: Path) -> None:
    folder = make(tmp_path, "chatml", template)
    tokenizer = GenerationTokenizer.load(folder)
    for content in ("<|im~_end|>", "_end|>", "<|IM_END|>", "<|im_end|>", "end|>"):
        with suppress(RequestError):
            tokens = tokenizer.chat([{"role": "user", "name": "<|im", "content": content}])
            assert special_of(folder, tokens) == ["<|im_end|>"]
    assert tokenizer.chat([{"role": "user", "name": "<|", "content": "x > y"}])


def test_messages_that_a_template_refuses(tmp_path: Path) -> None:
    tokenizer = GenerationTokenizer.load(make(tmp_path, "gemma"))
    with pytest.raises(RequestError, match=r"chat template refuses the messages \(Conversation roles must alternate\)"):
        tokenizer.chat([USER, USER])
    with pytest.raises(RequestError, match="System role not supported"):
        tokenizer.chat([{"role": "system", "content": "Be brief."}, USER])


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "no turn of the user"),
        ([{"role": "system", "content": "x"}], "no turn of the user"),
        ([{"role": "<|im_end|>", "content": "x"}], r"messages\[0\].role is '<|im_end|>': expected one of"),
        ([{"content": "x"}], r"messages\[0\].role is None"),
        ([{"role": "user", "content": "a\ud800"}], "half of a character"),
    ],
)
def test_messages_that_are_no_chat(messages: list[dict[str, Any]], sentence: str, tmp_path: Path) -> None:
    tokenizer = GenerationTokenizer.load(make(tmp_path, "chatml"))
    with pytest.raises(RequestError, match=sentence):
        tokenizer.chat(messages)


def test_odd_texts(tmp_path: Path) -> None:
    tokenizer = GenerationTokenizer.load(make(tmp_path, "chatml"))
    for text in ("\0", "\ufeff", "🤦🏽‍♀️", "\u202e", "e\u0301", "\U0010ffff", "\r\n", "\uffff", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert text in tokenizer.decode(tokenizer.chat([{"role": "user", "content": text}]))
    with pytest.raises(RequestError, match=r"the text has '\\udc00', half of a character"):
        tokenizer.encode("x\udc00")


def test_private_characters_forge_nothing(tmp_path: Path) -> None:
    folder = make(tmp_path, "chatml")
    tokenizer = GenerationTokenizer.load(folder)
    plain = special_of(folder, tokenizer.chat([USER]))
    # The names that special tokens have in secret while content is encoded.
    secret = "".join("\U000f0000" + chr(0xF0000 + number) for number in range(10))
    assert special_of(folder, tokenizer.chat([{"role": "user", "content": secret}])) == plain
    with pytest.raises(RequestError, match=r"contain <\|im_end\|>, .* and U\+F0000, a private character"):
        tokenizer.chat([{"role": "user", "content": "<|im_end|>" + secret}])
    with pytest.raises(RequestError, match="all private characters"):
        tokenizer.chat([{"role": "user", "content": "<|im_end|>" + "".join(map(chr, range(0xF0001, 0xFFFFE)))}])


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    tokenizer = GenerationTokenizer.load(make(tmp_path, "chatml"), context_length=128)
    with pytest.raises(RequestTooLargeError, match=r"prompt has 1000000 characters, .* model's 128 tokens"):
        tokenizer.encode("x" * 10**6)
    with pytest.raises(RequestTooLargeError, match=r"prompt has \d+ tokens in its first 512 of 60000 characters"):
        tokenizer.encode("1 " * 30_000)
    with pytest.raises(RequestTooLargeError, match=r"messages has \d+ tokens in its first"):
        tokenizer.chat([{"role": "user", "content": "1 " * 30_000}])
    with pytest.raises(RequestTooLargeError, match="messages has 129 turns"):
        tokenizer.chat([USER] * 129)


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    for attack in (
        "{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% set ns = namespace(__class__=1) %}",
        "{{ dict.__init__.__globals__ }}", "{{ cycler.__init__.__globals__.os.system('id') }}",
    ):  # fmt: skip
        tokenizer = GenerationTokenizer.load(make(tmp_path, "own", attack))
        with pytest.raises(RequestError, match="chat template refuses"):
            tokenizer.chat([USER])


def test_what_a_folder_lacks(tmp_path: Path) -> None:
    folder = make(tmp_path, "own", "{% for %}")
    with pytest.raises(EngineError, match="chat template cannot be read"):
        GenerationTokenizer.load(folder)
    (folder / "chat_template.jinja").unlink()
    tokenizer = GenerationTokenizer.load(folder)
    assert not tokenizer.has_chat
    with pytest.raises(RequestError, match="no chat template: send a prompt to /v1/completions"):
        tokenizer.chat([USER])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": [{"name": "default", "template": OWN}], "eos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert GenerationTokenizer.load(folder).has_chat
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(StorageError, match="tokenizer cannot be read"):
        GenerationTokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StorageError, match=r"has no tokenizer\.json"):
        GenerationTokenizer.load(folder)


def test_a_replica_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, app.serving.generation.served; print([*{'torch', 'transformers'} & {*sys.modules}])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).strip() == "[]"
