"""Log-mel spectrograms of audio clips, also as a field of samples."""

import base64
import io
import resource
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import soundfile
from numpy.typing import NDArray
from pyarrow import parquet
from scipy.signal import resample_poly
from upath import UPath

from app.config import AudioConfig, DataConfig
from app.data.audio import AudioProcessor, require_recording
from app.data.records import RecordProcessor
from app.tasks import prepare
from tests.records import recipe_of, with_data
from tests.wavs import RATE, SOUND_FIELDS, tone, wav, write_sounds
from tests.wording import refused


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
    tensors = processor.encode([{"sound": content}, {"title": "no sound"}])
    assert tensors["sound_present"].tolist() == [[1], [0]]
    assert tensors["sound_log_mel"][0].std() > 0.1
    assert not tensors["sound_log_mel"][1].any()


@pytest.mark.parametrize("content", [b"RIFF", wav(tone(300))[:20_044]], ids=["four bytes", "a torn one"])
def test_a_recording_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    table = write_sounds(tmp_path)
    (tmp_path / "1.wav").write_bytes(content)
    with refused("file.unreadable"):
        prepare(recipe_of(table, SOUND_FIELDS))


def test_a_recording_of_bytes_that_cannot_be_read_is_not_shown(tmp_path: Path) -> None:
    columns = {"title": ["a"], "file": [b"RIFF" + bytes(2000)], "label": ["low"]}
    parquet.write_table(pa.table(columns), tmp_path / "sounds.parquet")
    with refused("file.unreadable") as raised:
        prepare(recipe_of(tmp_path / "sounds.parquet", SOUND_FIELDS))
    assert len(str(raised.value)) < 400


def with_size(recording: bytes, at: int, size: int) -> bytes:
    """Return a wav file with another size at an offset in its header: 16 is that of the format, 40 of the samples."""
    return recording[:at] + struct.pack("<I", size) + recording[at + 4 :]


def test_a_recording_that_ends_too_early_is_refused() -> None:
    whole, processor = wav(tone(500)), processor_of(wav(tone(500)), seconds=0.5)
    for end in (44, 45, 44 + 15_999):
        with refused("audio.torn"):
            processor.encode([whole[:end]])
    # The spectrogram needs no more.
    np.testing.assert_array_equal(log_mel(processor, whole[: 44 + 16_000]), log_mel(processor, whole))
    with refused("audio.unreadable"):
        processor.encode([with_size(whole, 16, 0xFFFFFFFF)])


def test_a_stream_of_unknown_size_is_read_to_its_end() -> None:
    short = wav(tone(500)[:4000])
    processor = processor_of(short)
    for size in (0xFFFFFFFF, 0xFFFFFFFF - 44, 0x7FFFF000):
        streamed = with_size(with_size(short, 4, 0xFFFFFFFF), 40, size)
        np.testing.assert_array_equal(log_mel(processor, streamed), log_mel(processor, short))
    assert np.isfinite(log_mel(processor, with_size(short, 40, 0))).all()


def written(samples: NDArray[Any], form: str, subtype: str | None = None, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=form, subtype=subtype)
    return buffer.getvalue()


