"""Data of language modelling: documents, the tokenizer without loss, and blocks."""

import json
import uuid
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models, processors
from upath import UPath

from app.config import CleanConfig, DataConfig, SourceConfig, TokenizerConfig
from app.data.builtin import BUILTIN_DOCUMENTS
from app.data.language import LanguageData
from app.data.preparation.samples import Documents
from app.data.prepared import Dataset
from app.data.sources.formats.base import DOCUMENTS
from app.data.sources.labelled import INPUT
from app.data.sources.source import Source
from app.data.sources.units import cut_units, list_files, read_unit
from app.data.tokenizer import END, LanguageTokenizer
from app.pretrained import PretrainedFolder
from tests.preparing import documents_of
from tests.wording import refused

TEXTS = [f"def function_{index}(argument):\n    return {index} * argument\n" * 3 for index in range(20)]
ODD = f"\ttabs,  spaces \r\n\n{END} 中文 é é \x00 🙂   \n"
KINDS = [TokenizerConfig(vocab_size=400), TokenizerConfig(kind="bytes")]


def folder_of(root: Path, texts: list[str]) -> str:
    for index, text in enumerate(texts):
        (root / f"{index:03d}.txt").write_text(text, encoding="utf-8", newline="")
    return str(root)


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_tokens_are_decoded_to_the_same_text(tmp_path: Path, config: TokenizerConfig) -> None:
    fitted = LanguageTokenizer.fit(TEXTS, DataConfig(source="-", tokenizer=config))
    fitted.save(UPath(tmp_path))
    tokenizer = LanguageTokenizer.load(UPath(tmp_path))
    for text in (*TEXTS[:2], ODD, ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(text) == fitted.encode(text)
    assert len(tokenizer.encode(ODD)) <= len(ODD.encode())
    assert tokenizer.facts == fitted.facts


def test_a_tokenizer_saved_with_truncation_and_padding_neither_cuts_nor_pads_documents() -> None:
    fitted = LanguageTokenizer.fit(TEXTS, DataConfig(source="-"))
    saved = Tokenizer.from_str(fitted.to_json())
    saved.enable_truncation(4)
    saved.enable_padding(length=600)
    tokenizer = LanguageTokenizer(saved, 32)
    assert np.array_equal(tokenizer.join(TEXTS), fitted.join(TEXTS))
    assert tokenizer.sha256 == LanguageTokenizer(Tokenizer.from_str(fitted.to_json()), 32).sha256


def test_a_tokenizer_that_ends_texts_itself_ends_documents_once() -> None:
    """Tokenizers with ``add_eos_token`` do (vllm-project/vllm#7492)."""
    fitted = LanguageTokenizer.fit(TEXTS, DataConfig(source="-"))
    saved = Tokenizer.from_str(fitted.to_json())
    saved.post_processor = processors.TemplateProcessing(
        single=f"{END} $A {END}", special_tokens=[(END, fitted.end_id)]
    )
    tokenizer = LanguageTokenizer(saved, 32)
    end, tokens = fitted.end_id, fitted.encode(TEXTS[0])
    assert tokenizer.encode(TEXTS[0]) == [end, *tokens]
    assert tokenizer.join([TEXTS[0]] * 2).tolist() == [end, *tokens, end] * 2


def test_a_vocabulary_without_latin_letters_keeps_the_last_token() -> None:
    letters = Tokenizer(models.BPE({END: 0, "A": 1, "C": 2, "G": 3, "T": 4}, []))
    letters.add_special_tokens([END])
    letters.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    assert LanguageTokenizer(letters, 32).encode("ACGT") == [0, 1, 2, 3, 4]


def test_a_tokenizer_that_transformers_reads_otherwise_is_refused(tmp_path: Path) -> None:
    """Otherwise, training would use other tokens than transformers does with the weights later."""
    LanguageTokenizer.fit(TEXTS, DataConfig(source="-")).save(UPath(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    settings = {"tokenizer_class": "GPT2TokenizerFast", "eos_token": END, "add_prefix_space": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with refused("tokenizer.differs", "model.pretrained"):
        LanguageTokenizer.from_pretrained(PretrainedFolder("folder", tmp_path), DataConfig(source="-"))


def test_bytes_are_one_token_each_and_one_for_the_end() -> None:
    tokenizer = LanguageTokenizer.fit(TEXTS, DataConfig(source="-", tokenizer=TokenizerConfig(kind="bytes")))
    assert tokenizer.facts["vocab_size"] == 257
    assert len(tokenizer.encode(ODD)) == len(ODD.encode())
    assert tokenizer.join(["ab", "", "c"]).tolist() == [*tokenizer.encode("ab"), 0, 0, *tokenizer.encode("c"), 0]


def test_a_long_document_is_tokenised_in_pieces_that_cut_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.tokenizer._MAX_CHARACTERS", 2**16)
    tokenizer = LanguageTokenizer.fit(TEXTS, DataConfig(source="-"))
    document = " ".join(TEXTS) * (3 * 2**16 // len(" ".join(TEXTS)))
    tokens = tokenizer.join([document, "b"]).tolist()
    assert tokens == [*tokenizer.encode(document), end := tokens[-1], *tokenizer.encode("b"), end]


def test_a_block_is_followed_by_its_targets(tmp_path: Path) -> None:
    data = documents_of(DataConfig(source=folder_of(tmp_path, TEXTS), block_length=5))
    batch = data.train.batch([3, 0])
    inputs = batch.inputs["input_ids"]
    assert np.array_equal(inputs[:, 1:], batch.targets[:, :-1])
    assert inputs.shape == batch.targets.shape == (2, 5)
    assert inputs.dtype == batch.targets.dtype == np.int64
    # The last target is the first token of the next block.
    assert batch.targets[:, -1].tolist() == data.train.batch([4, 1]).inputs["input_ids"][:, 0].tolist()
    assert list(data.train.padded_lengths) == [5] * len(data.train)


def test_documents_that_cannot_teach_are_dropped(tmp_path: Path) -> None:
    folder_of(tmp_path, ["a" * 9, "b" * 9, " \n", "b" * 9, " " + "b" * 9, *TEXTS])
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe")
    config = DataConfig(source=str(tmp_path), block_length=8, clean=CleanConfig(max_unreadable=0.1))
    report = documents_of(config).report
    assert (report.given, report.kept) == (26, 23)
    assert report.dropped == {"not_text": 1, "empty": 1, "duplicate": 1}
    assert "1 exact duplicates" in str(report)


def test_the_standard_library_is_text_without_tests() -> None:
    documents = list(BUILTIN_DOCUMENTS["stdlib"]())
    assert len(documents) > 400
    assert any(text.startswith(b'"""Random variable generators.') for text in documents)
    assert not any(b"class TestRandom" in text for text in documents)


def test_a_folder_is_read_with_its_tables(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "sub/b.py").write_text("b", encoding="utf-8")
    (tmp_path / "a.md").write_text("a", encoding="utf-8")
    (tmp_path / ".hidden/x.txt").write_text("x", encoding="utf-8")
    pd.DataFrame({"text": ["c", "d"]}).to_parquet(tmp_path / "sub/c.parquet")
    pd.DataFrame({"text": ["e"]}).to_json(tmp_path / "sub/d.jsonl", orient="records", lines=True)
    files = list_files(Source(str(tmp_path)), DOCUMENTS)
    columns = Documents().columns(DataConfig(source="documents"))
    parts = [rows.cells[INPUT].to_pylist() for unit in cut_units(files, 10**6) for rows in read_unit(unit, columns)]
    assert [text for part in parts for text in part] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_the_split_is_by_document_and_loses_nothing(tmp_path: Path, config: TokenizerConfig) -> None:
    source = folder_of(tmp_path, TEXTS)
    shared = {"source": source, "validation_fraction": 0.2, "block_length": 16, "tokenizer": config}
    data = documents_of(DataConfig(**shared, test_fraction=0.1))
    assert data.test is not None
    train, validation, test = (
        data.tokenizer.decode(blocks.batch(range(len(blocks))).inputs["input_ids"].ravel().tolist()).split(END)
        for blocks in (data.train, data.validation, data.test)
    )
    # Tokens at the end of a split that do not fill a block are left out.
    ends = (train.pop(), validation.pop(), test.pop())
    found = [*train, *validation, *test]
    assert len(found) == len({*found})
    assert {*found} <= set(TEXTS)
    missing = set(TEXTS) - {*found}
    assert len(missing) <= 3
    assert all(any(text.startswith(end) for end in ends) for text in missing)
    assert 1 <= len(validation) <= 8
    assert data.facts == {"vocab_size": data.tokenizer.facts["vocab_size"], "max_length": 16}
    other = documents_of(DataConfig(**shared, test_fraction=0.1, seed=1))
    assert other.fingerprint != data.fingerprint


def test_each_block_has_an_origin_where_the_last_source_has_no_validation_document(tmp_path: Path) -> None:
    sources = []
    for name, texts in (("large", TEXTS), ("small", TEXTS[:1])):
        (tmp_path / name).mkdir()
        # Exact duplicates would be dropped.
        sources.append(SourceConfig(source=folder_of(tmp_path / name, [f"{name} {text}" for text in texts])))
    data = documents_of(DataConfig(source=None, sources=sources, validation_fraction=0.2, block_length=16, seed=1))
    assert data.origins is not None
    assert set(data.origins.train) == {0, 1}
    assert set(data.origins.validation) == {0}
    assert (len(data.origins.train), len(data.origins.validation)) == (len(data.train), len(data.validation))


@pytest.mark.parametrize("place", ["{tmp_path}/data", "memory://{unique}/data"])
def test_data_is_read_as_it_was_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "source").mkdir()
    data = documents_of(DataConfig(source=folder_of(tmp_path / "source", TEXTS), block_length=32, test_fraction=0.2))
    folder = UPath(place.format(tmp_path=tmp_path, unique=uuid.uuid4().hex))
    data.save(folder)
    loaded = LanguageData.load(folder)
    assert loaded.fingerprint == data.fingerprint
    assert loaded.facts == data.facts
    # Only what publishes a version reads the test split.
    assert (loaded.test, loaded.with_test().summary) == (None, data.summary)
    assert f"testing the published version on {len(data.test or ())}" in data.summary
    kept: Dataset = loaded.train
    assert np.array_equal(kept.batch([1]).targets, data.train.batch([1]).targets)


@pytest.mark.parametrize(
    ("texts", "block_length", "rule"),
    [
        (TEXTS[:1], 8, "split.empty"),
        (["short", "texts"], 64, "text.too_short"),
        (["a", *TEXTS], 1000, "text.too_short"),
    ],
)
def test_too_little_text_is_refused(tmp_path: Path, texts: list[str], block_length: int, rule: str) -> None:
    config = DataConfig(
        source=folder_of(tmp_path, texts), block_length=block_length, tokenizer=TokenizerConfig(kind="bytes")
    )
    with refused(rule, "data.source"):
        documents_of(config)


@pytest.mark.parametrize(
    ("source", "rule"), [("builtin:stdlip", "source.unknown_set"), ("/nowhere/at/all", "source.missing")]
)
def test_bad_sources_are_refused(source: str, rule: str) -> None:
    with refused(rule):
        documents_of(DataConfig(source=source))
