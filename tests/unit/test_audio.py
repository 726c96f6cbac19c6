"""Log-mel spectrograms of audio clips, also as a field of samples."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from upath import UPath

from app.config import AudioConfig, DataConfig
from app.data.audio import AudioProcessor
from app.data.records import RecordProcessor
from app.errors import DataError
from app.tasks import prepare
from tests.records import recipe_of, with_data
from tests.wavs import SOUND_FIELDS, tone, wav, write_sounds


def processor_of(*recordings: bytes, **audio: Any) -> AudioProcessor:
    return AudioProcessor.fit(recordings, DataConfig(source="x", audio=AudioConfig(**audio)))


def log_mel(processor: AudioProcessor, recording: bytes) -> NDArray[np.float32]:
    spectrogram: NDArray[np.float32] = processor.encode([recording])["log_mel"][0]
    return spectrogram


def test_a_tone_is_loudest_in_its_mel_bin_at_any_rate() -> None:
    processor = processor_of(wav(tone(300)), wav(tone(3000)))
    mel = 2595 * np.log10(1 + np.array([300, 3000]) / 700)
    expected = mel / (2595 * np.log10(1 + 8000 / 700)) * 41 - 1
    for frequency, place in zip((300, 3000), expected, strict=True):
        for rate in (8000, 16_000, 44_100):
            spectrogram = log_mel(processor, wav(tone(frequency, rate=rate), rate))
            assert spectrogram.shape == (40, 100)
            # A wave that starts and stops abruptly has all frequencies.
            assert np.all(np.abs(spectrogram[:, 5:-5].argmax(axis=0) - place) < 1)


def test_recordings_are_cut_and_filled_up_with_silence(tmp_path: Path) -> None:
    processor = processor_of(wav(tone(500)), seconds=0.5, bins=20)
    assert (processor.facts, processor.inputs[0].shape) == ({"bins": 20, "frames": 50}, (-1, 20, 50))
    whole, half = log_mel(processor, wav(tone(500))), log_mel(processor, wav(tone(500)[:4000]))
    np.testing.assert_array_equal(whole[:, :24], half[:, :24])
    silence = log_mel(processor, wav(np.zeros(0)))
    np.testing.assert_array_equal(half[:, 27:], silence[:, 27:])
    assert len(np.unique(silence)) == 1
    both_channels = np.repeat(tone(500), 2)
    np.testing.assert_allclose(log_mel(processor, wav(both_channels, channels=2)), whole, atol=1e-5)
    processor.save(UPath(tmp_path))
    np.testing.assert_array_equal(log_mel(AudioProcessor.load(UPath(tmp_path)), wav(tone(500))), whole)
    assert np.isfinite(log_mel(processor_of(wav(np.zeros(99))), wav(np.zeros(99)))).all()


def test_a_recording_may_be_a_field(tmp_path: Path) -> None:
    recipe = with_data(recipe_of(write_sounds(tmp_path), SOUND_FIELDS), audio=AudioConfig(seconds=0.25))
    data: Any = prepare(recipe)
    assert data.facts["sound_frames"] == 25
    processor = data.processor
    assert isinstance(processor, RecordProcessor)
    content = base64.b64encode((tmp_path / "1.wav").read_bytes()).decode()
    tensors = processor.encode([json.dumps({"sound": content}), json.dumps({"title": "no sound"})])
    assert tensors["sound_present"].tolist() == [[1], [0]]
    assert tensors["sound_log_mel"][0].std() > 0.1
    assert not tensors["sound_log_mel"][1].any()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"RIFF", r"row 2: the file '1\.wav' cannot be read .*expected a wav file of 16-bit PCM"),
        (wav(tone(300), width=1), r"row 2: .* 8-bit samples at 16,000 Hz: expected 16 bits"),
    ],
)
def test_a_recording_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    table = write_sounds(tmp_path)
    (tmp_path / "1.wav").write_bytes(content)
    with pytest.raises(DataError, match=words):
        prepare(recipe_of(table, SOUND_FIELDS))
