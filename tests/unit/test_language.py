"""Data of language modelling: documents, the tokenizer without loss, and blocks."""

import uuid
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from upath import UPath

from app.config import CleanConfig, DataConfig, SourceConfig, TokenizerConfig
from app.data.language import LanguageData, TokenBlocks, prepare
from app.data.prepared import Dataset
from app.data.sources.documents import clean_documents, load_documents
from app.data.tokenizer import END, LanguageTokenizer
from app.errors import DataError

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


def test_bytes_are_one_token_each_and_one_for_the_end() -> None:
    tokenizer = LanguageTokenizer.fit(TEXTS, DataConfig(source="-", tokenizer=TokenizerConfig(kind="bytes")))
    assert tokenizer.facts["vocab_size"] == 257
    assert len(tokenizer.encode(ODD)) == len(ODD.encode())
    assert tokenizer.join(["ab", "", "c"]).tolist() == [*tokenizer.encode("ab"), 0, 0, *tokenizer.encode("c"), 0]


def test_a_long_document_is_tokenised_in_pieces_that_cut_no_word() -> None:
    tokenizer = LanguageTokenizer.fit(TEXTS, DataConfig(source="-"))
    document = " ".join(TEXTS) * (3 * 2**20 // len(" ".join(TEXTS)))
    tokens = tokenizer.join([document, "b"]).tolist()
    assert tokens == [*tokenizer.encode(document), end := tokens[-1], *tokenizer.encode("b"), end]


def test_a_block_is_followed_by_its_targets() -> None:
    blocks = TokenBlocks(np.arange(23, dtype=np.uint16), block_length=5)
    batch = blocks.batch([3, 0])
    assert len(blocks) == len(blocks.lengths) == 4  # the last two tokens fill no block
    assert batch.inputs["input_ids"].tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert batch.targets.tolist() == [[16, 17, 18, 19, 20], [1, 2, 3, 4, 5]]
    assert batch.inputs["input_ids"].dtype == batch.targets.dtype == np.int64
    assert len(TokenBlocks(np.arange(6), block_length=5)) == 1
    assert len(TokenBlocks(np.arange(5), block_length=5)) == 0


def test_documents_that_cannot_teach_are_dropped() -> None:
    kept, report = clean_documents(["a", "b", None, " \n", "b", " b"], CleanConfig())
    assert kept == ["a", "b", " b"]
    assert (report.given, report.kept) == (6, 3)
    assert report.dropped == {"not_text": 1, "empty": 1, "duplicate": 1}
    assert "1 exact duplicates" in str(report)


def test_the_standard_library_is_text_without_tests() -> None:
    documents, _, report = load_documents(DataConfig(source="builtin:stdlib"))
    assert report.kept == len(documents) > 400
    assert any(text.startswith('"""Random variable generators.') for text in documents)
    assert not any("class TestRandom" in text for text in documents)


def test_a_folder_is_read_with_its_tables(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "sub/b.py").write_text("b", encoding="utf-8")
    (tmp_path / "a.md").write_text("a", encoding="utf-8")
    (tmp_path / ".hidden/x.txt").write_text("x", encoding="utf-8")
    pd.DataFrame({"text": ["c", "d"]}).to_parquet(tmp_path / "sub/c.parquet")
    pd.DataFrame({"text": ["e"]}).to_json(tmp_path / "sub/d.jsonl", orient="records", lines=True)
    assert load_documents(DataConfig(source=str(tmp_path)))[0] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)
def test_the_split_is_by_document_and_loses_nothing(tmp_path: Path, config: TokenizerConfig) -> None:
    source = folder_of(tmp_path, TEXTS)
    data = prepare(DataConfig(source=source, validation_fraction=0.2, block_length=16, tokenizer=config))
    train, validation = (
        set(data.tokenizer.decode(blocks.tokens.tolist()).split(END)) - {""} for blocks in (data.train, data.validation)
    )
    assert len(validation) == 4
    assert train | validation == set(TEXTS)
    assert not train & validation
    assert data.facts == {"vocab_size": data.tokenizer.facts["vocab_size"], "max_length": 16}
    other = prepare(DataConfig(source=source, validation_fraction=0.2, block_length=16, tokenizer=config, seed=1))
    assert other.fingerprint != data.fingerprint


def test_each_block_has_an_origin_where_the_last_source_has_no_validation_document(tmp_path: Path) -> None:
    sources = []
    for name, texts in (("large", TEXTS), ("small", TEXTS[:1])):
        (tmp_path / name).mkdir()
        # Exact duplicates would be dropped.
        sources.append(SourceConfig(source=folder_of(tmp_path / name, [f"{name} {text}" for text in texts])))
    data = prepare(DataConfig(source=None, sources=sources, validation_fraction=0.2, block_length=16, seed=1))
    assert data.origins is not None
    assert set(data.origins.train) == {0, 1}
    assert set(data.origins.validation) == {0}
    assert (len(data.origins.train), len(data.origins.validation)) == (len(data.train), len(data.validation))


@pytest.mark.parametrize("place", ["{tmp_path}/data", "memory://{unique}/data"])
def test_data_is_read_as_it_was_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "source").mkdir()
    data = prepare(DataConfig(source=folder_of(tmp_path / "source", TEXTS), block_length=32))
    folder = UPath(place.format(tmp_path=tmp_path, unique=uuid.uuid4().hex))
    data.save(folder)
    loaded: LanguageData = LanguageData.load(folder)
    assert loaded.fingerprint == data.fingerprint
    assert loaded.facts == data.facts
    assert loaded.summary == data.summary
    kept: Dataset = loaded.train
    assert np.array_equal(kept.batch([1]).targets, data.train.batch([1]).targets)
    assert isinstance(loaded.train.tokens.base, np.memmap) == (folder.protocol != "memory")


@pytest.mark.parametrize(
    ("texts", "block_length", "words"),
    [
        (TEXTS[:1], 8, ["1 documents", "cannot be split"]),
        (["short", "texts"], 64, ["tokens in its training documents", "data.block_length", "64"]),
        ([TEXTS[0], "a", "b"], 32, ["validation documents"]),
    ],
)
def test_too_little_text_is_refused(tmp_path: Path, texts: list[str], block_length: int, words: list[str]) -> None:
    config = DataConfig(
        source=folder_of(tmp_path, texts), block_length=block_length, tokenizer=TokenizerConfig(kind="bytes")
    )
    with pytest.raises(DataError) as refused:
        prepare(config)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(("source", "word"), [("builtin:stdlip", "'stdlib'"), ("/nowhere/at/all", "does not exist")])
def test_bad_sources_are_refused(source: str, word: str) -> None:
    with pytest.raises(DataError, match=word):
        load_documents(DataConfig(source=source))
