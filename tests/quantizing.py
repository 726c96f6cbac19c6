"""Small models that are quantized, and how near each is to PyTorch."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ResNetConfig, ResNetForImageClassification

from app.compile.export import export_onnx
from app.compile.quantization.search import Verdict, find_quantization
from app.config import CalibrationConfig
from app.engines.onnxruntime import open_oracle
from app.models.factory import logits_of
from app.models.image import small_cnn
from app.models.text import encoder_classifier
from app.repository.manifest import Quantization
from app.tensors import OUTPUT, Tensors, TensorSpec

MINMAX = CalibrationConfig(method="minmax")
FLOATS = np.dtype(np.float32)


@dataclass(frozen=True)
class Subject:
    """A model as it is quantized."""

    model: nn.Module
    specs: tuple[TensorSpec, ...]
    samples: list[Tensors]
    folder: Path

    @property
    def file(self) -> Path:
        path = self.folder / "model.onnx"
        if not path.exists():
            export_onnx(self.model.eval(), self.specs, self.samples[0], path)
        return path

    def logits(self, batch: Tensors) -> NDArray[np.float32]:
        with torch.no_grad():
            return logits_of(self.model(**{name: torch.from_numpy(array) for name, array in batch.items()})).numpy()

    def cosine(self, answers: Callable[[Tensors], Tensors]) -> float:
        """The mean over rows, with what all rows have in common taken away, so that it says more."""
        expected = np.concatenate([self.logits(batch) for batch in self.samples])
        given = np.concatenate([answers(batch)[OUTPUT] for batch in self.samples])
        a, b = expected - expected.mean(0), given - expected.mean(0)
        return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).mean())

    def evaluate(self, path: Path, at_least: float = 0.99) -> Verdict:
        with closing(open_oracle(path)) as engine:
            cosine = self.cosine(engine.infer)
        return Verdict(() if cosine >= at_least else (f"the cosine is {cosine:.4f}",), 1 - cosine)

    def quantized(self, config: CalibrationConfig = MINMAX, **bounds: float) -> tuple[Path, Quantization]:
        target = self.folder / "int8.onnx"
        found = find_quantization(
            self.file, self.samples, config, lambda path: self.evaluate(path, **bounds), target, lambda line: None
        )
        return target, found


def images(channels: int, size: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("pixel_values", FLOATS, (-1, channels, size, size)),)


POSITIONS = 32
TEXT = tuple(
    TensorSpec(name, np.dtype(np.int64), (-1, -1), max_length=POSITIONS) for name in ("input_ids", "attention_mask")
)


def pictures(channels: int, size: int) -> list[Tensors]:
    generator = np.random.default_rng(0)
    shape = (8, channels, size, size)
    return [{"pixel_values": generator.normal(size=shape).astype(np.float32)} for _ in range(4)]


def sentences(words: int) -> list[Tensors]:
    """Rows of several lengths, padded."""
    generator = np.random.default_rng(0)
    batches: list[Tensors] = []
    for length in (8, 16, 16, 24):
        mask = (np.arange(length) < generator.integers(4, length + 1, (8, 1))).astype(np.int64)
        batches.append({"input_ids": generator.integers(1, words, (8, length)) * mask, "attention_mask": mask})
    return batches


class HuggingFace(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs).logits


class Picture(HuggingFace):
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return super().forward(pixel_values=pixel_values)


class Sentence(HuggingFace):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


def digits(folder: Path) -> Subject:
    """Trained for a few steps on real pictures."""
    data = load_digits()
    pixels = (data.images[:, None] / 16).astype(np.float32)
    model = small_cnn(10, 1, width=16)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(60):
        rows = slice(step * 16, step * 16 + 16)
        loss = nn.functional.cross_entropy(model(torch.from_numpy(pixels[rows])), torch.from_numpy(data.target[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    samples: list[Tensors] = [{"pixel_values": pixels[start : start + 64]} for start in range(960, 1600, 64)]
    return Subject(model, images(1, 8), samples, folder)


def reviews(folder: Path) -> Subject:
    model = encoder_classifier(1000, 2, POSITIONS, 1, layers=1, width=64, heads=4)
    return Subject(model, TEXT, sentences(1000), folder)


def bert(folder: Path) -> Subject:
    config = BertConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=POSITIONS,
        num_labels=8,
    )
    return Subject(Sentence(BertForSequenceClassification(config)), TEXT, sentences(1000), folder)


def resnet(folder: Path) -> Subject:
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], layer_type="bottleneck", num_labels=8
    )
    model, samples = Picture(ResNetForImageClassification(config)), pictures(3, 32)
    model.train()
    with torch.no_grad():
        for batch in samples * 20:  # which teaches the batch norms
            model(torch.from_numpy(batch["pixel_values"]))
    return Subject(model, images(3, 32), samples, folder)


SUBJECTS = {subject.__name__: subject for subject in (digits, reviews, bert, resnet)}


class Sensitive(nn.Module):
    """Layers in a row; before some of them one channel is a thousand times the others, and counts for nothing."""

    def __init__(self, sensitive: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.gain = nn.Parameter(torch.ones(6, 32))
        with torch.no_grad():
            for index in sensitive:
                self.gain[index, 0] = 1000.0
                self.layers[index].weight[:, 0] /= 1e6

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer, gain in zip(self.layers, self.gain, strict=True):
            given = given + torch.tanh(layer(given * gain))
        return given


def row_of_layers(sensitive: Sequence[int], folder: Path) -> Subject:
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    samples: list[Tensors] = [{"given": generator.normal(size=(16, 32)).astype(np.float32)} for _ in range(2)]
    return Subject(Sensitive(sensitive), (TensorSpec("given", FLOATS, (-1, 32)),), samples, folder)
