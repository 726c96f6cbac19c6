"""What every engine must do, on a model that was exported as jobs.compile does."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from app.compile.export import OUTPUT, export_onnx
from app.config import DataConfig
from app.data.text import TextProcessor
from app.engines.base import Engine
from app.engines.onnxruntime import OnnxRuntimeEngine
from app.engines.openvino import OpenVinoEngine
from app.errors import CompileError, EngineError, RequestError
from app.models.text import encoder_classifier
from app.serving.batch import infer_together
from app.tensors import Tensors

TEXTS = ["a good book", "bad", "neither good nor bad but long", "good"] * 4
PROCESSOR = TextProcessor.fit(TEXTS, DataConfig(source="-", buckets=[8, 16, 32]))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return encoder_classifier(**PROCESSOR.facts, num_labels=3, layers=1, width=16, heads=2).eval()


@pytest.fixture(scope="module")
def onnx(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    export_onnx(model, PROCESSOR.inputs, PROCESSOR.encode(TEXTS), path)
    return path


@pytest.fixture(params=[OnnxRuntimeEngine, OpenVinoEngine])
def engine(request: pytest.FixtureRequest, onnx: Path) -> Engine:
    return request.param(onnx, threads=1)


def rows(count: int, length: int = 16) -> Tensors:
    ids = np.random.default_rng(count).integers(3, PROCESSOR.facts["vocab_size"], (count, length))
    mask = np.ones((count, length), np.int64)
    mask[:, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 16), (5, 32), (64, 8)])
def test_it_answers_as_pytorch_does(engine: Engine, model: torch.nn.Module, count: int, length: int) -> None:
    batch = rows(count, length)
    batch["attention_mask"][:, 0] = 1
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(array) for name, array in batch.items()}).numpy()
    assert np.abs(engine.infer(batch)[OUTPUT] - expected).max() <= 1e-4


def test_a_row_scores_the_same_alone_and_in_a_batch(engine: Engine) -> None:
    batch = rows(7)
    together = engine.infer(batch)[OUTPUT]
    alone = [engine.infer({name: array[row : row + 1] for name, array in batch.items()})[OUTPUT] for row in range(7)]
    assert np.abs(together - np.concatenate(alone)).max() <= 1e-5


def test_requests_of_any_shape_run_together(engine: Engine) -> None:
    requests = [rows(1), rows(3, 8), rows(2), dict(reversed(rows(4, 8).items()))]
    answers = infer_together(engine, requests)
    for request, answer in zip(requests, answers, strict=True):
        assert np.abs(answer[OUTPUT] - engine.infer(request)[OUTPUT]).max() <= 1e-5


def test_two_threads_at_once(engine: Engine) -> None:
    expected = {count: engine.infer(rows(count))[OUTPUT] for count in (1, 2)}
    wrong: list[int] = []

    def ask(count: int) -> None:
        answers = [engine.infer(rows(count))[OUTPUT] for _ in range(50)]
        wrong.extend(count for answer in answers if not np.allclose(answer, expected[count], atol=1e-5))

    threads = [threading.Thread(target=ask, args=(count,)) for count in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": np.zeros((1, 4), np.float32)}, "input 'input_ids' is float32: expected int64"),
        ({"input_ids": np.zeros((4,), np.int64)}, "input 'input_ids' has shape [4]"),
        ({"other": np.zeros((1, 4), np.int64)}, "input 'other' is not known"),
        ({"attention_mask": np.ones((2, 16), np.int64)}, "expected the same rows and length"),
    ],
)
def test_wrong_tensors_are_named(engine: Engine, change: Tensors, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        engine.infer({**rows(1), **change})
    assert words in str(refused.value)


def test_it_closes_and_opens_again(engine: Engine, onnx: Path) -> None:
    expected = engine.infer(rows(2))[OUTPUT]
    engine.close()
    assert np.array_equal(type(engine)(onnx, threads=1).infer(rows(2))[OUTPUT], expected)


@pytest.mark.parametrize("engine_class", [OnnxRuntimeEngine, OpenVinoEngine])
def test_a_broken_file_is_refused(engine_class: type, onnx: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.onnx").write_bytes(onnx.read_bytes()[:1000])
    with pytest.raises(EngineError, match=r"cut\.onnx"):
        engine_class(tmp_path / "cut.onnx", threads=1)


def test_a_model_that_cannot_be_exported_says_why(tmp_path: Path) -> None:
    class Unexportable(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            if input_ids.sum() > attention_mask.sum():  # depends on the values
                return input_ids.float()
            return attention_mask.float()

    with pytest.raises(CompileError, match="cannot be exported to ONNX"):
        export_onnx(Unexportable(), PROCESSOR.inputs, PROCESSOR.encode(TEXTS), tmp_path / "model.onnx")
