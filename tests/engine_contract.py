"""What every engine must do, on a model that was exported as jobs.compile does."""

import functools
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from app.compile.export import export_onnx
from app.config import DataConfig
from app.data.text import TextProcessor
from app.engines.base import Engine, Signature, infer_many
from app.errors import EngineError, RequestError
from app.models.text import encoder_classifier
from app.tensors import OUTPUT, Tensors, TensorSpec

TEXTS = ["a good book", "bad", "neither good nor bad but long", "good"] * 4
PROCESSOR = TextProcessor.fit(TEXTS, DataConfig(source="-", buckets=[8, 16, 32]))
SIGNATURE = Signature(PROCESSOR.inputs, (TensorSpec(OUTPUT, np.dtype(np.float32), (-1, 3)),))
MOST_ROWS = 9


def rows(count: int, length: int = 16) -> Tensors:
    """A batch of texts of which the second half is padding."""
    ids = np.random.default_rng(count).integers(3, PROCESSOR.facts["vocab_size"], (count, length))
    mask = np.ones((count, length), np.int64)
    mask[:, (length + 1) // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@functools.cache
def encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {name: PROCESSOR.facts[name] for name in ("vocab_size", "max_length", "unknown_id")}
    return encoder_classifier(**sizes, num_labels=3, layers=1, width=16, heads=2).eval()


@functools.cache
def exported() -> bytes:
    """The same as an ONNX file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(encoder(), PROCESSOR.inputs, PROCESSOR.encode(TEXTS), path)
        return path.read_bytes()


class EngineContract:
    """Inherit, and say with a fixture ``opener`` how the engine is opened, with two streams."""

    @pytest.fixture
    def onnx(self, tmp_path: Path) -> Path:
        (tmp_path / "model.onnx").write_bytes(exported())
        return tmp_path / "model.onnx"

    @pytest.fixture
    def engine(self, opener: Callable[[], Engine]) -> Engine:
        return opener()

    @pytest.mark.parametrize("length", [1, 16, 32])
    def test_it_answers_as_pytorch_does_for_every_number_of_rows(self, engine: Engine, length: int) -> None:
        for count in range(1, MOST_ROWS + 1):
            batch = rows(count, length)
            with torch.no_grad():
                expected = encoder()(**{name: torch.from_numpy(array) for name, array in batch.items()}).numpy()
            assert np.abs(engine.infer(batch)[OUTPUT] - expected).max() <= 1e-4

    def test_a_row_scores_the_same_alone_and_in_a_batch(self, engine: Engine) -> None:
        batch = rows(7)
        together = engine.infer(batch)[OUTPUT]
        alone = [
            engine.infer({name: array[row : row + 1] for name, array in batch.items()})[OUTPUT] for row in range(7)
        ]
        assert np.abs(together - np.concatenate(alone)).max() <= 1e-5

    def test_requests_of_any_shape_run_together(self, engine: Engine) -> None:
        requests = [rows(1), rows(3, 8), rows(2), dict(reversed(rows(4, 8).items()))]
        answers = infer_many(engine, requests, lambda _: 9)
        for request, answer in zip(requests, answers, strict=True):
            assert np.abs(answer[OUTPUT] - engine.infer(request)[OUTPUT]).max() <= 1e-5

    def test_threads_at_once(self, engine: Engine) -> None:
        expected = {count: engine.infer(rows(count))[OUTPUT] for count in (1, 2, 3)}
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

    def test_an_answer_is_the_callers_to_keep(self, engine: Engine) -> None:
        answer = engine.infer(rows(2))[OUTPUT]
        before = answer.copy()
        for count in (2, 3):
            engine.infer(rows(count, 8))
        assert np.array_equal(answer, before)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"input_ids": np.zeros((1, 4), np.float32)}, "input 'input_ids' is float32: expected int64"),
            ({"input_ids": np.zeros((4,), np.int64)}, "input 'input_ids' has shape [4]"),
            ({"other": np.zeros((1, 4), np.int64)}, "input 'other' is not known"),
            ({"attention_mask": np.ones((2, 16), np.int64)}, "expected the same rows and length"),
        ],
    )
    def test_wrong_tensors_are_named(self, engine: Engine, change: Tensors, words: str) -> None:
        with pytest.raises(RequestError) as refused:
            engine.infer({**rows(1), **change})
        assert words in str(refused.value)

    def test_what_was_checked_is_run_without_another_check(self, engine: Engine) -> None:
        assert np.array_equal(engine.run(rows(2))[OUTPUT], engine.infer(rows(2))[OUTPUT])

    def test_it_closes_and_opens_again(self, opener: Callable[[], Engine]) -> None:
        engine = opener()
        expected = engine.infer(rows(2))[OUTPUT]
        engine.close()
        with pytest.raises(EngineError, match="the engine is closed"):
            engine.infer(rows(2))
        assert np.array_equal(opener().infer(rows(2))[OUTPUT], expected)