FORMATS = [("WAV", subtype) for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")]
FORMATS += [("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]


@pytest.mark.parametrize(("form", "subtype"), FORMATS)
def test_a_clip_is_the_same_in_every_format(form: str, subtype: str) -> None:
    processor, samples = processor_of(wav(tone(300)), wav(tone(3000))), tone(500)
    stereo = np.stack([samples, samples], axis=1)
    expected = log_mel(processor, written(samples, "WAV", "DOUBLE"))
    found = log_mel(processor, written(stereo, form, subtype))
    # Fewer bits and lossy encoders change the quietest bins.
    lossy = subtype in ("VORBIS", "OPUS", "MPEG_LAYER_III", "PCM_U8", "PCM_16")
    loud = expected > expected.max() - 1.0 if lossy else expected > -np.inf
    assert np.abs(found - expected)[loud].max() < (0.2 if lossy else 0.01)


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000])
def test_clips_are_resampled_as_by_a_reference(rate: int) -> None:
    times = np.arange(rate) / rate
    samples = 0.3 * np.sin(2 * np.pi * 440 * times) + 0.2 * np.sin(2 * np.pi * 2500 * times)
    reference = resample_poly(samples, RATE, rate, window=("kaiser", 12.0))
    processor = processor_of(wav(tone(300)), wav(tone(3000)))
    found = log_mel(processor, written(samples, "WAV", "FLOAT", rate))[:, 5:-5]
    expected = log_mel(processor, written(reference, "WAV", "FLOAT"))[:, 5:-5]
    # What is left at other frequencies depends on the filter.
    loud = expected > expected.max() - 1.5
    assert loud.sum() > 400
    assert np.abs(found - expected)[loud].max() < 0.005


@pytest.mark.parametrize("form", ["WAV IMA_ADPCM", "WAV", "FLAC", "MP3", "OGG"])
def test_a_file_that_was_copied_in_part_is_refused(form: str) -> None:
    content = written(np.random.default_rng(0).normal(0.0, 0.1, 30 * RATE), *form.split())
    require_recording(content)
    for end in (len(content) // 2, len(content) - 100):
        with refused("audio.torn"):
            require_recording(content[:end])


def test_an_ogg_file_without_its_only_page_is_no_silence() -> None:
    with refused("audio.torn"):
        processor_of(written(tone(500), "OGG")[:-1])


def test_a_flac_stream_of_unknown_length_is_refused() -> None:
    content = bytearray(written(tone(500), "FLAC"))
    content[21:26] = bytes([content[21] & 0xF0, 0, 0, 0, 0])
    with refused("audio.length"):
        processor_of(bytes(content))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_samples_that_are_no_sound_are_refused(value: float) -> None:
    samples = tone(500)
    samples[100] = value
    with refused("audio.values"):
        processor_of(written(samples, "WAV", "DOUBLE" if value == 1e38 else "FLOAT"))


@pytest.mark.parametrize("rate", [1, 50, 1_000_000, 3_000_000])
def test_rates_far_from_the_models_are_resampled(rate: int) -> None:
    assert np.isfinite(log_mel(processor_of(wav(tone(300))), wav(np.full(min(rate, 10**6), 0.5), rate))).all()


def test_other_formats_and_impossible_rates_are_refused() -> None:
    with refused("audio.format"):
        processor_of(written(tone(500), "AIFF"))
    with refused("audio.rate"):
        processor_of(wav(np.zeros(8), 4_000_000, channels=2))


def test_a_small_file_that_lasts_long_is_read_for_seconds() -> None:
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", 48_000, 2, format="FLAC") as file:
        for _ in range(120):
            file.write(np.zeros((480_000, 2), np.int16))
    content = buffer.getvalue()
    assert len(content) < 2**19, "twenty minutes"
    processor = processor_of(wav(tone(500)))
    began_s, used = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert np.isfinite(log_mel(processor, content)).all()
    require_recording(content)
    assert time.process_time() - began_s < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 64 * 1024, "ten minutes take 230 MB"


def test_an_endpoint_without_audio_does_not_load_its_libraries() -> None:
    code = "import sys, app.data.records; print([name for name in ('soundfile', 'soxr') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_recordings_are_measured_in_memory_that_their_number_does_not_change() -> None:
    recordings = [wav(tone(frequency)) for frequency in range(200, 1200, 10)]
    processor_of(recordings[0])
    tracemalloc.start()
    try:
        processor = processor_of(*recordings)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # All spectrograms take 3.2 MB.
    assert peak < 2e6
    scaled = processor.encode(recordings)["log_mel"].astype(np.float64)
    assert (scaled.mean(), scaled.std()) == pytest.approx((0.0, 1.0), abs=1e-6)


def test_bins_that_would_be_empty_are_refused() -> None:
    with refused("audio.bins", "data.audio.bins"):
        processor_of(wav(tone(300)), rate=8000, bins=128)
    with refused("audio.bins", "data.audio.bins"):
        processor_of(wav(tone(300)), rate=8000, bins=10**9)
    spectrogram = log_mel(processor_of(wav(tone(300)), rate=8000, bins=86), wav(tone(300)))
    assert spectrogram.std(axis=1).all()
