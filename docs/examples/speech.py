"""Speech as a task of one's own: which word is in a recording.

A recording becomes a log-mel spectrogram of one second, which a small convolutional network reads.
"""

import io
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn import functional
from upath import UPath

from app.config import DataConfig, Recipe
from app.data.examples import Examples, Input, Modality
from app.data.in_memory import prepare_examples
from app.data.labelled import LabelledData
from app.data.targets import Outputs
from app.errors import DataError
from app.storage import to_path, write_atomically
from app.tasks import Metric
from app.tasks.classification import Classification
from app.tasks.metrics import Accuracy
from app.tensors import Tensors, TensorSpec

BINS, FRAMES = 40, 100
"""Of a spectrogram: mel bins, and frames of 10 ms, so that it covers one second."""
_SETTINGS_FILE = "log_mel.json"


class _Settings(BaseModel):
    rate: int
    """Samples a second, of every recording."""
    mean: float
    std: float
    """Of all values in the training recordings."""


class LogMel:
    """``log_mel``, float32 of shape (recordings, bins, frames), scaled to mean 0 and deviation 1.

    A recording is a wav file of 16-bit PCM. It is cut, or filled up with silence, to one second.
    """

    modality: ClassVar[Modality] = "audio"

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings

    @classmethod
    def fit(cls, inputs: Sequence[Input], config: DataConfig) -> Self:  # noqa: ARG003
        """Learn the rate, the mean and the deviation of the training recordings."""
        rate = _read_wav(inputs[0])[1]
        values = torch.stack([_log_mel(item, rate) for item in inputs])
        return cls(_Settings(rate=rate, mean=float(values.mean()), std=float(values.std())))

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("log_mel", np.dtype(np.float32), (-1, BINS, FRAMES)),)

    @property
    def facts(self) -> Mapping[str, int]:
        return {"bins": BINS, "frames": FRAMES}

    def encode(self, inputs: Sequence[Input]) -> Tensors:
        """Return a batch. Raises DataError for a recording that cannot be read or has another rate."""
        values = torch.stack([_log_mel(item, self._settings.rate) for item in inputs])
        return {"log_mel": ((values - self._settings.mean) / self._settings.std).numpy()}

    def save(self, folder: UPath) -> None:
        write_atomically(folder / _SETTINGS_FILE, self._settings.model_dump_json().encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        return cls(_Settings.model_validate_json((folder / _SETTINGS_FILE).read_bytes()))


@dataclass(frozen=True)
class AverageRecall(Metric):
    """Mean over the labels of the share of their recordings that are recognized. Rare words count as much as others."""

    name = "average_recall"
    num_labels: int = 0

    def bind(self, targets: Outputs) -> Self:
        """Return the metric for these labels."""
        return type(self)(targets.num_outputs)

    @property
    def size(self) -> int:  # type: ignore[override]
        """Two sums for each label."""
        return 2 * self.num_labels

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the recognized recordings of each label, then all of each."""
        right = targets[outputs.argmax(-1) == targets]
        return torch.cat([part.bincount(minlength=self.num_labels) for part in (right, targets)])

    def value(self, sums: Tensor) -> float:
        right, given = sums.chunk(2)
        return float((right[given > 0] / given[given > 0]).mean())


class Speech(Classification):
    """Recordings with one word each, in a folder for each word: ``recordings/yes/a.wav``."""

    processor, metrics = LogMel, (AverageRecall(), Accuracy())

    def prepare(self, recipe: Recipe) -> LabelledData:
        return prepare_examples(_read_folder(recipe.data.source), recipe.data, self.processor, self.targets)


def net(num_labels: int, bins: int, width: int = 16) -> nn.Module:
    """Return a convolutional network that halves the spectrogram three times, and takes the mean over time."""
    return _Net(num_labels, bins, width)


class _Net(nn.Module):
    def __init__(self, num_labels: int, bins: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for level in range(3):
            layers += [nn.Conv2d(width * level or 1, width * (level + 1), 3, 2, 1), nn.ReLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(3 * width * -(-bins // 8), num_labels)

    def forward(self, log_mel: Tensor) -> Tensor:
        """Return logits of shape (recordings, labels)."""
        return self.head(self.layers(log_mel[:, None]).mean(-1).flatten(1))  # type: ignore[no-any-return]


def _log_mel(item: Input, rate: int) -> Tensor:
    """Return the logarithms of a recording's mel spectrogram, of shape (bins, frames)."""
    samples = _read_wav(item, rate)[0]
    hop = rate // FRAMES
    window = torch.hann_window(5 * hop // 2)  # 25 ms
    padded = functional.pad(samples[:rate], (0, max(0, rate - len(samples))))
    spectrum = torch.stft(padded, _fft_size(rate), hop, len(window), window, return_complex=True).abs().square()
    return (_mel_filters(rate) @ spectrum[:, :FRAMES] + 1e-6).log()


def _fft_size(rate: int) -> int:
    """Return the power of 2 that covers 25 ms."""
    return 1 << (rate // 40 - 1).bit_length()


@cache
def _mel_filters(rate: int) -> Tensor:
    """Return triangular filters, evenly spaced on the mel scale (O'Shaughnessy 1987), of shape (bins, frequencies)."""
    highest = 2595.0 * np.log10(1.0 + rate / 2 / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(0.0, highest, BINS + 2) / 2595.0) - 1.0)
    frequencies = np.fft.rfftfreq(_fft_size(rate), 1.0 / rate)
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    return torch.from_numpy(np.clip(np.minimum(rising, falling), 0.0, None)).float()


def _read_wav(item: Input, expected_rate: int | None = None) -> tuple[Tensor, int]:
    """Return the samples of a wav file, float32 from -1 to 1 of shape (samples,), and how many make a second."""
    assert isinstance(item, bytes)
    try:
        with wave.open(io.BytesIO(item)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise DataError(f"a recording of {len(item)} bytes cannot be read ({error}): expected a wav file") from error
    if width != 2 or rate != (expected_rate or rate):
        expected = f"{expected_rate or rate:,} samples of 16 bits a second"
        raise DataError(f"a recording has {rate:,} samples of {8 * width} bits a second: expected {expected}")
    samples = np.frombuffer(content, "<i2").reshape(-1, channels).mean(1, dtype=np.float32) / 2**15
    return torch.from_numpy(samples), rate


def _read_folder(source: str) -> Examples:
    """Return the recordings of a folder, with the names of their folders as labels."""
    files = sorted(to_path(source).glob("*/*.wav"), key=str)
    if not files:
        raise DataError(f"data.source {source!r} has no recordings: expected LABEL/NAME.wav")
    contents: list[Input] = []
    rate = None
    for file in files:
        contents.append(file.read_bytes())
        try:
            rate = _read_wav(contents[-1], rate)[1]
        except DataError as error:
            raise DataError(f"data.source {source!r}, {file.parent.name}/{file.name}: {error}") from error
    return Examples("audio", contents, [file.parent.name for file in files])
