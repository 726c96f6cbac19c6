"""Training with the rounding of int8: the same numbers as in the file, and a file nearer to PyTorch."""

import copy
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from app.compile.export import export_onnx, trace
from app.compile.quantization.finetune import RoundedProgram, Rounding, roundings_of, train_rounded
from app.compile.quantization.observe import observe
from app.compile.quantization.qdq import int8, write_quantized
from app.compile.quantization.scheme import find_layers, load_model
from app.compile.quantization.search import Verdict, find_quantization
from app.compile.quantization.smoothing import find_factors, smooth
from app.config import Int8FinetuneConfig
from app.engines.onnxruntime import open_oracle
from app.models.factory import logits_of
from app.repository.manifest import Quantization
from app.tensors import OUTPUT
from tests.quantizing import MINMAX, Subject


@pytest.mark.parametrize(
    "name", ["digits", "bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reviews", "resnet"))]
)
def test_every_layer_rounds_in_training_as_in_the_file(
    name: str, subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    given = subject(name)
    file, quantized = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    smooth(given.file, find_factors(given.file, given.samples), file)
    # A residual branch, which training does not round, is left in float here, too.
    layers = [type(layer)(layer.name, layer.activations[:1], layer.weight) for layer in find_layers(load_model(file))]
    thresholds = {value: histogram.largest for value, histogram in observe(file, layers, given.samples).items()}
    write_quantized(file, layers, thresholds, int8(), quantized)
    roundings = roundings_of(file, layers, thresholds)
    program = RoundedProgram(trace(given.model.eval(), given.specs, given.samples[0]).module(), roundings)
    assert program.count == len(layers)
    batch = given.samples[0]
    with closing(open_oracle(quantized)) as engine, torch.no_grad():
        in_file, in_float = engine.run(batch)[OUTPUT], given.logits(batch)
        in_training = logits_of(program.run(*(torch.from_numpy(batch[spec.name]) for spec in given.specs))).numpy()
    # In a few numbers the two round a tie differently, which depends on the processor. Most rows have no such number.
    apart, rounded = (np.linalg.norm(other - in_file, axis=1) for other in (in_training, in_float))
    assert np.median(apart) < 0.01 * np.median(rounded)


def test_a_file_that_fails_passes_once_it_is_fine_tuned(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    digits = subject("digits")
    torch.manual_seed(0)
    config = Int8FinetuneConfig(epochs=12, lr=2e-5)
    losses: list[float] = []
    before = {name: value.clone() for name, value in digits.model.state_dict().items()}

    def finetune(roundings: Mapping[str, Rounding], path: Path) -> None:
        model = copy.deepcopy(digits.model)
        program = trace(model, digits.specs, digits.samples[0])
        model.load_state_dict(
            train_rounded(program, roundings, digits.model, lambda _: digits.samples, config, lambda _: None)
        )
        export_onnx(model, digits.specs, digits.samples[0], path)

    def evaluate(path: Path) -> Verdict:
        losses.append(digits.evaluate(path).loss)
        return Verdict(() if losses[-1] < 0.9 * losses[0] else ("too far",), losses[-1])

    target, lines = tmp_path / "int8.onnx", list[str]()
    found = find_quantization(digits.file, digits.samples, MINMAX, evaluate, target, lines.append, finetune)
    assert found == Quantization(method="minmax", smoothing=0.0, exempt=(), finetuned=True)
    assert digits.evaluate(target).loss == losses[1] < 0.9 * losses[0]
    assert [line.split(":")[0] for line in lines] == ["int8, minmax", "int8, minmax, fine-tuned"]
    assert all(torch.equal(value, before[name]) for name, value in digits.model.state_dict().items())
