"""Audio clips for tests."""

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
SOUND_FIELDS = {"title": {"kind": "text"}, "sound": {"kind": "audio", "column": "file"}}


def tone(frequency: float, rate: int = RATE, seed: int = 0) -> NDArray[np.float64]:
    """Return a second of a tone in a little noise, from -1 to 1."""
    times = np.arange(rate) / rate
    noise = np.random.default_rng(seed).normal(0, 0.001, rate)
    return 0.5 * np.sin(2 * np.pi * frequency * times) + noise


def wav(samples: NDArray[Any], rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    """Return samples from -1 to 1 as a wav file. Samples of several channels are interleaved."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes((samples * (2 ** (8 * width - 1) - 1)).astype(f"<i{width}").tobytes())
    return buffer.getvalue()


def write_sounds(folder: Path, count: int = 16) -> Path:
    """Write a csv of low and high tones. Every fourth row lacks its clip."""
    lines = ["title,file,label"]
    for number in range(count):
        (folder / f"{number}.wav").write_bytes(wav(tone((300, 3000)[number % 2], seed=number)))
        lines.append(f"sound {number},{f'{number}.wav' if number % 4 < 3 else ''},{('low', 'high')[number % 2]}")
    (folder / "sounds.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder / "sounds.csv"
