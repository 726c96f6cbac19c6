"""Tokenizers of imported models: they fit the model, and padding changes no answer, or they are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto as Type
from onnx import helper
from tokenizers import Tokenizer
from upath import UPath

from app.published.loaded import load_model
from app.tensors import check_tensors
from tests.importing import EXACT, imported, write
from tests.pretrained import TEXTS, write_tokenizer
from tests.unit.compile.test_import_hugging_face import answers, logits_of, written
from tests.wording import refused

SEQUENCE = "BertForSequenceClassification"
VECTORS = np.random.default_rng(1).standard_normal((21, 2)).astype(np.float32)


def tokenizer_in(folder: Path) -> Path:
    """A tokenizer of 21 words, which pads with the second, beside the configuration of a model of 32 positions."""
    assert write_tokenizer(folder, max_length=32) == len(VECTORS)
    (folder / "config.json").write_text('{"model_type": "bert", "max_position_embeddings": 32}')
    return folder


def pooled(path: Path, pooling: str, positions: int = 64) -> Path:
    """An ONNX file that adds vectors of tokens and positions. It answers the last, the mean of all, or the unmasked."""
    ids, scores = (Type.INT64, ["n", "length"]), (Type.FLOAT, ["n", 2])
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=Type.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "two"], ["column"]),
        helper.make_node("CumSum", ["attention_mask", "axis"], ["counted"]),
        helper.make_node("Gather", ["positions", "counted"], ["placed"]),
        helper.make_node("Add", ["words", "placed"], ["vectors"]),
    ]
    nodes += {
        "last": [helper.make_node("Gather", ["vectors", "minus_one"], ["logits"], axis=1)],
        "mean": [helper.make_node("ReduceMean", ["vectors"], ["logits"], axes=[1], keepdims=0)],
        "masked": [
            helper.make_node("Mul", ["vectors", "column"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "one"], ["logits"], keepdims=0),
        ],
    }[pooling]
    constants = {
        "table": VECTORS,
        "positions": np.random.default_rng(2).standard_normal((positions, 2)).astype(np.float32),
        "two": np.array([2]), "one": np.array([1]), "axis": np.array(1), "minus_one": np.array(-1),
    }  # fmt: skip
    return write(path, nodes, {"input_ids": ids, "attention_mask": ids}, {"logits": scores}, constants)


def import_with(tmp_path: Path, model: Path, folder: Path, succeeds: bool = True) -> str:
    (tmp_path / "labels.txt").write_text("bad\ngood\n")
    options = [f"--processor={folder}", f"--labels={tmp_path / 'labels.txt'}", "--size=length=8"]
    return imported(tmp_path / "storage", "model", model, *EXACT, *options, succeeds=succeeds)


@pytest.mark.parametrize("pooling", ["last", "masked"])
def test_a_text_is_padded_on_the_side_that_changes_no_answer(pooling: str, tmp_path: Path) -> None:
    import_with(tmp_path, pooled(tmp_path / "model.onnx", pooling), tokenizer_in(tmp_path / "tokenizer"))
    model = load_model(UPath(tmp_path / "storage"), "model", 1, 1)
    together, alone = answers(model, TEXTS), [answers(model, [text])[0] for text in TEXTS]
    assert model.processor is not None
    (tokens,) = model.processor.encode(TEXTS[:1])["attention_mask"].tolist()
    unpadded = {name: tensor[:, np.array(tokens, bool)] for name, tensor in model.processor.encode(TEXTS[:1]).items()}
    right = model.engine.run(unpadded)["logits"][0]
    model.engine.close()
    assert tokens[0] == (pooling == "masked")
    assert together == alone
    scores = [alone[0]["scores"][label] for label in ("bad", "good")]
    np.testing.assert_allclose(scores, np.exp(right) / np.exp(right).sum(), rtol=1e-5)


def test_a_model_that_reads_padding_on_either_side_is_refused(tmp_path: Path) -> None:
    told = import_with(tmp_path, pooled(tmp_path / "model.onnx", "mean"), tokenizer_in(tmp_path / "tokenizer"), False)
    assert "the model reads the padding of a text, whichever side it is on" in told


def test_an_answer_near_0_may_be_rounded_like_the_others(tmp_path: Path) -> None:
    """The model counts tokens, less those of the short text; each position rounds it by 1e-8."""
    folder = tokenizer_in(tmp_path / "tokenizer")
    count = len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode("film").ids)
    ids, scores = (Type.INT64, ["n", "length"]), (Type.FLOAT, ["n", 2])
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=Type.FLOAT),
        helper.make_node("ReduceSum", ["mask", "one"], ["counted"]),
        helper.make_node("Gather", ["rounding", "input_ids"], ["errors"]),
        helper.make_node("ReduceSum", ["errors", "one"], ["error"], keepdims=0),
        helper.make_node("Sub", ["counted", "count"], ["less"]),
        helper.make_node("Add", ["less", "error"], ["logits"]),
    ]
    constants = {
        "one": np.array([1]),
        "count": np.array([count], np.float32),
        "rounding": np.full((len(VECTORS), 2), 1e-8, np.float32),
    }
    inputs = {"input_ids": ids, "attention_mask": ids}
    import_with(tmp_path, write(tmp_path / "model.onnx", nodes, inputs, {"logits": scores}, constants), folder)


@pytest.mark.slow
def test_a_convolution_over_padding_is_found(tmp_path: Path) -> None:
    """Attention hides padding in this model, and its convolutions do not."""
    small = {"embedding_size": 32, "num_hidden_layers": 1}
    written(tmp_path / "model", "ConvBertForSequenceClassification", pad_token_id=1, **small)
    told = imported(tmp_path / "storage", "model", tmp_path / "model", *EXACT, succeeds=False)
    assert "the model reads the padding of a text" in told


def _settings(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "tokenizer_config.json"
        content = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return change


def _another_tokenizer(folder: Path) -> None:
    vocabulary = {f"word{index}": index for index in range(22)}
    given = Tokenizer.from_file(str(folder / "tokenizer.json"))
    content = json.loads(given.to_str())
    content["model"]["vocab"] = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4} | {
        word: index for word, index in vocabulary.items() if index > 4
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "positions", "words"),
    [
        (_another_tokenizer, 64, "has ids up to 21, and the model has embeddings for 21"),
        (lambda _: None, 20, "the model cannot run texts of 32 tokens"),
        (
            _settings(pad_token=None, eos_token=None),
            64,
            "has no padding token: set pad_token in tokenizer_config.json",
        ),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(
    damage: Callable[[Path], object], positions: int, words: str, tmp_path: Path
) -> None:
    folder = tokenizer_in(tmp_path / "tokenizer")
    damage(folder)
    told = import_with(tmp_path, pooled(tmp_path / "model.onnx", "masked", positions), folder, succeeds=False)
    assert words in told
    assert "Traceback" not in told


def test_a_tokenizer_that_transformers_reads_otherwise_is_refused(tmp_path: Path) -> None:
    """The file of transformers says that capitals count, the other one that they do not."""
    folder = tokenizer_in(tmp_path / "tokenizer")
    _settings(tokenizer_class="BertTokenizer", do_lower_case=False)(folder)
    told = import_with(tmp_path, pooled(tmp_path / "model.onnx", "masked"), folder, succeeds=False)
    assert "has the tokens" in told
    assert "if transformers also reads tokenizer_config.json: write both with save_pretrained" in told


def test_another_tokenizer_than_the_models_own_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "model", SEQUENCE, pad_token_id=1, num_hidden_layers=0)
    other = tokenizer_in(tmp_path / "tokenizer")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["good"], vocabulary["bad"] = vocabulary["bad"], vocabulary["good"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    told = imported(tmp_path / "storage", "model", tmp_path / "model", *EXACT, f"--processor={other}", succeeds=False)
    assert "and the model's own [2, " in told
    assert "leave out --processor" in told


def test_a_model_of_segments_gets_those_of_a_single_text(tmp_path: Path) -> None:
    """Its own folder has no tokenizer, as most ONNX files of BERT, so it takes the segments as a third tensor."""
    model = written(tmp_path / "model", SEQUENCE, pad_token_id=1)
    other = tokenizer_in(tmp_path / "tokenizer")
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    imported(tmp_path / "storage", "model", tmp_path / "model", *EXACT, f"--processor={other}")
    loaded = load_model(UPath(tmp_path / "storage"), "model", 1, 1)
    given = answers(loaded, TEXTS)
    loaded.engine.close()
    assert [spec.name for spec in loaded.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    ones = {spec.name: np.ones((1, 4), np.int64) for spec in loaded.inputs}
    with refused("tensor.range", "token_type_ids"):  # the model has two segments
        check_tensors({**ones, "token_type_ids": np.array([[0, 1, 2, 0]])}, loaded.inputs)
    expected = logits_of(model, other).softmax(1)
    np.testing.assert_allclose([[*answer["scores"].values()] for answer in given], expected, atol=1e-5)


def test_what_may_be_of_pairs_or_pads_otherwise_is_said(tmp_path: Path) -> None:
    written(tmp_path / "model", SEQUENCE, pad_token_id=7, num_hidden_layers=0)
    told = imported(tmp_path / "storage", "model", tmp_path / "model", *EXACT)
    assert "If it judges pairs of texts, as a reranker does, import the folder without its tokenizer" in told
    assert "config.json has the pad_token_id 7; the tokenizer's 1 is used" in told
