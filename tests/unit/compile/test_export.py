"""Exporting modules to ONNX: what is written, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from app.compile.export import export_onnx
from app.engines.onnxruntime import open_oracle
from app.errors import CompileError
from app.models.factory import logits_of
from app.models.huggingface import sequence_classifier
from app.tensors import OUTPUT, TensorSpec
from tests.wording import refused


class Odd(torch.nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(given.unsqueeze(-1) @ given.unsqueeze(-2)).real


class Branching(torch.nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given if given.sum() > 0 else -given


class Mute(torch.nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        raise AssertionError


def refuse_in_silence(*_: object, **__: object) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Mute(), "torch.export cannot trace it: AssertionError"),
        (Odd(), r"at node linalg_eig of body.1 \(tests.unit.compile.test_export.Odd\), No ONNX function found"),
        (Branching(), r"torch.export cannot trace it: .*test_export.py\", line \d+, in forward return given if"),
    ],
)
def test_what_cannot_be_exported_is_named(layer: torch.nn.Module, words: str, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"body": torch.nn.Sequential(torch.nn.Linear(4, 4), layer)})
    model.forward = lambda x: model["body"](x)  # type: ignore[method-assign]
    spec = TensorSpec("x", np.dtype(np.float32), (-1, 4))
    with pytest.raises(CompileError, match=words):
        export_onnx(model, (spec,), {"x": np.ones((2, 4), np.float32)}, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_an_exporter_that_fails_without_a_word_is_an_error_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.onnx.export", refuse_in_silence)
    monkeypatch.setattr("torch.export.ExportedProgram.run_decompositions", refuse_in_silence)
    spec = TensorSpec("input", np.dtype(np.float32), (-1, 4))
    with refused("export.fails"):
        export_onnx(torch.nn.Linear(4, 4), (spec,), {"input": np.ones((2, 4), np.float32)}, tmp_path / "model.onnx")


def test_a_model_that_knows_so_many_positions_takes_texts_up_to_the_longest(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = sequence_classifier("bert", vocab_size=9, max_length=12, num_labels=2, **sizes).eval()
    names = ("input_ids", "attention_mask")
    specs = tuple(TensorSpec(name, np.dtype(np.int64), (-1, -1), max_length=12, values_below=9) for name in names)
    export_onnx(model, specs, {name: np.ones((2, 4), np.int64) for name in names}, tmp_path / "model.onnx")
    engine = open_oracle(tmp_path / "model.onnx")
    for length in (1, 5, 12):
        rows = {
            "input_ids": np.arange(3 * length).reshape(3, length) % 9,
            "attention_mask": np.tri(3, length, length - 3, dtype=np.int64),
        }
        rows["attention_mask"][:, 0] = 1
        with torch.no_grad():
            expected = logits_of(model(**{name: torch.from_numpy(array) for name, array in rows.items()}))
        np.testing.assert_allclose(engine.infer(rows)[OUTPUT], expected, atol=1e-5)
