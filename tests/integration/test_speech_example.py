"""The documented speech task: synthesized words are recognized, compiled, and asked for over HTTP."""

import base64
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from upath import UPath

from app.compile.run import compile_model
from app.config import load_recipe
from app.errors import DataError
from app.repository.repository import Repository
from app.runs import Run, execute
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.tasks import prepare
from tests.helpers import ROOT, train_alone
from tests.serving import serving
from tests.wavs import wav

RECIPE = str(ROOT / "docs/examples/speech.yaml")
RATE = 8000
WORDS = {"ah-ee": ("a", "i"), "ee-ah": ("i", "a"), "oo-ah": ("u", "a"), "oo-ee": ("u", "i")}
FORMANTS = {"a": (750, 1200), "i": (300, 2300), "u": (320, 800)}
"""The first two resonances of each vowel, in Hz."""


def vowel(name: str, seconds: float, pitch: float) -> NDArray[np.float64]:
    """Return a vowel: harmonics of a voice, louder near the formants."""
    times = np.arange(int(seconds * RATE)) / RATE
    harmonics = pitch * np.arange(1, int(RATE / 2 / pitch))
    loudness = sum(1.0 / (1.0 + ((harmonics - formant) / 90.0) ** 2) for formant in FORMANTS[name])
    envelope = np.sin(np.pi * times / seconds) ** 0.5
    return envelope * (loudness[:, None] * np.sin(2 * np.pi * harmonics[:, None] * times)).sum(0)


def write_words(folder: Path, count: int) -> list[tuple[bytes, str]]:
    """Write ``count`` recordings of each word, by voices of their own and in noise. Return them with their words."""
    generator, written = np.random.default_rng(3), []
    for word, vowels in WORDS.items():
        (folder / word).mkdir(parents=True)
        for number in range(count):
            pitch = generator.uniform(90, 260)
            spoken = np.concatenate([vowel(name, generator.uniform(0.15, 0.4), pitch) for name in vowels])
            spoken *= generator.uniform(0.2, 0.8) / np.abs(spoken).max()
            start = np.zeros(int(generator.uniform(0, 0.2) * RATE))
            samples = np.concatenate([start, spoken])
            content = wav(np.clip(samples + generator.normal(0, 0.02, len(samples)), -1, 1), RATE)
            (folder / word / f"{number}.wav").write_bytes(content)
            written.append((content, word))
    return written


@pytest.mark.slow
def test_a_speech_task_is_trained_compiled_and_served(tmp_path: Path) -> None:
    words = write_words(tmp_path / "recordings", 100)
    given = [f"storage={tmp_path}/storage", f"data.source={tmp_path}/recordings", "train.workers=1"]
    trained = train_alone(*given, recipe=RECIPE)
    assert trained["metrics"]["val_average_recall"] > 0.85
    report = Path(trained["artifacts"]["report"]).read_text(encoding="utf-8")
    assert "Worst samples" in report
    assert "bytes of audio" in report
    fast = ["compile.engines=[openvino]", "compile.batch_sizes=[1, 8]", "compile.precisions=[fp32, int8]"]
    recipe = load_recipe(RECIPE, [*given, *fast])
    result = execute(Run.start("compile", recipe), compile_model)
    assert result.status == "succeeded", result.error
    assert result.metrics["accuracy"]["score"]["metric"] == "average_recall"
    version = VersionConfig.of(
        recipe.storage or "", Repository(UPath(recipe.storage)).manifest("speech", 1), recipe.serve
    )
    asked = words[::8]
    with serving() as server:
        server.run(server.endpoint.update(EndpointConfig(models={"speech": DeployedModel(production=version)})))
        url = f"http://{server.http}/v1/models/speech/predict"
        inputs = [base64.b64encode(content).decode() for content, _ in asked]
        answer = httpx.post(url, json={"inputs": inputs}, timeout=30)
        refused = [httpx.post(url, json={"inputs": each}, timeout=30) for each in ("Ö", "bm8gd2F2")]
    assert answer.status_code == 200, answer.text
    found = [item["label"] for item in answer.json()["predictions"]]
    assert np.mean([label == word for label, (_, word) in zip(found, asked, strict=True)]) > 0.85
    assert [each.status_code for each in refused] == [400, 400]
    assert "a recording is not base64" in refused[0].text
    assert "a recording of 6 bytes cannot be read" in refused[1].text


def _cut_short(folder: Path) -> None:
    (folder / "ah-ee/1.wav").write_bytes(b"RIFF")


def _empty(folder: Path) -> None:
    folder.rename(folder.with_name("away"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            _cut_short,
            "has 1 files that cannot be decoded among 20 rows, more than 1%, such as .*ah-ee/1.wav'",
        ),
        (_empty, "recordings' does not exist: give"),
    ],
)
def test_recordings_that_cannot_be_read_are_refused(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    write_words(tmp_path / "recordings", 5)
    damage(tmp_path / "recordings")
    with pytest.raises(DataError, match=words):
        prepare(load_recipe(RECIPE, [f"data.source={tmp_path}/recordings"]))
