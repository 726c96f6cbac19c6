"""Log-mel spectrograms of audio clips, read by libsndfile, resampled by soxr and transformed with NumPy."""

import io
import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from upath import UPath

from app.config import AudioConfig, DataConfig
from app.data.examples import Input, Modality
from app.errors import DataError, RecipeError
from app.storage import write_atomically
from app.tensors import Tensors, TensorSpec

if TYPE_CHECKING:
    from soundfile import SoundFile

SETTINGS_FILE = "audio.json"
FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
_FRAMES_PER_S, _WINDOW_S = 100, 0.025
_FLOOR = 1e-6
"""Added to the power, because silence has no logarithm."""
_MAX_MEASURED = 1000
"""Maximum number of clips from which the mean and the standard deviation are measured."""
_UNKNOWN_BYTES, _UNKNOWN_FRAMES = 0x7FFF_0000, 2**62
"""Streaming writers do not know the data size. Such a header of a wav or flac file has this or more."""
_MAX_SECONDS = 600.0
"""The highest ``data.audio.seconds``. No more of a clip is decoded, because a small file may last for hours."""
_MAX_SAMPLES_PER_S = 64 * 48_000
_BLOCK_FRAMES = 4096
"""Frames that are decoded at once: those of a FLAC block, so that few are lost where one is damaged."""
_MAX_SAMPLE = 2.0**31
"""Files of floats may have any values. Larger ones, whose power would overflow, are no sound."""
Samples = NDArray[np.float32]


class _Settings(AudioConfig):
    mean: float
    std: float
    """Of the log-mel values of the measured training clips."""


class AudioProcessor:
    """``log_mel``, float32 of shape (batch, bins, frames), scaled to mean 0 and standard deviation 1.

    A frame covers 10 ms. A clip is a wav, flac, ogg or mp3 file. Its channels are averaged, and it is cut or padded
    with silence.
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
    """Decode an audio clip. Raises DataError if it cannot be read or ends too early."""
    with _opened(content) as file:
        for _ in _blocks(file, content, _MAX_SECONDS):
            pass


def _frames(config: AudioConfig) -> int:
    return max(1, round(config.seconds * _FRAMES_PER_S))


def _log_mel(item: Input, config: AudioConfig) -> NDArray[np.float64]:
    """Return the log-mel spectrogram of a clip, of shape (bins, frames)."""
    samples = _read(item, config)
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
        ).of("audio.bins", "data.audio.bins")


def _read(item: Input, config: AudioConfig) -> Samples:
    """Return the first samples of a clip at the configured rate, of shape (samples,). Full scale is -1 to 1."""
    import soxr  # most endpoints have no audio

    with _opened(item) as file:
        stream = soxr.ResampleStream(file.samplerate, config.rate, 1, dtype="float32")
        parts = [stream.resample_chunk(block) for block in _blocks(file, item, config.seconds)]
    samples: Samples = np.concatenate([*parts, stream.resample_chunk(np.zeros(0, np.float32), last=True)])
    return samples


@contextmanager
def _opened(item: Input) -> "Iterator[SoundFile]":
    """Open a clip. Errors of libsndfile inside the context become a DataError."""
    import soundfile

    assert isinstance(item, bytes)
    try:
        with soundfile.SoundFile(io.BytesIO(item)) as file:
            if file.format not in FORMATS:
                raise DataError(f"a recording is a {file.format} file: convert it to wav, flac, ogg or mp3").of(
                    "audio.format"
                )
            if file.samplerate * file.channels > _MAX_SAMPLES_PER_S:
                raise DataError(
                    f"a recording has {file.channels:,} channels at {file.samplerate:,} Hz: expected at most "
                    f"{_MAX_SAMPLES_PER_S:,} samples a second, so convert it to a lower rate or fewer channels"
                ).of("audio.rate")
            yield file
    except soundfile.SoundFileError as error:
        raise DataError(
            f"a recording of {len(item):,} bytes cannot be read ({getattr(error, 'error_string', error)}): expected a "
            "wav, flac, ogg or mp3 file"
        ).of("audio.unreadable") from error


def _blocks(file: "SoundFile", content: Input, seconds: float) -> Iterator[Samples]:
    """Yield the first samples, with the channels averaged. Raises DataError if the clip ends too early."""
    promised = _promised(file)
    needed = round(seconds * file.samplerate)
    found = 0
    while found < min(needed, promised):
        block = _read_block(file, min(needed, promised) - found)
        if not len(block):
            raise DataError(
                f"a recording ends too early: it promises {promised:,} frames, of which {found:,} were found; record "
                "or copy it again"
            ).of("audio.torn")
        if not (np.abs(block) <= _MAX_SAMPLE).all():
            raise DataError("a recording has samples that are no numbers, or far from -1 to 1: write it again").of(
                "audio.values"
            )
        found += len(block)
        yield block.mean(1, dtype=np.float32)
    if found < needed and file.format == "OGG" and _lacks_last_page(content):
        raise DataError(
            f"a recording ends too early: after {found:,} frames its last page is missing; copy it again"
        ).of("audio.torn")


def _read_block(file: "SoundFile", frames: int) -> Samples:
    """Return the next samples, of shape (frames, channels): empty at the end, or where a frame is damaged."""
    from soundfile import LibsndfileError

    try:
        block: Samples = file.read(min(frames, _BLOCK_FRAMES), dtype="float32", always_2d=True)
    except LibsndfileError:
        block = np.zeros((0, file.channels), np.float32)
    return block


def _promised(file: "SoundFile") -> int:
    """Return the number of frames in the header. libsndfile cuts that of a wav file, and only its log has both."""
    if file.frames >= _UNKNOWN_FRAMES:
        raise DataError("a recording does not tell its length, as a stream: convert it again, into a file").of(
            "audio.length"
        )
    cut = re.search(
        r"Block Align +: (\d+).*^data : (\d+) \(should be (\d+)\)", file.extra_info, re.DOTALL | re.MULTILINE
    )
    frames: int = file.frames
    if not cut or int(cut[2]) >= _UNKNOWN_BYTES:
        return frames
    block, promised, found = map(int, cut.groups())
    # A block is a frame, or many frames of a compressed wav file.
    return max(promised // max(1, block), frames * promised // max(1, found))


def _lacks_last_page(ogg: Input) -> bool:
    """Return whether an Ogg file has no complete page that ends its stream (RFC 3533)."""
    assert isinstance(ogg, bytes)
    start = ogg.rfind(b"OggS")
    flags, sizes = ogg[start + 5 : start + 6], ogg[start + 27 :][: int.from_bytes(ogg[start + 26 : start + 27])]
    return not (flags and flags[0] & 4) or start + 27 + len(sizes) + sum(sizes) > len(ogg)
