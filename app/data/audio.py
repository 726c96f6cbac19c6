"""Log-mel spectrograms of audio clips: wav files, read by Python's ``wave`` and transformed with NumPy."""

import io
import math
import wave
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from upath import UPath

from app.config import AudioConfig, DataConfig
from app.data.examples import Input, Modality
from app.errors import DataError, RecipeError
from app.storage import write_atomically
from app.tensors import Tensors, TensorSpec

SETTINGS_FILE = "audio.json"
_FRAMES_PER_S, _WINDOW_S = 100, 0.025
_FLOOR = 1e-6
"""Added to the power, because silence has no logarithm."""
_MAX_MEASURED = 1000
"""Maximum number of clips from which the mean and the standard deviation are measured."""
_UNKNOWN_BYTES = 0x7FFF_0000
"""Streaming writers do not know the data size, and put this or more into the header."""
Samples = NDArray[np.float32]


class _Settings(AudioConfig):
    mean: float
    std: float
    """Of the log-mel values of the measured training clips."""


class AudioProcessor:
    """``log_mel``, float32 of shape (batch, bins, frames), scaled to mean 0 and standard deviation 1.

    A frame covers 10 ms. A clip is a wav file of 16-bit PCM. Its channels are averaged, and it is cut or padded with
    silence.
    """

    modality: ClassVar[Modality] = "audio"

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings

    @classmethod
    def fit(cls, inputs: Sequence[Input], config: DataConfig) -> Self:
        """Measure the mean and the standard deviation over evenly spaced training clips.

        Raises:
            RecipeError: ``data.audio.rate`` does not allow so many bins.
            DataError: a clip cannot be read.
        """
        audio = config.audio
        _require_filters(audio)
        measured = inputs[:: max(1, -(-len(inputs) // _MAX_MEASURED))]
        # Measured from silence, so that rounding cannot give silent clips a deviation.
        silence = math.log(_FLOOR)
        total, squares = 0.0, 0.0
        for item in measured:
            values = _log_mel(item, audio) - silence
            total, squares = total + float(values.sum()), squares + float((values**2).sum())
        count = len(measured) * audio.bins * _frames(audio)
        mean = total / count
        std = math.sqrt(max(0.0, squares / count - mean**2))
        # All clips may be silent.
        return cls(_Settings(**audio.model_dump(), mean=silence + mean, std=std if std > _FLOOR else 1.0))

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("log_mel", np.dtype(np.float32), (-1, self._settings.bins, _frames(self._settings))),)

    @property
    def facts(self) -> Mapping[str, int]:
        """``bins`` and ``frames`` of a spectrogram."""
        return {"bins": self._settings.bins, "frames": _frames(self._settings)}

    def encode(self, inputs: Sequence[Input]) -> Tensors:
        values = np.stack([_log_mel(item, self._settings) for item in inputs])
        return {"log_mel": ((values - self._settings.mean) / self._settings.std).astype(np.float32)}

    def save(self, folder: UPath) -> None:
        write_atomically(folder / SETTINGS_FILE, self._settings.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: UPath) -> Self:
        return cls(_Settings.model_validate_json((folder / SETTINGS_FILE).read_bytes()))


def require_recording(content: bytes) -> None:
    """Read a whole audio clip. Raises DataError if it cannot be read or ends too early."""
    _read_frames(content)


def _frames(config: AudioConfig) -> int:
    return max(1, round(config.seconds * _FRAMES_PER_S))


def _log_mel(item: Input, config: AudioConfig) -> NDArray[np.float64]:
    """Return the log-mel spectrogram of a clip, of shape (bins, frames)."""
    samples = _resampled(*_read_wav(item, config.seconds), config.rate)
    width, frames = round(_WINDOW_S * config.rate), _frames(config)
    starts = np.arange(frames) * config.rate // _FRAMES_PER_S
    # Windows are centred on their frames.
    padded = np.zeros(int(starts[-1]) + width, np.float32)
    samples = samples[: len(padded) - width // 2]
    padded[width // 2 : width // 2 + len(samples)] = samples
    windows = sliding_window_view(padded, width)[starts] * np.hanning(width)
    power = np.abs(np.fft.rfft(windows, _fft_size(width))) ** 2
    result: NDArray[np.float64] = np.log(_mel_filters(config.rate, config.bins) @ power.T + _FLOOR)
    return result


def _fft_size(width: int) -> int:
    """Return the smallest power of 2 that covers a window."""
    return 1 << (width - 1).bit_length()


@cache
def _mel_filters(rate: int, bins: int) -> NDArray[np.float64]:
    """Return triangular filters, evenly spaced on the mel scale (O'Shaughnessy 1987), of shape (bins, frequencies)."""
    highest = 2595.0 * np.log10(1.0 + rate / 2 / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(0.0, highest, bins + 2) / 2595.0) - 1.0)
    frequencies = np.fft.rfftfreq(_fft_size(round(_WINDOW_S * rate)), 1.0 / rate)
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    filters: NDArray[np.float64] = np.clip(np.minimum(rising, falling), 0.0, None)
    return filters


def _require_filters(config: AudioConfig) -> None:
    """Raise RecipeError if filters are so narrow that some lie between two frequencies."""

    def are_too_many(bins: int) -> bool:
        return not _mel_filters(config.rate, bins).any(axis=1).all()

    # No frequency is in more than two filters, so more bins than this need no try.
    most = min(config.bins, _fft_size(round(_WINDOW_S * config.rate)) + 3)
    if are_too_many(most):
        allowed = bisect_left(range(1, most), True, key=are_too_many)
        raise RecipeError(
            f"data.audio.bins is {config.bins:,}, and a rate of {config.rate:,} Hz allows at most {allowed:,}: "
            "lower data.audio.bins, or raise data.audio.rate"
        )


def _read_wav(item: Input, seconds: float) -> tuple[Samples, int]:
    """Return the first samples of a wav file, from -1 to 1 of shape (samples,), and the sample rate in Hz."""
    content, channels, rate = _read_frames(item, seconds)
    whole = len(content) // (2 * channels) * 2 * channels
    samples = np.frombuffer(content[:whole], "<i2").reshape(-1, channels).mean(1, dtype=np.float32) / 2**15
    return samples.astype(np.float32), rate


def _read_frames(item: Input, seconds: float | None = None) -> tuple[bytes, int, int]:
    """Return the first frames of a wav file (default: all), its number of channels, and its sample rate in Hz."""
    assert isinstance(item, bytes)
    try:
        with wave.open(io.BytesIO(item)) as file:
            channels, width, rate, promised = file.getparams()[:4]
            wanted = promised if seconds is None else min(promised, round(seconds * rate))
            content = file.readframes(wanted)
    # A size that is beyond the end is a RuntimeError without words.
    except (wave.Error, EOFError, RuntimeError) as error:
        raise DataError(
            f"a recording of {len(item):,} bytes cannot be read ({str(error) or 'it ends too early'}): expected a wav "
            "file of 16-bit PCM"
        ) from error
    if width != 2 or not rate:
        raise DataError(
            f"a recording has {8 * width}-bit samples at {rate:,} Hz: expected 16 bits, so convert it to 16-bit PCM"
        )
    frame_bytes = width * channels
    if (found := len(content) // frame_bytes) < wanted and promised * frame_bytes < _UNKNOWN_BYTES:
        raise DataError(
            f"a recording ends too early: it promises {promised:,} frames, of which {found:,} were found; record or "
            "copy it again"
        )
    return content, channels, rate


def _resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Return samples at another rate. Frequencies that both rates can represent are kept."""
    if rate == wanted or not len(samples):
        return samples
    count = max(1, round(len(samples) * wanted / rate))
    # ``irfft`` truncates the spectrum, or pads it with zeros.
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    resampled: Samples = (np.fft.irfft(spectrum, count) * count / len(samples)).astype(np.float32)
    return resampled
